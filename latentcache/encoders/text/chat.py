"""Conversations through a chat template: one text, and its loss spans.

Templates are rendered by transformers' own sandboxed Jinja. If the template marks answers with ``{% generation %}``,
the loss spans are these marks, as ``return_assistant_tokens_mask`` and TRL's ``assistant_masks`` have them. Otherwise
a turn begins behind the prompt for an answer and ends with the special token that ends it. Blanks after that carry no
loss. Some templates write a turn otherwise once others follow: they remove the reasoning, or end the last turn with
another token. Such a turn is found by rendering the whole conversation with another text in its place. A record whose
spans are not exact is rejected. Content that the template leaves out is counted by its kind.

Special tokens get names that no text has: ``<|im_end|>`` with id 7 becomes U+FDD0 ``7`` U+FDD1, in the tokenizer and
in the output of a template. Content goes through a template with its special-token text between marks (U+FDD2), which
are removed then. U+FDD0 to U+FDD2 are noncharacters, which texts never have (Unicode 16, chapter 23.7). A template is
rendered by transformers, which costs a second to import: plain texts never need it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import jinja2

from latentcache.errors import UnusableSampleError, UsageError
from latentcache.fields.input_ids import NOT_RENDERED
from latentcache.sources.causes import fault
from latentcache.sources.records import Message, Record
from latentcache.value import Value

OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
Spans = Sequence[tuple[int, int]]
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
#: A text that no template searches for; it replaces the content of a turn to find the turn's place.
_PROBE = f"{CLOSE}probe{CLOSE}"
_USER_TURN = Message(role="user", content=_PROBE)
_CALL = [{"type": "function", "function": {"name": "a", "arguments": {"a": 1}}}]
_CALLING = Message(role="assistant", content="", fields=(("tool_calls", json.dumps(_CALL)),))
_REWRITES = "template-rewrites"
_OTHERWISE = "this answer otherwise where others follow it, and where it begins or ends there is unknown"
_THOUGHT, _THOUGHT_END = "<think>", "</think>"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_BITS = {kind: 1 << number for number, kind in enumerate(NOT_RENDERED)}
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


class Rendered(NamedTuple):
    """A record as one text."""

    text: str
    spans: Spans | None
    """(begin, end) of the parts with loss, in characters; rising, not overlapping. None: everything."""
    not_rendered: int = 0
    """Bits of ``fields.input_ids.NOT_RENDERED``."""
    is_chat: bool = True
    controls: int = 0
    """Occurrences of special-token text in the content."""


class SpecialTokens:
    """The special tokens of a tokenizer: its added tokens that are special."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        special = [token for token in tokenizer.get("added_tokens") or () if token["special"] and token["content"]]
        self.ids = {str(token["content"]): int(token["id"]) for token in special}
        # The longest first, as the tokenizer matches them. Without any, a pattern that never matches.
        names = "|".join(re.escape(name) for name in sorted(self.ids, key=len, reverse=True)) or r"(?!)"
        self._names = re.compile(names)
        self._rendered = re.compile(f"{MARK}(?:{names}){MARK}|{MARK}|{names}")

    def count(self, text: str) -> int:
        """Occurrences of special-token text."""
        return len(self._names.findall(text))

    def mark(self, text: str) -> str:
        """Content for a template, its special-token text between marks."""
        return self._names.sub(f"{MARK}\\g<0>{MARK}", text)

    def first(self, rendered: str) -> tuple[str, int] | None:
        """The special token at the start of a template's output, blanks aside, and its end; or None."""
        match = self._rendered.match(rendered, len(rendered) - len(rendered.lstrip()))
        return None if match is None or match.group()[0] == MARK else (match.group(), match.end())

    def last_end(self, rendered: str, begin: int, end: int) -> int:
        """End of the last special token in a part of a template's output; 0 if there is none."""
        matches = self._rendered.finditer(rendered, begin, end)
        return max((match.end() for match in matches if match.group()[0] != MARK), default=0)

    def rewrite(self, rendered: str, positions: Sequence[int]) -> tuple[str, list[int]]:
        """A template's output with its special tokens under their other names, and the same positions in it.

        A position inside a special token moves to its end.
        """
        starts, ends, shifts = [-1], [0], [0]

        def renamed(match: re.Match[str]) -> str:
            token = match.group()
            name = token.strip(MARK) if token[0] == MARK else f"{OPEN}{self.ids[token]}{CLOSE}"
            starts.append(match.start())
            ends.append(match.end())
            shifts.append(shifts[-1] + len(name) - len(token))
            return name

        text = self._rendered.sub(renamed, rendered)
        before = [bisect_left(starts, position) - 1 for position in positions]
        return text, [
            max(position, ends[match]) + shifts[match] for position, match in zip(positions, before, strict=True)
        ]


