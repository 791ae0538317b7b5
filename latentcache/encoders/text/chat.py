"""Conversations through a chat template: one text, and its loss spans.

Templates are rendered by transformers' own sandboxed Jinja. If the template marks answers with ``{% generation %}``,
the loss spans are these marks, as ``return_assistant_tokens_mask`` and TRL's ``assistant_masks`` have them.
Otherwise a turn begins behind the prompt for an answer and ends with the special token that ends it; blanks after
that carry no loss. Where a template writes a turn otherwise once others follow (it removes the reasoning, or ends the
last turn with another token), the turn is found by rendering the whole conversation with another text in its place.
A record whose spans are not exact is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from latentcache.encoders.text.dropped import not_rendered
from latentcache.encoders.text.special import CLOSE, RenderedChat, SpecialTokens
from latentcache.errors import UnusableSampleError, UsageError
from latentcache.sources.lines import fault
from latentcache.sources.records import Message, Record
from latentcache.value import Value

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
#: A text that no template searches for; it replaces the content of a turn to find the turn's place.
_PROBE = f"{CLOSE}probe{CLOSE}"
_ASKED = Message(role="user", content=_PROBE)
_CALL = [{"type": "function", "function": {"name": "a", "arguments": {"a": 1}}}]
_CALLING = Message(role="assistant", content="", fields=(("tool_calls", json.dumps(_CALL)),))
_REWRITES = "template-rewrites"
_OTHERWISE = "this answer otherwise where others follow it, and where it begins or ends there is unknown"
#: Errors of templates beside Jinja's own: a template is a program over the record's values.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class _Style(Value):
    """How a template without marks writes turns; empty if it could not be found out."""

    header: str = ""
    """Before an answer, if the template never prompts for one."""
    asked: str = ""
    """The prompt for an answer."""
    shared: str = ""
    """The part of the prompt that every answer begins with, also one that others follow."""
    heads: tuple[str, ...] = ()
    """What it writes before the content of an answer: of the last one, and of an earlier one."""
    closing: str = ""
    """What it writes after the content of the last answer."""
    enders: frozenset[str] = frozenset()
    """Special tokens that end a turn: of the last answer, and of the user."""


class _Conversation(Value):
    """A conversation as templates take it."""

    turns: list[dict[str, Any]]
    tools: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def until(self, number: int) -> _Conversation:
        """Its first turns."""
        return replace(self, turns=self.turns[:number])


class ChatRenderer:
    """One template with one tokenizer's special tokens.

    Args:
        template: Jinja, its clock pinned.
        control: The special tokens, to mark them in content and to find ends of turns.
        special: (role, token) that the template uses by name.
        options: (name, JSON) of its other values.
        split_control: True: special-token text in content is marked.
    """

    def __init__(
        self,
        template: str,
        control: SpecialTokens,
        *,
        special: Sequence[tuple[str, str]],
        options: Sequence[tuple[str, str]],
        split_control: bool,
    ) -> None:
        self._template, self._control, self._split = template, control, split_control
        self._given = {**dict(special), **{name: json.loads(value) for name, value in options}}
        self.has_generation = bool(_GENERATION.search(template))
        self._as_parts = self._calls_as_text = False
        if not self._writes(_PROBE, _ASKED):
            self._as_parts = True  # as templates of vision models
            self._as_parts = self._writes(_PROBE, _ASKED)
        if not self._writes("", _ASKED, _CALLING):
            self._calls_as_text = True  # as DeepSeek V3's original one
            self._calls_as_text = self._writes("", _ASKED, _CALLING)
        self._style = _Style() if self.has_generation else self._probed_style()

    def render(self, record: Record) -> RenderedChat:
        """A conversation as text with its loss spans.

        Raises:
            UnusableSampleError: ``template``: it does not accept this conversation. ``template-rewrites``: the loss
                spans are unknown.
        """
        told = record.messages or ()
        chat = _Conversation(
            turns=[self._turn(message) for message in told],
            tools=self._marked(json.loads(record.tools)) if record.tools else None,
            options=self._marked(json.loads(record.options)) if record.options else {},
        )
        text, tagged = self._run(chat, tags=self.has_generation)
        if self.has_generation:
            spans = self._tagged(told, chat, tagged)
        else:
            learned = [number for number, message in enumerate(told) if message.learned]
            spans = [self._ended(text, *self._place(chat, text, number)) for number in learned]
        kept = tuple((begin, end) for begin, end in spans if begin < end)
        return RenderedChat(text=text, spans=kept, not_rendered=not_rendered(record, text, self._marked))

    def _tagged(
        self, told: Sequence[Message], chat: _Conversation, tagged: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Of the template's own marks, those of turns that carry loss."""
        answers = [number for number, message in enumerate(told) if message.role == "assistant"]
        if all(told[number].learned for number in answers):
            return tagged
        counts = [0]
        for number in answers:  # a turn may have several marks, or none
            last = number + 1 == len(told)
            counts.append(len(tagged if last else self._run(chat.until(number + 1), tags=True)[1]))
        if counts[-1] != len(tagged) or counts != sorted(counts):
            raise fault(_REWRITES, "the template marks earlier answers otherwise once others follow")
        return [
            span
            for number, first, end in zip(answers, counts, counts[1:], strict=False)
            for span in tagged[first:end]
            if told[number].learned
        ]

    def _place(self, chat: _Conversation, text: str, number: int) -> tuple[int, int]:
        """Place of one turn in the whole text."""
        prompt, _ = self._run(chat.until(number), prompt=True)
        last = number + 1 == len(chat.turns)
        with_turn = text if last else self._run(chat.until(number + 1))[0]
        begin, end = len(prompt) if text.startswith(prompt) else -1, len(with_turn)
        if begin < 0 or not (text.startswith(with_turn) and with_turn.startswith(prompt)):
            before, after = self._around(chat, text, number)
            begin, end = (before if begin < 0 else begin), (end if text.startswith(with_turn) else after)
        if self._style.header and text.startswith(self._style.header, begin):
            begin += len(self._style.header)
        if not 0 <= begin <= end:
            raise fault(_REWRITES, f"the template writes {_OTHERWISE}", f"turn {number + 1}")
        return begin, end

    def _around(self, chat: _Conversation, text: str, number: int) -> tuple[int, int]:
        """Begin and end of a turn, by the conversation with a plain turn in its place; -1 if that does not tell."""
        turns = [*chat.turns[:number], self._said("assistant", _PROBE), *chat.turns[number + 1 :]]
        style = self._style
        try:
            elsewhere, _ = self._run(replace(chat, turns=turns))
        except UnusableSampleError:
            return -1, -1
        before, found, after = elsewhere.partition(_PROBE)
        head = next((head for head in style.heads if before.endswith(head)), None)
        begin = end = -1
        if found and head is not None:
            start = len(before) - len(head)
            asked = next((ask for ask in (style.asked, style.shared) if text.startswith(before[:start] + ask)), None)
            begin = -1 if asked is None else start + len(asked)
        closing = self._closing(after)
        if found and text.endswith(after) and closing >= 0:
            end = len(text) - len(after) + closing
        return begin, end

    def _closing(self, after: str) -> int:
        """Length of what ends a turn, at the begin of the text that follows its content; -1: unknown."""
        if after.startswith(self._style.closing):
            return len(self._style.closing)
        first = self._control.first(after)
        return first[1] if first is not None and first[0] in self._style.enders else -1

    def _ended(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Without the blanks after the special token that ends a turn."""
        stop = self._control.last_end(text, begin, end)
        return begin, stop if stop and not text[stop:end].strip() else end

    def _probed_style(self) -> _Style:
        """How the template writes turns, from conversations of its own."""
        asked, said = self._said("user", "a"), self._said("assistant", _PROBE)
        try:
            bare, prompt = self._write(asked), self._write(asked, prompt=True)
            alone, middle = self._write(asked, said), self._write(asked, said, asked)
            user = self._write(self._said("user", _PROBE), self._said("assistant", "a"))
        except UnusableSampleError:
            return _Style()
        header = ""
        if prompt == bare and alone.startswith(prompt):  # an answer is not prompted for
            header = alone[len(prompt) :].partition(_PROBE)[0]
        common = _common(prompt, alone, middle)
        turn_at = _common(bare, prompt)
        before = (alone.partition(_PROBE)[0], middle.partition(_PROBE)[0])
        closing = alone.partition(_PROBE)[2]
        ends = (self._control.first(closing), self._control.first(user.partition(_PROBE)[2]))
        return _Style(
            header=header if header.strip() else "",
            asked=prompt[turn_at:],
            shared=prompt[turn_at:common],
            heads=tuple(dict.fromkeys(head[turn_at:] for head in before if len(head) > turn_at)),
            closing=closing,
            enders=frozenset(end[0] for end in ends if end is not None),
        )

    def _writes(self, wanted: str, *messages: Message) -> bool:
        """True if the template accepts a conversation and its text has something."""
        try:
            return wanted in self._write(*map(self._turn, messages))
        except UnusableSampleError:
            return False

    def _write(self, *turns: dict[str, Any], prompt: bool = False) -> str:
        return self._run(_Conversation(turns=list(turns)), prompt=prompt)[0]

    def _said(self, role: str, content: str) -> dict[str, Any]:
        """One turn as the template takes it."""
        return {"role": role, "content": [{"type": "text", "text": content}] if self._as_parts else content}

    def _run(
        self, chat: _Conversation, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the marks of its answers."""
        try:
            texts, spans = render_jinja_template(
                conversations=[chat.turns],
                tools=chat.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **{**self._given, **chat.options},
            )
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                "the chat template is not valid Jinja",
                where=f"line {error.lineno} of the template",
                why=str(error.message),
                fix="give another one with --chat-template FILE",
            ) from error
        except _FAILURES as error:
            raise fault(
                "template", f"the chat template does not accept it: {error or type(error).__name__}"
            ) from error
        return texts[0], spans[0] if tags else []

    def _turn(self, message: Message) -> dict[str, Any]:
        fields = {name: json.loads(value) for name, value in message.fields}
        if self._calls_as_text:
            for call in fields.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**self._said(message.role, self._marked(message.content)), **self._marked(fields)}

    def _marked(self, value: Any) -> Any:
        """A value with the special-token text in its texts between marks; names are unchanged."""
        if not self._split:
            return value
        if isinstance(value, str):
            return self._control.mark(value)
        if isinstance(value, dict):
            return {name: self._marked(child) for name, child in value.items()}
        return [self._marked(child) for child in value] if isinstance(value, list) else value


def _common(*texts: str) -> int:
    """Length of the text that all of them begin with."""
    return next(
        (n for n, letters in enumerate(zip(*texts, strict=False)) if len(set(letters)) > 1), min(map(len, texts))
    )
