# ruff: noqa: RUF001 - the marks of DeepSeek are fullwidth
"""Compare ids and loss of TRL's training templates with transformers' assistant masks."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import trl
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from latentcache.encoders.text.chat import ChatRenderer, SpecialTokens
from latentcache.encoders.text.tokenizer import TextTokenizer
from latentcache.fields.input_ids import NOT_RENDERED, InputIdsRecipe
from latentcache.fields.protocol import Failure
from latentcache.sources.records import CHAT, SHAREGPT, map_record

FOLDER = Path(trl.__file__).parent / "chat_templates"
TRAINING = sorted(path.stem.removesuffix("_training") for path in FOLDER.glob("*_training.jinja"))
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
_NAMES = re.compile(r"<[|｜][^<>{}'\" ]+[|｜]>|<[a-z_]+[|]>|<[|][a-z_]+>|<(?:start|end)_of_(?:turn|utterance)>")


def messages(*turns):
    return [
        dict(zip(("role", "content"), turn, strict=False), **(turn[2] if len(turn) > 2 else {})) for turn in turns
    ]


CALL = {"tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}]}
NUMBER = {"type": "integer", "description": "a number"}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "a b", "parameters": PARAMETERS}}]
RESULT = ("tool", "6", {"name": "multiply"})
BYE = (("user", "ok"), ("assistant", "Bye"))
THREE = (("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "dd"), ("user", "e"), ("assistant", "f\nf"))
CONVERSATIONS = {
    "turns": messages(*THREE),
    "system": messages(("system", "Be kind."), *THREE),
    "empty": messages(("user", "Hi"), ("assistant", ""), *THREE),
    "thoughts": messages(
        ("user", "Hi"), ("assistant", "Hello!", {"reasoning_content": "hm"}), ("user", "And?"),
        ("assistant", "Fine", {"reasoning_content": "so"}),
    ),
    "thoughts in the content": messages(
        ("user", "Hi"), ("assistant", "<think>\nhm\n</think>\n\nHello!"), ("user", "And?"),
        ("assistant", "<think>\nso\n</think>\n\nFine"),
    ),
    "tools": messages(("user", "2*3?"), ("assistant", "", CALL), RESULT, ("assistant", "It is 6."), *BYE),
    "text beside tools": messages(
        ("user", "2*3?"), ("assistant", "I see.", CALL), RESULT, ("assistant", "It is 6."), *BYE
    ),
}  # fmt: skip
ALTERNATING = {"tools": "roles must alternate", "text beside tools": "roles must alternate"}
#: Template -> conversations that it and TRL reject, with the template's message.
NOT_ACCEPTED = {
    "cohere": ALTERNATING,
    "cohere2": ALTERNATING,
    "gemma": {**ALTERNATING, "system": "System role not supported"},
    "gemma3": ALTERNATING,
    "llava_next": {"tools": "Only user and assistant roles", "text beside tools": "Only user and assistant roles"},
}
#: Content only as a list of parts (TRL's ``prepare_multimodal_messages`` makes them).
PARTS = ("idefics3", "llava_next", "smolvlm")


def tokenizer(template):
    """Create a tokenizer with one token per byte and the special tokens of the template."""
    byte_tokenizer = Tokenizer(
        models.BPE(vocab={c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = sorted({*_NAMES.findall(template), "<s>", "</s>"})
    byte_tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return byte_tokenizer


def template_of(name):
    return (FOLDER / f"{name}.jinja").read_text("utf-8")


def opened(template):
    byte_tokenizer = tokenizer(template)
    recipe = InputIdsRecipe(
        tokenizer="", num_ids=byte_tokenizer.get_vocab_size(), chat_template="x", loss="assistant"
    )
    about = {"tokenizer": byte_tokenizer.to_str(), "chat_template": template, "special": tuple(ROLES.items())}
    return TextTokenizer(about, recipe)


def record_of(conversation):
    uses_tools = any("tool_calls" in turn for turn in conversation)
    more = {"tools": TOOLS} if uses_tools else {}
    return map_record({"messages": conversation, **more}, CHAT, source="a", line=1)


def trl_says(name, template, conversation):
    """Compute ids and assistant mask as TRL's SFTTrainer does."""
    if name in PARTS:
        conversation = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in conversation]
    tools = TOOLS if any("tool_calls" in turn for turn in conversation) else None
    hf_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer(template), **ROLES)
    encoded = hf_tokenizer.apply_chat_template(
        conversation, tools=tools, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    return encoded["input_ids"], encoded["assistant_masks"]


def test_trl_has_31_training_templates():
    assert len(TRAINING) == 31


@pytest.mark.parametrize("name", TRAINING)
def test_ids_and_loss_are_those_of_trl(name):
    template = template_of(f"{name}_training")
    text_tokenizer = opened(template)
    for case, conversation in CONVERSATIONS.items():
        (document,) = text_tokenizer.tokenize([record_of(conversation)])
        words = NOT_ACCEPTED.get(name, {}).get(case)
        if words:
            assert isinstance(document, Failure), case
            assert words in document.detail, case
            with pytest.raises(Exception, match=words):
                trl_says(name, template, conversation)
            continue
        ids, mask = trl_says(name, template, conversation)
        loss = np.zeros(len(document.array), dtype=int)
        for start, number in document.columns["spans"].tolist():
            loss[start : start + number] = 1
        assert document.array.tolist() == ids, case
        assert loss.tolist() == mask, case


def test_a_turn_without_loss_between_marks_of_several_pieces():
    """DiffusionGemma marks a call and its text separately."""
    conversation = CONVERSATIONS["text beside tools"]
    silent = [{**turn, "weight": 0} if turn["content"] == "I see." else turn for turn in conversation]
    rendered = renderer("diffusion_gemma_training").render(record_of(silent))
    learned = "".join(rendered.text[begin:end] for begin, end in rendered.spans)
    assert learned == "It is 6.<turn|>\nBye<turn|>\n"


#: SHA-256 of the 936 characters that LLaMA-Factory ff6d4d12e makes of the record below: its template ``qwen`` and
#: its ``tool_utils``, run with the tokenizer replaced by the text itself.
LLAMA_FACTORY = "6f713e999d51552bb82cb6b48430d52133a0d4c4d3bf661514c6c14a96899d25"


@pytest.mark.parametrize("name", ["qwen2_5", "qwen2_5_training"])
def test_bare_tools_are_rendered_as_in_llama_factory(name):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    bare = [{"name": "get_weather", "description": "Weather of a city", "parameters": parameters}]
    call = json.dumps({"name": "get_weather", "arguments": {"city": "Oslo"}})
    texts = (
        ("human", "Weather in Oslo?"),
        ("function_call", call),
        ("observation", '{"temp": 3}'),
        ("gpt", "3 degrees."),
    )
    turns = [{"from": role, "value": text} for role, text in texts]
    record = {"conversations": turns, "tools": json.dumps(bare)}
    mapped = map_record(record, SHAREGPT, source="a", line=1)
    assert hashlib.sha256(renderer(name).render(mapped).text.encode()).hexdigest() == LLAMA_FACTORY


def renderer(name):
    template = template_of(name)
    control = SpecialTokens({"added_tokens": [
        {"id": n, "content": token, "special": True}
        for n, token in enumerate(sorted({*_NAMES.findall(template), "<s>", "</s>"}))
    ]})  # fmt: skip
    return ChatRenderer(template, control, special=tuple(ROLES.items()), options=(), split_control=True)


THINK_END = "\n</think>\n\n"
#: Original templates without marks -> learned text of CONVERSATIONS["turns"] and ["tools"].
ORIGINAL = {
    "deepseekv3": (
        ["bb<｜end▁of▁sentence｜>", "dd<｜end▁of▁sentence｜>", "f\nf<｜end▁of▁sentence｜>"],
        [
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
            'multiply\n```json\n{"a": 2, "b": 3}\n```'
            "<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
            "It is 6.<｜end▁of▁sentence｜>",
            "Bye<｜end▁of▁sentence｜>",
        ],
    ),
    "gptoss": (
        [f"<|channel|>final<|message|>{text}" for text in ("bb<|end|>", "dd<|end|>", "f\nf<|return|>")],
        [
            ' to=functions.multiply<|channel|>commentary json<|message|>{"a": 2, "b": 3}<|call|>',
            "<|channel|>final<|message|>It is 6.<|end|>",
            "<|channel|>final<|message|>Bye<|return|>",
        ],
    ),
    "nemotron_3_nano": ([f"</think>{text}<|im_end|>" for text in ("bb", "dd", "f\nf")], ...),
    "phi3": (["bb<|end|>", "dd<|end|>", "f\nf<|end|>\n</s>"], ...),
    "qwen3": (
        ["bb<|im_end|>", "dd<|im_end|>", "<think>\n\n</think>\n\nf\nf<|im_end|>"],
        [
            '<tool_call>\n{"name": "multiply", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
            "It is 6.<|im_end|>",
            "<think>\n\n</think>\n\nBye<|im_end|>",
        ],
    ),
    "qwen3_5_think": (["bb<|im_end|>", "dd<|im_end|>", f"{THINK_END}f\nf<|im_end|>"], ...),
    "glm4moe": ([f"\n<think></think>\n{text}" for text in ("bb", "dd", "f\nf")], ...),
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_turns_of_templates_without_marks(name):
    for case, texts in zip(("turns", "tools"), ORIGINAL[name], strict=True):
        if isinstance(texts, list):
            rendered = renderer(name).render(record_of(CONVERSATIONS[case]))
            assert [rendered.text[begin:end] for begin, end in rendered.spans] == texts, case


def test_a_template_without_exact_spans_is_rejected_with_a_fix():
    """gpt-oss turns text beside a call into a thought and drops it after the next answer."""
    (document,) = opened(template_of("gptoss")).tokenize([record_of(CONVERSATIONS["text beside tools"])])
    assert document.reason == "template-rewrites"
    assert "writes this answer otherwise where others follow it" in document.detail
    assert "get_training_chat_template" in document.hint


# content that templates leave out


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
