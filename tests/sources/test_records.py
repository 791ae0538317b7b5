import json
from dataclasses import replace

import pytest

from latentcache.errors import UnusableSampleError
from latentcache.sources.records import (
    ALPACA,
    CHAT,
    COMPLETION,
    SHAREGPT,
    TEXT,
    Message,
    chat_record,
    detect_format,
    map_record,
    record_size,
    text_record,
)


def question(**changes):
    user = Message(role="user", content="2 + 2?")
    assistant = Message(**{"role": "assistant", "content": "4", "learned": True, **changes})
    return (user, assistant)


def test_the_content_hash_ignores_the_location():
    assert text_record("a.jsonl", 1, "hello").content == text_record("b.jsonl", 9, "hello").content
    plain = chat_record("a", 1, question()).content
    assert plain == chat_record("b", 2, question()).content
    changes = {"content": "5"}, {"role": "tool"}, {"learned": False}, {"fields": (("tool_calls", "[]"),)}
    others = [chat_record("a", 1, question(**other)).content for other in changes]
    others += [
        chat_record("a", 1, question(), tools).content for tools in ('[{"a": 1, "b": 2}]', '[{"b": 2, "a": 1}]')
    ]
    assert len({plain, *others}) == 1 + len(others)


def test_the_size_of_a_record_counts_all_text():
    fields = (("reasoning_content", "y" * 20), ("tool_calls", "z" * 300))
    assert record_size(text_record("a", 1, "hello")) == 5
    assert record_size(chat_record("a", 1, question(fields=fields), "[4000]")) == 7 + 20 + 300 + 6


@pytest.mark.parametrize(
    ("record", "form"),
    [
        ({"text": "a", "id": 1}, TEXT),
        ({"messages": [{"role": "user", "content": "a"}]}, CHAT),
        ({"messages": []}, CHAT),
        ({"conversations": [{"from": "human", "value": "a"}]}, SHAREGPT),
        ({"conversations": [{"role": "user", "content": "a"}]}, replace(CHAT, messages="conversations")),
        ({"messages": [{"from": "human", "value": "a"}]}, replace(SHAREGPT, messages="messages")),
        ({"instruction": "a", "output": "b"}, ALPACA),
        ({"prompt": "a", "completion": "b"}, COMPLETION),
        ({"messages": [{"role": "user", "content": "a"}], "text": "rendered"}, CHAT),
        ({"messages": [], "prompt": "a", "chosen": [], "rejected": []}, CHAT),
    ],
)
def test_a_form_is_known_by_its_fields(record, form):
    assert detect_format(record) == form


