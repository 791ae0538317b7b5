"""Content that templates omit; real templates are in TRL's folder."""

import pytest
from test_trl_templates import CALL, CONVERSATIONS, messages, renderer

from latentcache.fields.input_ids import NOT_RENDERED
from latentcache.sources.records import CHAT, map_record


def dropped(renders, conversation, **more):
    record = map_record({"messages": conversation, **more}, CHAT, source="a", line=1)
    bits = renders.render(record).not_rendered
    return [kind for number, kind in enumerate(NOT_RENDERED) if bits & (1 << number)]


DEVELOPER = messages(("developer", "Be kind."), ("user", "Hi"), ("assistant", "Hello"))
THOUGHT = {"reasoning_content": "hm"}
EARLIER = messages(("user", "a"), ("assistant", "b", THOUGHT), ("user", "c"), ("assistant", "d", THOUGHT))
LAST = messages(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d", THOUGHT))
IN_CONTENT = CONVERSATIONS["thoughts in the content"]
BESIDE = messages(
    ("user", "a"), ("assistant", "I see.", CALL), ("tool", "6", {"name": "multiply"}), ("assistant", "b")
)


@pytest.mark.parametrize(
    ("template", "conversation", "kinds"),
    [
        ("qwen3", DEVELOPER, ["developer turn"]),
        ("qwen3", EARLIER, ["reasoning"]),
        ("qwen3", IN_CONTENT, ["reasoning"]),
        ("qwen3", LAST, []),
        ("qwen3_training", EARLIER, []),
        ("qwen2_5", LAST, ["reasoning"]),
        ("llama3_1", BESIDE, ["text beside tool calls"]),
        ("phi3", BESIDE, ["tool turn", "tool calls"]),
        ("idefics3", LAST, ["reasoning"]),
    ],
)
def test_content_that_a_template_leaves_out(template, conversation, kinds):
    assert dropped(renderer(template), conversation) == kinds


def test_tools_that_a_template_leaves_out():
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {}}}]
    turns = messages(("user", "a"), ("assistant", "b"))
    assert dropped(renderer("qwen3"), turns, tools=tools) == []
    assert dropped(renderer("phi3"), turns, tools=tools) == ["tools"]
