"""Records of text: one document each, its content hash, and which fields of a line mean what.

A content hash is made of what was mapped and of nothing else: position, other columns and spelling of the JSON do
not matter, so a line that moves is tokenized once. Forms and names are those of LLaMA-Factory's
``dataset_info.json`` (its ``data/parser.py``). No torch, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from latentcache.identity.content import content_hash

#: Bumped when the same bytes, read alike, would make other records, or other rejections.
RECORD_RULE = 2
#: text: one field. alpaca: instruction, input, output. sharegpt: from and value in turn. openai: role and content.
FORMS = ("text", "alpaca", "sharegpt", "openai")
EXPECTED = "text, messages, conversations, or instruction with output"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """As chat templates know it: system, developer, user, assistant or tool."""
    content: str
    learned: bool = False
    """True if the turn carries loss where only turns of the assistant do."""
    fields: tuple[tuple[str, str], ...] = ()
    """Further values for the template: (name, JSON), as ``tool_calls`` and ``reasoning_content``, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One document, with exactly one of ``text`` and ``messages``."""

    source: str
    """Its file, relative to the data folder with ``/``."""
    line: int
    """Its line or row there, from 1; 1 for a text that is a file."""
    content: bytes
    """16 bytes: the hash of text, messages and tools."""
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    """A system message, if there is one, is the first."""
    tools: str = ""
    """JSON list of the tools that the template is given; empty without any."""


def text_record(source: str, line: int, text: str) -> Record:
    """A text as a record. Raises UnicodeEncodeError for half a surrogate pair."""
    return Record(source=source, line=line, content=content_hash(b"text\n" + text.encode()), text=text)


def chat_record(source: str, line: int, messages: tuple[Message, ...], tools: str = "") -> Record:
    """A conversation as a record. Raises UnicodeEncodeError for half a surrogate pair."""
    turns = [[m.role, m.content, m.learned, m.fields] for m in messages]
    # Not canonical JSON: a template writes the names of a tool in the order they have.
    spelled = json.dumps([turns, tools], ensure_ascii=False, separators=(",", ":"))
    content = content_hash(b"chat\n" + spelled.encode())
    return Record(source=source, line=line, content=content, messages=messages, tools=tools)


def record_size(record: Record) -> int:
    """Characters that are tokenized, without the template."""
    if record.messages is None:
        return len(record.text or "")
    more = sum(len(value) for message in record.messages for _, value in message.fields)
    return sum(len(message.content) for message in record.messages) + more + len(record.tools)


def record_json(record: Record) -> dict[str, Any]:
    """A record as JSON values, as jobs carry it to workers."""
    place = {"source": record.source, "line": record.line}
    if record.messages is None:
        return {**place, "text": record.text}
    turns = [[m.role, m.content, m.learned, [list(pair) for pair in m.fields]] for m in record.messages]
    return {**place, "messages": turns, "tools": record.tools}


def record_from_json(data: Mapping[str, Any]) -> Record:
    """Inverse of :func:`record_json`; the content hash is computed again."""
    if "text" in data:
        return text_record(data["source"], data["line"], data["text"])
    messages = tuple(
        Message(role=role, content=content, learned=learned, fields=tuple((name, value) for name, value in fields))
        for role, content, learned, fields in data["messages"]
    )
    return chat_record(data["source"], data["line"], messages, data.get("tools", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """Names of columns and tags; an empty name is a column that is not used."""

    form: str
    text: str = "text"
    prompt: str = "instruction"
    query: str = "input"
    response: str = "output"
    history: str = ""
    messages: str = "conversations"
    system: str = ""
    tools: str = ""
    role_tag: str = "from"
    content_tag: str = "value"
    user_tag: str = "human"
    assistant_tag: str = "gpt"
    observation_tag: str = "observation"
    function_tag: str = "function_call"
    system_tag: str = "system"

    def as_json(self) -> dict[str, str]:
        """As JSON values."""
        return asdict(self)


TEXT = RecordFormat(form="text")
#: Without a dataset_info.json, the optional columns are used if they are there.
ALPACA = RecordFormat(form="alpaca", history="history", system="system", tools="tools")
SHAREGPT = RecordFormat(form="sharegpt", system="system", tools="tools")
_ROLE_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "",
}
OPENAI = RecordFormat(form="openai", messages="messages", tools="tools", **_ROLE_TAGS)
#: Fields that must be there -> the form that they mean.
_TELLING: tuple[tuple[tuple[str, ...], RecordFormat], ...] = (
    (("messages",), OPENAI),
    (("conversations",), SHAREGPT),
    (("instruction", "output"), ALPACA),
    (("text",), TEXT),
)


def detect_format(record: Mapping[str, Any]) -> RecordFormat | None:
    """The form of a record by the names of its fields; None if none or several could be meant.

    A record with ``text`` beside the fields of another form is of that other form: data sets of conversations often
    carry a rendered copy. ``messages`` in the manner of sharegpt (``from`` and ``value``) are sharegpt.
    """
    found = [form for names, form in _TELLING if all(name in record for name in names)]
    found = [form for form in found if form is not TEXT] or found
    return _by_tags(record, found[0]) if len(found) == 1 else None


def _by_tags(record: Mapping[str, Any], form: RecordFormat) -> RecordFormat:
    """A form whose column has the other form's tags takes those."""
    turns = record[form.messages] if form.form in ("sharegpt", "openai") else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return form
    if form is OPENAI and "from" in first and "role" not in first:
        return RecordFormat(form="sharegpt", messages="messages", system="system", tools="tools")
    if form is SHAREGPT and "role" in first and "from" not in first:
        return RecordFormat(form="openai", messages="conversations", tools="tools", **_ROLE_TAGS)
    return form