@pytest.mark.parametrize(
    ("record", "slug", "words"),
    [
        ({"instruction": "a"}, "record-field", "found instruction"),
        ({"question": "a", "answer": "b"}, "record-field", "found question, answer"),
        ({"messages": [], "conversations": []}, "record-field", "expected one of text, messages"),
        ({}, "record-field", "found no fields"),
        # TRL formats for other trainers.
        ({"prompt": "a"}, "not-for-sft", "a prompt without a completion"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "not-for-sft", "a prompt without a completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "not-for-sft", "preferences"),
        ({"chosen": [], "rejected": []}, "not-for-sft", "preferences"),
        ({"prompt": "a", "completion": "b", "label": True}, "not-for-sft", "feedback"),
        ({"prompt": "a", "completions": ["b"], "labels": [True]}, "not-for-sft", "labels of steps"),
        ({"input_ids": [1]}, "not-for-sft", "token ids already"),
    ],
)
def test_unsupported_records_are_named(record, slug, words):
    with pytest.raises(UnusableSampleError, match=words) as caught:
        detect_format(record)
    assert caught.value.slug == slug


def mapped(record, form):
    return map_record(record, form, source="a.jsonl", line=7)


def turns(record, form):
    return [(m.role, m.content, m.learned) for m in mapped(record, form).messages]


def cause(record, form):
    with pytest.raises(UnusableSampleError) as caught:
        mapped(record, form)
    return caught.value.slug, caught.value.where


def test_alpaca_with_history_joins_instruction_and_input_and_learns_old_answers():
    record = {"instruction": "do", "input": "this", "output": "done", "history": [["q", "a"]], "system": "be kind"}
    assert turns(record, ALPACA) == [
        ("system", "be kind", False),
        ("user", "q", False),
        ("assistant", "a", True),
        ("user", "do\nthis", False),
        ("assistant", "done", True),
    ]


@pytest.mark.parametrize("empty", ["", None])
def test_an_instruction_that_is_empty_adds_no_line(empty):
    assert turns({"instruction": empty, "input": "this", "output": "x"}, ALPACA)[0] == ("user", "this", False)
    assert turns({"instruction": "do", "input": empty, "output": "x"}, ALPACA)[0] == ("user", "do", False)
    assert cause({"input": "this", "output": "x"}, ALPACA) == ("record-field", "instruction")


def test_sharegpt_with_all_tags():
    call = '{"name": "look", "arguments": {"x": 1.5}}'
    first, rest = (("system", "s"), ("human", "weather?")), (("observation", "rain"), ("gpt", "rain"))
    record = shared(*first, ("function_call", call), *rest, tools='[{"name": "look"}]')
    assert turns(record, SHAREGPT) == [
        ("system", "s", False),
        ("user", "weather?", False),
        ("assistant", "", True),
        ("tool", "rain", False),
        ("assistant", "rain", True),
    ]
    record = mapped(record, SHAREGPT)
    ((name, calls),) = record.messages[2].fields
    assert (name, json.loads(calls)[0]["function"]) == ("tool_calls", {"name": "look", "arguments": {"x": 1.5}})
    assert json.loads(record.tools) == [{"type": "function", "function": {"name": "look"}}]


def test_openai_messages():
    call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    record = {
        "messages": [
            {"role": "developer", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "assistant", "content": "4", "reasoning_content": "hm", "weight": 0},
            {"role": "user", "content": "more"},
            {"role": "assistant", "content": "5", "train": True, "id": "left out"},
        ]
    }
    assert turns(record, CHAT) == [
        ("developer", "be kind", False),
        ("user", "ab", False),
        ("assistant", "", True),
        ("tool", "4", False),
        ("assistant", "4", False),
        ("user", "more", False),
        ("assistant", "5", True),
    ]
    messages = mapped(record, CHAT).messages
    assert json.loads(dict(messages[2].fields)["tool_calls"])[0]["function"]["arguments"] == {"x": 1}
    assert dict(messages[3].fields) == {"tool_call_id": '"c1"'}
    assert dict(messages[4].fields) == {"reasoning_content": '"hm"'}
    assert messages[6].fields == ()


def test_calls_as_json_in_the_content():
    call = {"name": "look", "arguments": {"x": 1}}
    calls = [{"type": "function", "function": call}]
    for turn in {"content": json.dumps(call)}, {"content": json.dumps([call])}, {"content": "", "tool_calls": calls}:
        record = openai(("user", "weather?"), ("function_call", ""), ("tool", "rain"), ("assistant", "rain"))
        record["messages"][1] |= turn
        answers = [("assistant", "", True), ("tool", "rain", False), ("assistant", "rain", True)]
        assert turns(record, CHAT)[1:] == answers
        ((name, spelled),) = mapped(record, CHAT).messages[1].fields
        assert (name, json.loads(spelled)) == ("tool_calls", calls)
    assert cause(openai(("user", "a"), ("function_call", "{")), CHAT) == ("record-field", "messages[1].content")


TWO, HUMAN = (("user", "a"), ("assistant", "b")), ("human", "a")
ASKED, IMAGE = [{"role": "user", "content": "a"}], [{"type": "image_url"}]


def openai(*turns_, **more):
    return {"messages": [{"role": role, "content": content} for role, content in turns_], **more}


def shared(*turns_, **more):
    return {"conversations": [{"from": name, "value": value} for name, value in turns_], **more}


def answered(**turn):
    """A question and an answer with further fields."""
    return {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **turn}]}


def called(value):
    return shared(HUMAN, ("function_call", value))


