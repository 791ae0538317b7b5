"""Conversations through a chat template: one text, and the places in it that carry loss.

Templates are rendered by transformers' own sandboxed Jinja. What is learned comes from the template where it marks it
with ``{% generation %}``; else a turn is what the conversation with it has more than the conversation before it
with the prompt for an answer. Both end with the control token that ends the turn: blanks after it are not learned.

Some templates write earlier turns otherwise once others follow (they take the reasoning out). There the turn begins
where its prompt ends, and its content is found by putting another text in its place in the whole conversation; what
follows it there has to be what follows it where it is the last turn. A record for which this fails is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from latentcache.encoders.text.special import CLOSE, ControlStrings, RenderedChat
from latentcache.errors import UnusableSampleError, UsageError
from latentcache.sources.lines import fault
from latentcache.sources.records import Message, Record

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
#: A text that no template looks for; it stands in the place of a turn to find where the turn is.
_PROBE = f"{CLOSE}probe{CLOSE}"
#: What a template may raise beside Jinja's own errors: it is a program that works on the record's values.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class ChatRenderer:
    """One template with one tokenizer's special tokens.

    Args:
        template: Jinja, its clock pinned.
        control: The control tokens, to mark in what users wrote and to find ends of turns.
        special: (role, token) that the template knows by name.
        options: (name, JSON) of what else it is given.
        split_control: Whether control strings in what users wrote are marked.

    Raises:
        UsageError: The template is no Jinja.
    """

    def __init__(
        self,
        template: str,
        control: ControlStrings,
        *,
        special: Sequence[tuple[str, str]],
        options: Sequence[tuple[str, str]],
        split_control: bool,
    ) -> None:
        self._template, self._control, self._split = template, control, split_control
        self._given = {**dict(special), **{name: json.loads(value) for name, value in options}}
        self.has_generation = bool(_GENERATION.search(template))
        self._header = self._unasked_header()

    def render(self, record: Record) -> RenderedChat:
        """A conversation as text with what is learned.

        Raises:
            UnusableSampleError: ``template``: it does not take this conversation. ``template-rewrites``: it cannot be
                told what is learned.
        """
        messages = [self._message(message) for message in record.messages or ()]
        tools = self._marked(json.loads(record.tools)) if record.tools else None
        text, tagged = self._run(messages, tools, tags=self.has_generation)
        spans = self._tagged_spans(record.messages or (), tagged)
        if spans is None:
            learned = [number for number, message in enumerate(record.messages or ()) if message.learned]
            spans = [self._turn(messages, tools, text, number) for number in learned]
        return RenderedChat(
            text=text, spans=tuple(self._ended(text, begin, end) for begin, end in spans if begin < end)
        )

    def _tagged_spans(
        self, messages: Sequence[Message], tagged: Sequence[tuple[int, int]]
    ) -> list[tuple[int, int]] | None:
        """What the template's own tags say; None where they cannot say which turns are meant."""
        said = [message.learned for message in messages if message.role == "assistant"]
        if not self.has_generation:
            return None
        if all(said):
            return list(tagged)
        return (
            [span for span, learned in zip(tagged, said, strict=True) if learned]
            if len(tagged) == len(said)
            else None
        )

    def _turn(self, messages: list[dict[str, Any]], tools: Any, text: str, number: int) -> tuple[int, int]:
        """Where one turn stands in the whole text, by what comes before it and what it adds."""
        prompt, _ = self._run(messages[:number], tools, prompt=True)
        with_turn = text if number + 1 == len(messages) else self._run(messages[: number + 1], tools)[0]
        if not text.startswith(prompt):
            raise fault("template-rewrites", "the turns before it are written otherwise later", f"turn {number + 1}")
        begin = len(prompt)
        if text.startswith(with_turn) and with_turn.startswith(prompt):
            end = len(with_turn)
        else:
            end = self._probed_end(messages, tools, text, number)
        if self._header and text.startswith(self._header, begin):
            begin += len(self._header)
        return begin, end

    def _probed_end(self, messages: list[dict[str, Any]], tools: Any, text: str, number: int) -> int:
        """Where a turn ends that is written otherwise when it is the last one."""
        probed = [*messages]
        probed[number] = {**messages[number], "content": _PROBE}
        elsewhere, _ = self._run(probed, tools)
        alone, _ = self._run(probed[: number + 1], tools)
        before, found, after = elsewhere.partition(_PROBE)
        _, found_alone, closing = alone.partition(_PROBE)
        content_end = len(text) - len(after)
        around = text.startswith(before) and text.endswith(after) and len(before) <= content_end
        if not (found and found_alone and around and text.startswith(closing, content_end)):
            raise fault("template-rewrites", "its end cannot be told from what follows it", f"turn {number + 1}")
        return content_end + len(closing)

    def _ended(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Without the blanks after the control token that ends a turn."""
        stop = self._control.last_end(text, begin, end)
        return begin, stop if stop and not text[stop:end].strip() else end

    def _unasked_header(self) -> str:
        """What a template writes before an answer and does not write when it is asked to prompt for one."""
        asked = [{"role": "user", "content": "a"}]
        try:
            prompt, _ = self._run(asked, None, prompt=True)
            plain, _ = self._run(asked, None)
            answered, _ = self._run([*asked, {"role": "assistant", "content": _PROBE}], None)
        except UnusableSampleError:
            return ""
        header = answered[len(prompt) :].partition(_PROBE)[0] if prompt == plain else ""
        return header if header.strip() and answered.startswith(prompt) else ""

    def _run(
        self, messages: list[dict[str, Any]], tools: Any, *, prompt: bool = False, tags: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **self._given,
            )
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(
                "the chat template is no Jinja",
                where=f"line {error.lineno} of the template",
                why=str(error.message),
                fix="give another one with --chat-template FILE",
            ) from error
        except _FAILURES as error:
            raise fault("template", f"the chat template does not take it: {error or type(error).__name__}") from error
        return texts[0], spans[0] if tags else []

    def _message(self, message: Message) -> dict[str, Any]:
        fields = {name: self._marked(json.loads(value)) for name, value in message.fields}
        return {"role": message.role, "content": self._marked(message.content), **fields}

    def _marked(self, value: Any) -> Any:
        """A value with the control strings in its texts between marks; names are left as they are."""
        if not self._split:
            return value
        if isinstance(value, str):
            return self._control.mark(value)
        if isinstance(value, dict):
            return {name: self._marked(child) for name, child in value.items()}
        return [self._marked(child) for child in value] if isinstance(value, list) else value