def guarded(tokenizer: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """``tokenizer.json`` with its special tokens renamed, and without its post-processor."""
    names = {content: f"{OPEN}{number}{CLOSE}" for content, number in ids.items()}
    model = dict(tokenizer["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in tokenizer["added_tokens"]
    ]
    # Matched before normalization, which could remove the noncharacters.
    added = [{**token, "normalized": False} if token["special"] else token for token in added]
    return {**unguarded(tokenizer), "model": model, "added_tokens": added}


def unguarded(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` without the post-processor: ends of texts are settings of the recipe."""
    return {**tokenizer, "post_processor": None, "truncation": None, "padding": None}


class _Style(Value):
    """Answer style of a template without marks."""

    lead: str | None = None
    """Before every answer, also one that others follow; None: unknown. It carries no loss unless it is blank."""
    rest: str = ""
    """Rest of the prompt for an answer, behind :attr:`lead`."""
    header: str = ""
    """:attr:`lead` if the template never prompts for an answer."""
    enders: frozenset[str] = frozenset()
    """Special tokens that end a turn: of the last answer, and of the user."""


class _Conversation(NamedTuple):
    """A conversation as templates take it."""

    turns: list[dict[str, Any]]
    tools: Any = None
    options: Mapping[str, Any] = {}

    def until(self, number: int) -> _Conversation:
        """Keep the first turns."""
        return self._replace(turns=self.turns[:number])


class ChatRenderer:
    """One template with one tokenizer's special tokens.

    ``control`` marks special tokens in content (if ``split_control``) and finds ends of turns. ``special`` are (role,
    token) that the template uses by name, ``options`` (name, JSON) of its other values.
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
        self._values = {**dict(special), **{name: json.loads(value) for name, value in options}}
        self.has_generation = bool(_GENERATION.search(template))
        self._as_parts = self._calls_as_text = False
        self._as_parts = not self._writes(_PROBE, _USER_TURN)  # as templates of vision models
        self._as_parts = self._as_parts and self._writes(_PROBE, _USER_TURN)
        self._calls_as_text = not self._writes("", _USER_TURN, _CALLING)  # as DeepSeek V3's original one
        self._calls_as_text = self._calls_as_text and self._writes("", _USER_TURN, _CALLING)
        self._style = _Style() if self.has_generation else self._probed_style()

    def render(self, record: Record) -> Rendered:
        """A conversation as text with its loss spans; raises UnusableSampleError."""
        conversation = record.messages or ()
        chat = _Conversation(
            turns=[self._turn(message) for message in conversation],
            tools=self._marked(json.loads(record.tools)) if record.tools else None,
            options=self._marked(json.loads(record.options)) if record.options else {},
        )
        text, tagged = self._run(chat, tags=self.has_generation)
        if self.has_generation:
            spans = self._tagged(conversation, chat, tagged)
        else:
            learned = [number for number, message in enumerate(conversation) if message.learned]
            spans = [self._ended(text, *self._turn_span(chat, text, number)) for number in learned]
        kept = [(begin, end) for begin, end in spans if begin < end]
        return Rendered(text, kept, not_rendered(record, text, self._marked))

    def _tagged(
        self, conversation: Sequence[Message], chat: _Conversation, tagged: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]]:
        """Select the template's own marks of turns that carry loss."""
        answers = [number for number, message in enumerate(conversation) if message.role == "assistant"]
        if all(conversation[number].learned for number in answers):
            return tagged
        counts = [0]
        for number in answers:  # a turn may have several marks, or none
            last = number + 1 == len(conversation)
            counts.append(len(tagged if last else self._run(chat.until(number + 1), tags=True)[1]))
        if counts[-1] != len(tagged) or counts != sorted(counts):
            raise fault(_REWRITES, "the template marks earlier answers otherwise once others follow")
        return [
            span
            for number, first, end in zip(answers, counts, counts[1:], strict=False)
            for span in tagged[first:end]
            if conversation[number].learned
        ]

    def _turn_span(self, chat: _Conversation, text: str, number: int) -> tuple[int, int]:
        """Begin and end of a turn with all that the template writes after it; raises UnusableSampleError."""
        prompt, _ = self._run(chat.until(number), prompt=True)
        prompt += self._style.header
        is_last = number + 1 == len(chat.turns)
        with_turn = text if is_last else self._run(chat.until(number + 1))[0]
        begin, end = (len(start) if text.startswith(start) else -1 for start in (prompt, with_turn))
        if begin < 0 or end < 0:
            probed_begin, probed_end = self._around(chat, text, number)
            begin = probed_begin if begin < 0 else begin
            end = probed_end if end < 0 else end
        if not 0 <= begin <= end:
            raise fault(_REWRITES, f"the template writes {_OTHERWISE}", f"turn {number + 1}")
        return begin, end

    def _around(self, chat: _Conversation, text: str, number: int) -> tuple[int, int]:
        """Begin and end of a turn, by the conversation with a plain turn in its place; -1 if they are not found."""
        turns = [*chat.turns[:number], self._message("assistant", _PROBE), *chat.turns[number + 1 :]]
        style = self._style
        begin = end = -1
        try:
            probed, _ = self._run(chat._replace(turns=turns))
        except UnusableSampleError:
            return begin, end
        before, probe, after = probed.partition(_PROBE)
        if not probe:
            return begin, end
        lead = style.lead or ""
        start = before.rfind(lead) + (len(lead) if lead.strip() else 0)
        if lead in before and style.lead is not None and text.startswith(before[:start]):
            begin = start + len(style.rest) * text.startswith(style.rest, start)
        ender = self._control.first(after)
        if text.endswith(after) and ender is not None and ender[0] in style.enders:
            end = len(text) - len(after) + ender[1]
        return begin, end

    def _ended(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Leave out the blanks after the special token that ends a turn."""
        stop = self._control.last_end(text, begin, end)
        return begin, stop if stop and not text[stop:end].strip() else end

    def _probed_style(self) -> _Style:
        """Find the answer style of the template from probe conversations."""
        user_turn, reply = self._message("user", "a"), self._message("assistant", _PROBE)
        try:
            bare, prompt = self._write(user_turn), self._write(user_turn, prompt=True)
            alone, middle = self._write(user_turn, reply), self._write(user_turn, reply, user_turn)
            user = self._write(self._message("user", _PROBE), self._message("assistant", "a"))
        except UnusableSampleError:
            return _Style()
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(bare, prompt, strict=False))
        prompted = prompt[len(list(shared)) :]
        heads = [text.partition(_PROBE)[0] for text in (alone, middle)]
        ends = (self._control.first(text.partition(_PROBE)[2]) for text in (alone, user))
        enders = frozenset(end[0] for end in ends if end is not None)
        if prompted.strip():
            leads = (prompted[:end] for end in range(len(prompted), 0, -1))
            lead = next((lead for lead in leads if lead.strip() and all(lead in head for head in heads)), None)
            return _Style(lead=lead, rest=prompted[len(lead or "") :], enders=enders)
        if not alone.startswith(prompt):
            return _Style(enders=enders)
        lead = heads[0][len(prompt) :]
        return _Style(lead=lead, header=lead if lead.strip() else "", enders=enders)

    def _writes(self, wanted: str, *messages: Message) -> bool:
        """True if the template accepts a conversation, and its text contains ``wanted``."""
        try:
            return wanted in self._write(*map(self._turn, messages))
        except UnusableSampleError:
            return False

    def _write(self, *turns: dict[str, Any], prompt: bool = False) -> str:
        return self._run(_Conversation(turns=list(turns)), prompt=prompt)[0]

    def _message(self, role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": content}] if self._as_parts else content}

    def _run(
        self, chat: _Conversation, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of a conversation, and the marks of its answers."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                conversations=[chat.turns],
                tools=chat.tools,
                chat_template=self._template,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **{**self._values, **chat.options},
            )
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                "the chat template is not valid Jinja",
                where=f"line {error.lineno} of the template",
                why=str(error.message),
                fix="give another one with --chat-template=FILE",
            ) from error
        except _FAILURES as error:
            detail = f"the chat template does not accept it: {error or type(error).__name__}"
            raise fault("template", detail) from error
        return texts[0], spans[0] if tags else []

    def _turn(self, message: Message) -> dict[str, Any]:
        fields = {name: json.loads(value) for name, value in message.fields}
        if self._calls_as_text:
            for call in fields.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        return {**self._message(message.role, self._marked(message.content)), **self._marked(fields)}

    def _marked(self, value: Any) -> Any:
        """Put special-token text in a value between marks; names stay as they are."""
        if not self._split:
            return value
        if isinstance(value, str):
            return self._control.mark(value)
        if isinstance(value, dict):
            return {name: self._marked(child) for name, child in value.items()}
        return [self._marked(child) for child in value] if isinstance(value, list) else value


def not_rendered(record: Record, text: str, mark: Callable[[str], str]) -> int:
    """Bits of the kinds in ``NOT_RENDERED`` that the text lacks a piece of; ``mark`` is applied to pieces first."""
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
        pieces = [(kind, content), *(("reasoning", text) for text in thoughts)]
        yield from ((kind, piece.strip()) for kind, piece in pieces if isinstance(piece, str) and piece.strip())
        yield from (("tool calls", name) for name in _names(calls))


def _names(tools: Any) -> Iterator[str]:
    for tool in tools:
        function = tool.get("function")
        name = (function if isinstance(function, dict) else tool).get("name")
        if isinstance(name, str):
            yield name
