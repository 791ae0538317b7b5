"""Find the content of conversations that a chat template leaves out: it is not in the text, or less often."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from latentcache.fields.input_ids import NOT_RENDERED
from latentcache.sources.records import Record

_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_BITS = {kind: 1 << number for number, kind in enumerate(NOT_RENDERED)}


def not_rendered(record: Record, text: str, mark: Callable[[str], str]) -> int:
    """Bits of the kinds in ``NOT_RENDERED`` of which a piece is missing; ``mark`` is done to content first."""
    bits = 0
    for (kind, piece), times in Counter(_pieces(record)).items():
        if text.count(mark(piece)) < times:
            bits |= _BITS[kind]
    return bits


def _pieces(record: Record) -> Iterator[tuple[str, str]]:
    """(kind, text) of every piece of content; of tools and calls the name."""
    yield from (("tools", name) for name in _names(json.loads(record.tools) if record.tools else ()))
    for message in record.messages or ():
        fields = {name: json.loads(value) for name, value in message.fields}
        thought, _, content = message.content.rpartition(_THOUGHT_END)
        thoughts = [thought.strip().removeprefix(_THOUGHT), *(fields.get(name) for name in _THOUGHTS)]
        calls = fields.get("tool_calls") or ()
        kind = "text beside tool calls" if calls else f"{message.role} turn"
        pieces = [(kind, content), *(("reasoning", one) for one in thoughts)]
        yield from ((kind, piece.strip()) for kind, piece in pieces if isinstance(piece, str) and piece.strip())
        yield from (("tool calls", name) for name in _names(calls))


def _names(tools: Any) -> Iterator[str]:
    for tool in tools:
        function = tool.get("function")
        name = (function if isinstance(function, dict) else tool).get("name")
        if isinstance(name, str):
            yield name
