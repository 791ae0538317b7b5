import json

import pytest

from latentcache.sources.records import (
    ALPACA,
    OPENAI,
    SHAREGPT,
    TEXT,
    Message,
    chat_record,
    detect_format,
    record_from_json,
    record_json,
    record_size,
    text_record,
)


def turns(**changes):
    asked = Message(role="user", content="2 + 2?")
    said = Message(**{"role": "assistant", "content": "4", "learned": True, **changes})
    return (asked, said)


def test_where_a_record_stands_is_no_part_of_its_content():
    assert text_record("a.jsonl", 1, "hello").content == text_record("b.jsonl", 9, "hello").content
    assert chat_record("a", 1, turns()).content == chat_record("b", 2, turns()).content


@pytest.mark.parametrize(
    "other",
    [
        {"content": "5"},
        {"role": "tool"},
        {"learned": False},
        {"fields": (("tool_calls", "[]"),)},
    ],
)
def test_all_of_a_turn_is_part_of_the_content(other):
    assert chat_record("a", 1, turns()).content != chat_record("a", 1, turns(**other)).content


def test_tools_and_their_order_are_part_of_the_content():
    one, two = json.dumps([{"a": 1, "b": 2}]), json.dumps([{"b": 2, "a": 1}])
    contents = {chat_record("a", 1, turns(), tools).content for tools in ("", one, two)}
    assert len(contents) == 3


def test_the_size_of_a_record_has_all_that_a_template_may_write():
    assert record_size(text_record("a", 1, "hello")) == 5
    assert record_size(chat_record("a", 1, turns())) == 7
    fields = (("reasoning_content", "y" * 20), ("tool_calls", "z" * 300))
    assert record_size(chat_record("a", 1, turns(fields=fields), "[4000]")) == 7 + 20 + 300 + 6


def test_a_text_is_no_conversation():
    assert text_record("a", 1, '[[],""]').content != chat_record("a", 1, ()).content


def test_half_a_surrogate_pair_is_rejected():
    with pytest.raises(UnicodeEncodeError):
        text_record("a", 1, "\ud800")
    with pytest.raises(UnicodeEncodeError):
        chat_record("a", 1, turns(content="\ud800"))


def test_records_travel_as_json():
    for record in (text_record("a", 1, ""), chat_record("a", 1, turns(fields=(("x", "1"),)), "[1]")):
        assert record_from_json(json.loads(json.dumps(record_json(record)))) == record


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