HALF, FIRST_CALL = "\ud800", "messages[1].tool_calls[0]"
CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": "\\udfff"}'}}


@pytest.mark.parametrize(
    ("record", "form", "slug", "where"),
    [
        ([], TEXT, "record-field", ""),
        ({"text": ""}, TEXT, "record-empty", "text"),
        ({"text": 5}, TEXT, "record-field", "text"),
        ({"body": "a"}, TEXT, "record-field", "text"),
        ({"text": "\ud800"}, TEXT, "record-unicode", ""),
        ({"instruction": "a", "output": None}, ALPACA, "no-answer", "output"),
        ({"instruction": "a", "output": ["x", "y"]}, ALPACA, "no-answer", "output"),
        ({"instruction": ["a"], "output": "b"}, ALPACA, "record-field", "instruction"),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, ALPACA, "record-field", "history[0]"),
        ({"instruction": "a", "output": "b", "history": "q"}, ALPACA, "record-field", "history"),
        ({"messages": []}, CHAT, "record-empty", "messages"),
        ({"messages": "a"}, CHAT, "record-field", "messages"),
        ({"messages": ["a"]}, CHAT, "record-field", "messages[0]"),
        ({"messages": [{"content": "a"}]}, CHAT, "record-field", "messages[0].role"),
        (openai(("user", "a")), CHAT, "no-answer", "messages"),
        (openai(("robot", "a"), ("assistant", "c")), CHAT, "role-order", "messages[0].role"),
        (openai(*TWO, images=["a.png"]), CHAT, "not-for-sft", "images"),
        ({"text": "<image> a", "image": "a.png"}, TEXT, "not-for-sft", "image"),
        ({"prompt": "a", "completion": "b", "video": "a.mp4"}, COMPLETION, "not-for-sft", "video"),
        (openai(*TWO, chat_template_kwargs=[1]), CHAT, "record-field", "chat_template_kwargs"),
        ({"prompt": "a", "completion": None}, COMPLETION, "no-answer", "completion"),
        ({"prompt": ASKED, "completion": "b"}, COMPLETION, "record-field", "completion"),
        ({"prompt": ASKED, "completion": ASKED}, COMPLETION, "no-answer", "completion"),
        (openai(("user", None), ("assistant", "c")), CHAT, "record-field", "messages[0].content"),
        (openai(("user", "a"), ("assistant", None)), CHAT, "record-field", "messages[1].content"),
        (openai(("user", IMAGE), ("assistant", "c")), CHAT, "record-field", "messages[0].content[0]"),
        (openai(*TWO, tools={"a": 1}), CHAT, "record-field", "tools"),
        (openai(*TWO, tools="["), CHAT, "record-field", "tools"),
        (shared(HUMAN), SHAREGPT, "no-answer", "conversations"),
        (answered(role="user", train=True), CHAT, "record-field", "messages[1]"),
        (answered(weight=0.5), CHAT, "record-field", "messages[1].weight"),
        (answered(train="no"), CHAT, "record-field", "messages[1].train"),
        (answered(loss=False), CHAT, "record-field", "messages[1].loss"),
        (answered(train_detail=[{"train": False}]), CHAT, "record-field", "messages[1].train_detail"),
        (answered(tool_calls={}), CHAT, "record-field", "messages[1].tool_calls"),
        (answered(tool_calls=[{"function": {}}]), CHAT, "record-field", FIRST_CALL),
        *(
            (answered(tool_calls=[{"function": {"name": "f", "arguments": arguments}}]), CHAT, "record-field",
             f"{FIRST_CALL}.function.arguments")
            for arguments in ("[]", "{bad")
        ),
        (answered(reasoning_content=float("inf")), CHAT, "record-field", "messages[1]"),
        (called("not json"), SHAREGPT, "record-field", "conversations[1].value"),
        (called('{"name": "f", "arguments": "{bad"}'), SHAREGPT, "record-field",
         "conversations[1].value[0].arguments"),
        (called('[{"name": "f"}, {"name": 5}]'), SHAREGPT, "record-field", "conversations[1].value[1]"),
        (openai(("user", "\\ud is fine"), ("assistant", HALF)), CHAT, "record-unicode", ""),
        (openai(*TWO, tools=[{"name": "f", HALF: 1}]), CHAT, "record-unicode", ""),
        (openai(*TWO, tools='[{"name": "\\ud800"}]'), CHAT, "record-unicode", ""),
        (answered(content=None, tool_calls=[CALL]), CHAT, "record-unicode", ""),
        ({"id": HALF, "instruction": "a", "output": "b", "history": [["q", HALF]]}, ALPACA, "record-unicode", ""),
    ],
)  # fmt: skip
def test_invalid_records_are_rejected_with_their_field(record, form, slug, where):
    assert cause(record, form) == (slug, where)


