import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_templates import CHATML, COUNTING, MISTRAL, UNASKED, tagged, untagged

from latentcache.encoders.text.chat import MARK, ChatRenderer, SpecialTokens
from latentcache.errors import UnusableSampleError, UsageError
from latentcache.sources.records import Message, chat_record

NAMES = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<start_of_turn>", "<end_of_turn>")  # fmt: skip
CONTROL = SpecialTokens(
    {"added_tokens": [{"id": n, "content": name, "special": True} for n, name in enumerate(NAMES)]}
)


def renderer(template, **options):
    special = (("bos_token", "<s>"), ("eos_token", "</s>"))
    return ChatRenderer(template, CONTROL, special=special, options=tuple(options.items()), split_control=True)


def say(*turns, **last):
    messages = [Message(role=role, content=content, learned=role == "assistant") for role, content in turns]
    if last:
        messages[-1] = Message(**{"role": "assistant", "content": messages[-1].content, "learned": True, **last})
    return chat_record("a", 1, tuple(messages))


def learned(template, record, **options):
    rendered = renderer(template, **options).render(record)
    return [rendered.text[begin:end] for begin, end in rendered.spans]


TWO = say(("user", "Hi"), ("assistant", "Hello!"), ("user", "And?"), ("assistant", "Bye.\nBye."))


@pytest.mark.parametrize("make", [tagged, untagged])
def test_a_turn_with_weight_0_has_no_loss(make):
    messages = [Message(role="user", content="a"), Message(role="assistant", content="b", learned=False)]
    messages += [Message(role="user", content="c"), Message(role="assistant", content="d", learned=True)]
    assert learned(make(CHATML), chat_record("a", 1, tuple(messages))) == ["d<|im_end|>"]


def test_a_header_that_is_not_prompted_for_is_not_learned():
    assert learned(UNASKED, TWO) == ["Hello!<|im_end|>", "Bye.\nBye.<|im_end|>"]


def test_a_template_that_rewrites_earlier_turns():
    assert learned(COUNTING, TWO) == ["Hello!<|im_end|>", "Bye.\nBye.<|im_end|>"]


def test_a_rejected_role_order_is_reported_with_the_template_message():
    with pytest.raises(UnusableSampleError, match="roles must alternate") as caught:
        learned(untagged(MISTRAL), say(("user", "a"), ("user", "b"), ("assistant", "c")))
    assert caught.value.slug == "template"


@pytest.mark.parametrize("template", ["{{ messages[7].content }}", "{{ messages + 1 }}", "{{ 1 // 0 }}"])
def test_a_template_that_fails_rejects_the_record(template):
    with pytest.raises(UnusableSampleError) as caught:
        learned(template, TWO)
    assert caught.value.slug == "template"


def test_a_template_cannot_reach_python():
    with pytest.raises(UnusableSampleError):
        learned("{{ ''.__class__.__mro__[1].__subclasses__() }}", TWO)


def test_a_syntax_error_is_reported_with_its_line():
    with pytest.raises(UsageError) as caught:
        renderer("a\n{% for %}").render(TWO)
    assert "line 2" in caught.value.where


ADDED = [
    {"id": 7, "content": "<|end|>", "special": True},
    {"id": 8, "content": "<|end|>>", "special": True},
    {"id": 9, "content": "<tool>", "special": False},
]
ADDED_TOKENS = SpecialTokens({"added_tokens": ADDED})


def test_special_tokens_match_longest_first():
    assert ADDED_TOKENS.ids == {"<|end|>": 7, "<|end|>>": 8}
    assert ADDED_TOKENS.count("<|end|> <|end|>> <tool> <|end|") == 2
    assert SpecialTokens({"added_tokens": []}).count("anything") == 0


@given(
    st.lists(st.sampled_from(["<|end|>", "a", "<|end|>>", "é", f"{MARK}<|end|>{MARK}", " "]), max_size=12), st.data()
)
def test_positions_move_with_the_text(pieces, data):
    text = "".join(pieces)
    borders = [len("".join(pieces[:n])) for n in range(len(pieces) + 1)]
    places = sorted(data.draw(st.lists(st.sampled_from(borders), max_size=4)))
    rewritten, moved = ADDED_TOKENS.rewrite(text, places)
    assert rewritten == ADDED_TOKENS.rewrite(text, [])[0]
    for position, new in zip(places, moved, strict=True):
        assert rewritten[:new] == ADDED_TOKENS.rewrite(text[:position], [])[0]
