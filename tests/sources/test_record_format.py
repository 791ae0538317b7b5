import pytest

from latentcache.sources.record_format import ALPACA, OPENAI, SHAREGPT, TEXT, detect_format


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "a", "id": 1}, TEXT),
        ({"messages": [{"role": "user", "content": "a"}]}, OPENAI),
        ({"messages": []}, OPENAI),
        ({"conversations": [{"from": "human", "value": "a"}]}, SHAREGPT),
        ({"instruction": "a", "output": "b"}, ALPACA),
        ({"messages": [{"role": "user", "content": "a"}], "text": "rendered"}, OPENAI),
        ({"instruction": "a"}, None),
        ({"prompt": "a"}, None),
        ({"messages": [], "conversations": []}, None),
        ({}, None),
    ],
)
def test_a_form_is_known_by_its_fields(record, form):
    assert detect_format(record) == form


def test_tags_of_the_other_form_are_taken():
    found = detect_format({"messages": [{"from": "human", "value": "a"}]})
    assert (found.form, found.messages, found.role_tag) == ("sharegpt", "messages", "from")
    found = detect_format({"conversations": [{"role": "user", "content": "a"}]})
    assert (found.form, found.messages, found.role_tag) == ("openai", "conversations", "role")