ANY_ORDER = (
    (("user", "a"), ("assistant", "b"), ("user", "c")),
    (("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"), ("assistant", "e")),
    (("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")),
    (("user", "a"), ("user", "b"), ("assistant", "c")),
    (("assistant", "a"), ("user", "b"), ("assistant", "c")),
)


@pytest.mark.parametrize("order", ANY_ORDER)
def test_the_order_of_turns_is_left_to_the_template(order):
    assert turns(openai(*order), CHAT) == [(role, text, role == "assistant") for role, text in order]


def test_the_usual_names_of_roles_need_no_tags():
    names = "system human gpt input chatgpt user model tool bot observation output developer bing"
    roles = "system user assistant user assistant user assistant tool assistant tool assistant developer assistant"
    record = shared(*((name, "a") for name in names.split()))
    assert [role for role, *_ in turns(record, SHAREGPT)] == roles.split()


def test_a_system_column_is_used_where_no_turn_is_one():
    assert turns(openai(("user", "a"), ("assistant", "b"), system="s"), CHAT)[0] == ("system", "s", False)
    assert turns(openai(("system", "t"), ("assistant", "b"), system="s"), CHAT)[0] == ("system", "t", False)


def test_a_prompt_with_a_completion():
    record = mapped({"prompt": "The sky is", "completion": " blue."}, COMPLETION)
    assert (record.text, record.begin, record.form) == ("The sky is blue.", 10, 2)
    assert record.content != mapped({"prompt": "The sky", "completion": " is blue."}, COMPLETION).content
    assert mapped({"prompt": "", "completion": "a"}, COMPLETION).content == text_record("b", 1, "a").content


def test_a_prompt_of_turns_carries_no_loss():
    prompt, answer = (*TWO, ("user", "c")), ("assistant", "d")
    record = {
        "prompt": openai(*prompt)["messages"],
        "completion": openai(answer)["messages"],
        "tools": [{"name": "f"}],
    }
    assert turns(record, COMPLETION) == [*((role, text, False) for role, text in prompt), (*answer, True)]
    assert mapped(record, COMPLETION).tools


def test_calls_in_the_older_spelling_of_openai():
    call = {"name": "f", "arguments": '{"x": 1}'}
    record = openai(("user", "a"), ("assistant", None), ("function", "1"), ("assistant", "b"))
    record["messages"][1]["function_call"], record["messages"][2]["name"] = call, "f"
    record["functions"] = [{"name": "f", "parameters": {}}]
    record = mapped(record, CHAT)
    assert [message.role for message in record.messages] == ["user", "assistant", "tool", "assistant"]
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    assert json.loads(dict(record.messages[1].fields)["tool_calls"]) == calls
    assert json.loads(record.tools) == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def test_a_call_with_a_thought_before_it():
    record = shared(HUMAN, ("function_call", '<think>\nhm\n</think>\n\n{"name": "f", "arguments": {}}'))
    message = mapped(record, SHAREGPT).messages[1]
    assert message.content == "<think>\nhm\n</think>"
    assert json.loads(dict(message.fields)["tool_calls"])[0]["function"]["name"] == "f"


def test_values_for_the_template_of_one_record():
    plain, options = openai(*TWO), {"enable_thinking": False}
    record = mapped({**plain, "chat_template_kwargs": options}, CHAT)
    assert json.loads(record.options) == options
    assert record.content != mapped(plain, CHAT).content
