"""Find the content of conversations that a chat template leaves out.

A template decides by the role of a turn, its neighbors, its fields, and whether more follows. For each such
combination the first record that has it is rendered once more, with a mark in place of every piece of content. A
piece whose mark is not in the text is left out. Later records with the same combination are not rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.fields.input_ids import NOT_RENDERED
from latentcache.sources.records import Message, Record

_THOUGHT_END = "</think>"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_BITS = {kind: 1 << number for number, kind in enumerate(NOT_RENDERED)}
#: One piece: its kind, and what its place in the conversation has in common with other places.
_Piece = tuple[str, tuple[Any, ...]]
_SHAPES = 1 << 14


class DroppedContent:
    """Tells which kinds of content of a record its template leaves out.

    Args:
        render: The text of turns with tools and options.
        turn: A turn as the template takes it, of its role and content.
    """

    def __init__(
        self,
        render: Callable[[list[dict[str, Any]], Any, Mapping[str, Any]], str],
        turn: Callable[[str, str], dict[str, Any]],
    ) -> None:
        self._render, self._turn = render, turn
        self._known: dict[_Piece, bool] = {}
        self._bits: dict[tuple[Any, ...], int] = {}

    def __call__(self, record: Record, options: Mapping[str, Any]) -> int:
        """Bits of the kinds in ``NOT_RENDERED`` that are left out."""
        shape = (bool(record.tools), *map(_shape, record.messages or ()))
        found = self._bits.get(shape)
        if found is None:
            found = self._look(record, options)
            if len(self._bits) < _SHAPES:
                self._bits[shape] = found
        return found

    def _look(self, record: Record, options: Mapping[str, Any]) -> int:
        """The bits, from the pieces of a record."""
        pieces = [(kind, about) for _, kind, about in _pieces(record)]
        if any(piece not in self._known for piece in pieces):
            self._learn(record, options)
        bits = 0
        for piece in pieces:
            if self._known[piece]:
                bits |= _BITS[piece[0]]
        return bits

    def _learn(self, record: Record, options: Mapping[str, Any]) -> None:
        messages = [self._marked(message, number) for number, message in enumerate(record.messages or ())]
        tools = [_named(tool, _mark("tools", 0)) for tool in json.loads(record.tools)] if record.tools else None
        try:
            text = self._render(messages, tools, options)
        except UnusableSampleError:  # it has rules for content: nothing is known
            text = ""
        for mark, kind, about in _pieces(record):
            dropped = bool(text) and mark not in text
            self._known[kind, about] = self._known.get((kind, about), False) or dropped

    def _marked(self, message: Message, number: int) -> dict[str, Any]:
        """A turn with a mark in place of each piece."""
        said = _mark("content", number) if message.content.strip() else message.content
        if _THOUGHT_END in message.content:
            said = f"<think>\n{_mark('thought', number)}\n{_THOUGHT_END}\n\n{said}"
        turn = self._turn(message.role, said)
        for name, value in message.fields:
            turn[name] = json.loads(value)
            if name in _THOUGHTS and isinstance(turn[name], str):
                turn[name] = _mark("thought", number)
            elif name == "tool_calls":
                turn[name] = [_named(call, _mark("calls", number)) for call in turn[name]]
        return turn


def _shape(message: Message) -> tuple[Any, ...]:
    """All of a turn that its pieces depend on."""
    content, fields = message.content, message.fields
    has_content = bool(content) and not content.isspace()
    return message.role, has_content, _THOUGHT_END in content, tuple(name for name, _ in fields) if fields else ()


def _pieces(record: Record) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """(mark, kind, place) of every piece of content."""
    messages = record.messages or ()
    last_user = max((number for number, one in enumerate(messages) if one.role == "user"), default=-1)
    if record.tools:
        yield _mark("tools", 0), "tools", (messages[0].role,) if messages else ()
    for number, message in enumerate(messages):
        names = {name for name, _ in message.fields}
        has_thought, calls = _THOUGHT_END in message.content, "tool_calls" in names
        before = messages[number - 1].role if number else ""
        after = messages[number + 1].role if number + 1 < len(messages) else ""
        about = (message.role, before, after, number > last_user, has_thought, *sorted(names))
        if message.content.strip():
            yield _mark("content", number), "text beside tool calls" if calls else f"{message.role} turn", about
        if has_thought or names.intersection(_THOUGHTS):
            yield _mark("thought", number), "reasoning", about
        if calls:
            yield _mark("calls", number), "tool calls", about


def _mark(piece: str, number: int) -> str:
    """A word that no template writes, changes or searches for."""
    return f"q{piece}{number}q"


def _named(tool: dict[str, Any], name: str) -> dict[str, Any]:
    """A tool or a call with another name."""
    function = tool.get("function")
    return {**tool, "function": {**function, "name": name}} if isinstance(function, dict) else {**tool, "name": name}
