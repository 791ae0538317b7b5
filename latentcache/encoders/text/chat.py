"""Conversations through a chat template: one text, and its loss spans.

Templates are rendered by transformers' own sandboxed Jinja. Loss spans come from the template if it marks them with
``{% generation %}``; otherwise a turn is the text that the conversation with it has more than the conversation
before it with the prompt for an answer. Both end with the special token that ends the turn: blanks after it carry no
loss.

Some templates rewrite earlier turns once others follow (they remove the reasoning). There the turn begins
where its prompt ends, and its content is found by putting another text in its place in the whole conversation; what
follows it there has to be what follows it where it is the last turn. A record that fails this is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from latentcache.encoders.text.special import CLOSE, RenderedChat, SpecialTokens
from latentcache.errors import UnusableSampleError, UsageError
from latentcache.sources.lines import fault
from latentcache.sources.records import Message, Record

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
#: A text that no template searches for; it replaces the content of a turn to find the turn's place.
_PROBE = f"{CLOSE}probe{CLOSE}"
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


class ChatRenderer:
    """One template with one tokenizer's special tokens.

    Args:
        template: Jinja, its clock pinned.
        control: The special tokens, to mark them in content and to find ends of turns.
        special: (role, token) that the template uses by name.
        options: (name, JSON) of its other values.
        split_control: True: special-token text in content is marked.

    Raises:
        UsageError: The template is not valid Jinja.
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
        self._header = self._unasked_header()

    def render(self, record: Record) -> RenderedChat:
        """A conversation as text with its loss spans.

        Raises:
            UnusableSampleError: ``template``: it does not accept this conversation. ``template-rewrites``: the loss
                spans are unknown.
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
        """Spans of the template's own tags; None if they do not tell the turns apart."""
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
        """Place of one turn in the whole text, by the text before it and the text that it adds."""
        prompt, _ = self._run(messages[:number], tools, prompt=True)
        with_turn = text if number + 1 == len(messages) else self._run(messages[: number + 1], tools)[0]
        if not text.startswith(prompt):
            raise fault("template-rewrites", "the template rewrites the turns before it later", f"turn {number + 1}")
        begin = len(prompt)
        if text.startswith(with_turn) and with_turn.startswith(prompt):
            end = len(with_turn)
        else:
            end = self._probed_end(messages, tools, text, number)
        if self._header and text.startswith(self._header, begin):
            begin += len(self._header)
        return begin, end

    def _probed_end(self, messages: list[dict[str, Any]], tools: Any, text: str, number: int) -> int:
        """End of a turn that the template writes otherwise if it is the last one."""
        probed = [*messages]
        probed[number] = {**messages[number], "content": _PROBE}
        elsewhere, _ = self._run(probed, tools)
        alone, _ = self._run(probed[: number + 1], tools)
        before, found, after = elsewhere.partition(_PROBE)
        _, found_alone, closing = alone.partition(_PROBE)
        content_end = len(text) - len(after)
        around = text.startswith(before) and text.endswith(after) and len(before) <= content_end
        if not (found and found_alone and around and text.startswith(closing, content_end)):
            raise fault(
                "template-rewrites", "its end is indistinguishable from the text that follows", f"turn {number + 1}"
            )
        return content_end + len(closing)

    def _ended(self, text: str, begin: int, end: int) -> tuple[int, int]:
        """Without the blanks after the special token that ends a turn."""
        stop = self._control.last_end(text, begin, end)
        return begin, stop if stop and not text[stop:end].strip() else end

    def _unasked_header(self) -> str:
        """Text that a template writes before an answer and not as the prompt for one."""
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

    def _message(self, message: Message) -> dict[str, Any]:
        fields = {name: self._marked(json.loads(value)) for name, value in message.fields}
        return {"role": message.role, "content": self._marked(message.content), **fields}

    def _marked(self, value: Any) -> Any:
        """A value with the special-token text in its texts between marks; names are unchanged."""
        if not self._split:
            return value
        if isinstance(value, str):
            return self._control.mark(value)
        if isinstance(value, dict):
            return {name: self._marked(child) for name, child in value.items()}
        return [self._marked(child) for child in value] if isinstance(value, list) else value
