"""Records of text: one document each, how the fields of a line become one, and the files that hold them.

The content hash covers the mapped values alone. Position, other columns and spelling of the JSON do not matter, so a
line that moves is tokenized once.

Roles may have any of the usual names and any order that the template accepts, as in TRL. As in LLaMA-Factory's
``data/converter.py``, an instruction and an input are joined by a line end, and answers in a history are learned.
``prompt`` with ``completion`` carries loss in the completion (TRL's ``completion_only_loss``). ``weight`` 0 or 1
(OpenAI) and ``train`` true or false (axolotl) say if a turn carries loss. Tools and tool calls reach the template as
OpenAI writes them. No torch, no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import StatMemo, content_hash, json_hash
from latentcache.sources.causes import Notes, as_rejected, fault
from latentcache.sources.formats.archives import ARROW, PARQUET, open_rows
from latentcache.sources.formats.files import (
    BLANK,
    MAX_LINE_BYTES,
    MAX_SOURCE_BYTES,
    LineReader,
    decode,
    list_items,
    listed,
    open_source,
    parse_json,
    shown,
    stat_source,
)
from latentcache.sources.inventory import extension_of
from latentcache.value import Value

#: Rejected records of one file and one reason that are listed; the others are counted.
_LISTED = 1000
#: Rows of a parquet or Arrow file that are in memory together.
_ROWS = 1024
#: Bumped when the same bytes, read alike, would make other records, or other rejections.
RECORD_RULE = 6
#: Fields of a turn that are given to the template beside its role and content.
PASSED = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_FIRST_ROLES = ("system", "developer")
_THOUGHT = re.compile(r"\s*(<think>.*?</think>)(.*)", re.DOTALL)
EXPECTED = "text, messages, conversations, prompt with completion, or instruction with output"
#: Columns of pixels and sound; a record that fills one cannot be read as text.
MEDIA = frozenset(("images", "image", "videos", "video", "audios", "audio"))
#: Fields of records that plain training cannot use -> the reason; the first that fits.
_OTHER_USE: Mapping[tuple[str, ...], str] = {
    ("chosen", "rejected"): "it holds preferences (chosen, rejected), not plain answers",
    ("prompt", "completions", "labels"): "it holds labels of steps, not plain answers",
    ("prompt", "completion", "label"): "it holds feedback (label), not plain answers",
    ("input_ids",): "it holds token ids already: train on them without a cache, or give the texts",
}


class Message(Value):
    """One turn of a conversation."""

    role: str
    """As chat templates know it: system, developer, user, assistant or tool."""
    content: str
    learned: bool = False
    """True if the turn carries loss where only turns of the assistant do."""
    fields: tuple[tuple[str, str], ...] = ()
    """Further values for the template: (name, JSON), as ``tool_calls`` and ``reasoning_content``, in their order."""


# Not frozen: there is one for each item, and a frozen one takes three times as long to make.
@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class Record:
    """One document, with exactly one of ``text`` and ``messages``."""

    source: str
    """Its file, relative to the data folder with ``/``."""
    line: int
    """Its line or row there, from 1; 1 for a text that is a file."""
    content: bytes
    """16 bytes: the hash of text, messages and tools."""
    text: str | None = None
    begin: int = 0
    """Character of the text at which its loss begins: the end of a prompt."""
    messages: tuple[Message, ...] | None = None
    tools: str = ""
    """JSON list of the tools that the template is given; empty without any."""
    options: str = ""
    """JSON object of values that the template is given for this record alone; empty without any."""

    @property
    def form(self) -> int:
        """0: a text. 1: a conversation. 2: a text that begins with a prompt. A column of the samples."""
        return 1 if self.messages is not None else 2 if self.begin else 0


def text_record(source: str, line: int, text: str, content: bytes = b"", *, begin: int = 0) -> Record:
    """A text as a record; its content hash may be known. Raises UnicodeEncodeError for half a surrogate pair."""
    content = content or content_hash((b"prompt %d\n" % begin if begin else b"text\n") + text.encode())
    return Record(source=source, line=line, content=content, text=text, begin=begin)


def chat_record(
    source: str, line: int, messages: tuple[Message, ...], tools: str = "", content: bytes = b"", *, options: str = ""
) -> Record:
    """A conversation as a record, as :func:`text_record`."""
    if not content:
        turns = [[m.role, m.content, m.learned, m.fields] for m in messages]
        # Not canonical JSON: a template writes the names of a tool in the order they have.
        values = [turns, tools, options] if options else [turns, tools]
        spelled = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
        content = content_hash(b"chat\n" + spelled.encode())
    return Record(source=source, line=line, content=content, messages=messages, tools=tools, options=options)


def record_size(record: Record) -> int:
    """Characters that are tokenized, without the template."""
    if record.messages is None:
        return len(record.text or "")
    more = sum(len(value) for message in record.messages for _, value in message.fields)
    return sum(len(message.content) for message in record.messages) + more + len(record.tools)


class RecordFormat(Value):
    """Where a record has its text or its turns."""

    form: str
    """``text``; ``completion``: prompt and completion; ``chat``: turns; ``alpaca``: instruction, input, output."""
    messages: str = ""
    """Field with the turns of a chat."""
    role_tag: str = "role"
    content_tag: str = "content"


#: Extension in lower case -> kind of file.
KINDS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".text": "text"}


def reading_of(name: str, part: str, *, text_lines: bool) -> bytes:
    """16 bytes: equal file bytes that are read alike, for one part, make equal records."""
    kind = KINDS.get(extension_of(name), ARROW)
    return json_hash({"kind": kind, "text_lines": text_lines, "rule": RECORD_RULE, "part": part})


TEXT, COMPLETION, ALPACA = (RecordFormat(form=form) for form in ("text", "completion", "alpaca"))
CHAT = RecordFormat(form="chat", messages="messages")
SHAREGPT = RecordFormat(form="chat", messages="conversations", role_tag="from", content_tag="value")
#: Fields that must be there -> the form that they mean.
_TELLING: tuple[tuple[tuple[str, ...], RecordFormat], ...] = (
    (("messages",), CHAT),
    (("conversations",), SHAREGPT),
    (("instruction", "output"), ALPACA),
    (("prompt", "completion"), COMPLETION),
    (("text",), TEXT),
)
#: Names of roles, those of Unsloth's ``standardize_data_formats`` included -> the template's.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("user", "human", "input"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model", "output"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **{role: role for role in ("system", "developer")},
}


def detect_format(record: Mapping[str, Any]) -> RecordFormat:
    """The form of a record by the names of its fields.

    A record with ``text`` beside the fields of another form is of the other form: conversations often have a rendered
    copy. A column of turns may have the tags of OpenAI (``role``) or of ShareGPT (``from``).

    Raises:
        UnusableSampleError: ``record-field``: none or several could be meant. ``not-for-sft``: it is for another kind
            of training.
    """
    fitting = [form for names, form in _TELLING if all(name in record for name in names)]
    fitting = [form for form in fitting if form is not TEXT] or fitting
    use = next((use for names, use in _OTHER_USE.items() if all(name in record for name in names)), "")
    if record.keys() == {"prompt"}:
        use = "it holds a prompt without a completion: there is nothing to learn"
    if use and (not fitting or fitting in ([TEXT], [COMPLETION])):
        raise fault("not-for-sft", use)
    if len(fitting) != 1:
        fields = listed(list(record)) or "no fields"
        raise fault("record-field", f"expected {'one of ' if fitting else ''}{EXPECTED}; found {fields}")
    (form,) = fitting
    turns = record[form.messages] if form.form == "chat" else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict) or form.role_tag in first:
        return form
    other = SHAREGPT if form.role_tag == "role" else CHAT
    return replace(other, messages=form.messages) if other.role_tag in first else form


def map_record(record: Any, form: RecordFormat, *, source: str, line: int) -> Record:
    """One parsed line as a record.

    Raises:
        UnusableSampleError: ``slug`` is the reason, ``where`` the field: ``record-field``, ``record-empty``,
            ``record-unicode``, ``role-order``, ``no-answer``, ``not-for-sft``.
    """
    if not isinstance(record, dict):
        raise fault("record-field", f"expected an object, found {shown(record)}")
    try:
        media = [name for name in MEDIA.intersection(record) if record[name]]
        if media:
            raise fault("not-for-sft", f"it holds {min(media)}", min(media))
        if form.form == "text":
            if not _part(record, "text", str):
                raise fault("record-empty", "the text is empty", "text")
            return text_record(source, line, record["text"])
        if form.form == "completion" and isinstance(record.get("prompt"), str):
            prompt = record["prompt"]
            answer = _answer(record, "completion")
            return text_record(source, line, prompt + answer, begin=len(prompt))
        options = _part(record, "chat_template_kwargs", dict, None) or None  # as TRL takes them
        spelled = _spelled(options, "chat_template_kwargs") if options else ""
        turns = tuple(_MAPPERS[form.form](record, form))
        return chat_record(source, line, turns, _tools(record), options=spelled)
    except UnicodeEncodeError as error:
        raise fault("record-unicode", f"half of a surrogate pair, {error.object[error.start]!r}") from error


_KINDS = {str: "text", dict: "an object", list: "a list", bool: "true or false"}
_REQUIRED: Any = object()


def _part(held: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED, where: str = "") -> Any:
    """A value of one type in a record or a turn; ``default`` if it is absent or null."""
    value = held.get(name)
    if isinstance(value, kind):
        return value
    if value is None and default is not _REQUIRED:
        return default
    actual = shown(value) if name in held else f"the fields {listed(list(held)) or 'none'}"
    raise fault("record-field", f"expected {_KINDS[kind]}, found {actual}", where or name)


def _alpaca(record: Mapping[str, Any], _: RecordFormat) -> Iterator[Message]:
    yield from _system(record)
    for number, pair in enumerate(_part(record, "history", list, ())):
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            problem = f"expected a question and an answer, found {shown(pair)}"
            raise fault("record-field", problem, f"history[{number}]")
        yield Message(role="user", content=pair[0])
        yield Message(role="assistant", content=pair[1], learned=True)
    is_null = "instruction" in record and record["instruction"] is None
    query = ["" if is_null else _part(record, "instruction", str), _part(record, "input", str, "")]
    yield Message(role="user", content="\n".join(filter(None, query)))
    yield Message(role="assistant", content=_answer(record, "output"), learned=True)


def _answer(record: Mapping[str, Any], name: str) -> str:
    if not isinstance(record.get(name), str):
        raise fault("no-answer", f"expected text, found {shown(record.get(name))}", name)
    return str(record[name])


def _completion(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    prompt, answer = (_messages(record, replace(form, messages=name)) for name in ("prompt", "completion"))
    if not any(message.learned for message in answer):
        raise fault("no-answer", "no turn of the assistant carries loss", "completion")
    return [*(replace(message, learned=False) for message in prompt), *answer]


def _chat(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Turns with roles of any usual name; the template decides which orders are allowed."""
    messages = _messages(record, form)
    if not any(message.role == "assistant" for message in messages):
        raise fault("no-answer", "expected a turn of the assistant, found none", form.messages)
    return messages if messages[0].role in _FIRST_ROLES else [*_system(record), *messages]


def _system(record: Mapping[str, Any]) -> list[Message]:
    text = _part(record, "system", str, "")
    return [Message(role="system", content=text)] if text else []


def _messages(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    turns = _part(record, form.messages, list)
    messages = []
    if not turns:
        raise fault("record-empty", "the conversation has no turns", form.messages)
    for number, turn in enumerate(turns):
        where = f"{form.messages}[{number}]"
        if not isinstance(turn, dict):
            raise fault("record-field", f"expected an object, found {shown(turn)}", where)
        written = _part(turn, form.role_tag, str, where=f"{where}.{form.role_tag}")
        role = ROLES.get(written, "")
        if not role:
            expected = f"expected one of {listed(list(ROLES))}, found {shown(written)}"
            raise fault("role-order", expected, f"{where}.{form.role_tag}")
        if role == "call" and not turn.get("tool_calls"):
            messages.append(_called(turn, form, where))
        else:
            messages.append(_message(turn, "assistant" if role == "call" else role, form, where))
    return messages


def _called(turn: Mapping[str, Any], form: RecordFormat, where: str) -> Message:
    """A turn whose content is one call as JSON, or a list of them; a thought may stand before it."""
    written = _content(turn, form, where)
    field_name = f"{where}.{form.content_tag}"
    thought = _THOUGHT.fullmatch(written)
    calls = _json_in(thought[2] if thought else written, field_name)
    fields = (("tool_calls", _tool_calls(_wrapped(calls), field_name, "")),)
    content = thought[1] if thought else ""
    return Message(role="assistant", content=content, learned=_learned(turn, where), fields=fields)


def _message(turn: Mapping[str, Any], role: str, form: RecordFormat, where: str) -> Message:
    fields = []
    for name in PASSED:
        if turn.get(name) is not None:
            value = turn[name]
            spelled = _tool_calls(value, f"{where}.{name}") if name == "tool_calls" else _spelled(value, where)
            fields.append((name, spelled))
    if turn.get("function_call") is not None and not turn.get("tool_calls"):  # the older spelling
        field_name = f"{where}.function_call"
        fields.append(("tool_calls", _tool_calls(_wrapped(turn["function_call"]), field_name, "")))
    has_calls = any(name == "tool_calls" for name, _ in fields)
    content = "" if has_calls and turn.get(form.content_tag) is None else _content(turn, form, where)
    learned = role == "assistant" and _learned(turn, where)
    if role != "assistant" and (turn.get("train") is True or turn.get("weight") not in (None, 0, 1)):
        raise fault("record-field", "only turns of the assistant can carry loss", where)
    return Message(role=role, content=content, learned=learned, fields=tuple(fields))


def _content(turn: Mapping[str, Any], form: RecordFormat, where: str) -> str:
    field_name = f"{where}.{form.content_tag}"
    parts = turn.get(form.content_tag)
    if not isinstance(parts, list):
        return str(_part(turn, form.content_tag, str, where=field_name))
    for number, part in enumerate(parts):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise fault("record-field", f"expected a part of text, found {shown(part)}", f"{field_name}[{number}]")
    return "".join(part["text"] for part in parts)


def _learned(turn: Mapping[str, Any], where: str) -> bool:
    """True if a turn of the assistant carries loss: unless ``weight`` is 0 or ``train`` is false."""
    for name in ("train_detail", "loss"):  # axolotl, ms-swift
        if turn.get(name) not in (None, [], True):
            raise fault("record-field", 'a turn without loss has "train": false or "weight": 0', f"{where}.{name}")
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise fault("record-field", f"expected 0 or 1, found {shown(weight)}", f"{where}.weight")
    return bool(_part(turn, "train", bool, default=True, where=f"{where}.train")) and weight != 0


def _tools(record: Mapping[str, Any]) -> str:
    """The list of tools, given as a list or as JSON text, as JSON; empty without any.

    A bare function becomes an OpenAI tool, as LLaMA-Factory does before it writes it (its ``data/tool_utils.py``).
    """
    name = "tools" if record.get("tools") else "functions"
    tools = record.get(name)
    tools = _json_in(tools, name) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fault("record-field", f"expected a list of objects, found {shown(tools)}", name)
    return _spelled([tool if tool.get("type") == "function" else _wrapped(tool)[0] for tool in tools], name)


def _wrapped(functions: Any) -> list[dict[str, Any]]:
    several = functions if isinstance(functions, list) else [functions]
    return [{"type": "function", "function": function} for function in several]


def _tool_calls(calls: Any, where: str, inside: str = ".function") -> str:
    """Calls with their arguments as objects: OpenAI has them as text, templates write them as JSON.

    ``inside`` is where in a call the record has name and arguments.
    """
    if not isinstance(calls, list):
        raise fault("record-field", f"expected a list of calls, found {shown(calls)}", where)
    opened = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise fault("record-field", f"expected a function with a name, found {shown(call)}", f"{where}[{number}]")
        arguments = function.get("arguments", {})
        field_name = f"{where}[{number}]{inside}.arguments"
        arguments = _json_in(arguments, field_name) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise fault("record-field", f"expected an object, found {shown(arguments)}", field_name)
        opened.append({**call, "function": {**function, "arguments": arguments}})
    return _spelled(opened, where)


def _json_in(text: str, where: str) -> Any:
    """The JSON in a field; its line is well formed, so the field is at fault."""
    try:
        return parse_json(text)
    except UnusableSampleError as error:
        problem = error.what.removeprefix("no JSON: ")
        raise fault("record-field", f"expected JSON as text: {problem}", where) from error


def _spelled(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise fault("record-field", f"it cannot be written as JSON: {error}", where) from error


_MAPPERS: Mapping[str, Callable[[Mapping[str, Any], RecordFormat], Iterable[Message]]] = {
    "alpaca": _alpaca,
    "completion": _completion,
    "chat": _chat,
}


# files


@dataclass(slots=True)
class RecordReader:
    """The records of one file, read once by iterating. ``stat`` and ``content`` are known at the end."""

    path: Path
    name: str
    text_lines: bool = False
    """True if each line of a text is a document, rather than the whole file."""
    rejected: Notes = field(default_factory=lambda: Notes(_LISTED))
    """The records that are rejected."""
    last: int = 0
    """Line, row or item that was read last."""
    stat: StatMemo | None = None
    content: bytes = b""
    _form: RecordFormat | None = None
    _has_objects: bool = False

    def __iter__(self) -> Iterator[Record]:
        """Every usable record; raises UnusableSampleError if it cannot be read to its end."""
        kind = KINDS.get(extension_of(self.path.name), ARROW)
        with open_source(self.path) as file:
            reader = LineReader(file, self.path)
            if kind in (PARQUET, ARROW):
                for _ in reader.chunks():
                    pass
            elif kind == "text":
                error = fault("text-too-large", "it has more than 64 MiB", self.path)
                whole = reader.lines() if self.text_lines else [(1, reader.all_bytes(MAX_LINE_BYTES, error))]
                yield from self._records(whole, lambda raw: {"text": decode(raw)})
            elif reader.head.lstrip(BLANK).startswith(b"["):
                words = "a JSON list has at most 1 GiB; `jq -c '.[]'` makes lines of it"
                data = reader.all_bytes(MAX_SOURCE_BYTES, fault("too-large", words, self.path))
                yield from self._records(list_items(data), lambda value: value)
                if self.last and not self._has_objects:
                    raise fault("not-records", "it is a list without objects")
            else:
                is_small = self.name.lower().endswith(".json") and reader.size <= MAX_LINE_BYTES
                lines = self._lines_of_object(reader) if is_small else reader.lines()
                yield from self._records(lines, lambda raw: parse_json(decode(raw)))
            self.stat, self.content = reader.finish()
        if kind in (PARQUET, ARROW):
            yield from self._columnar(kind)
            if self.stat.identity != stat_source(self.path).identity:
                raise fault("changing", "its size or time changed while it was read", self.path)

    def _records(self, values: Iterable[tuple[int, Any]], parse: Callable[[Any], Any]) -> Iterator[Record]:
        """The records of (line, value); a line that makes none is rejected."""
        for line, value in values:
            try:
                parsed = parse(value)
                self._has_objects |= isinstance(parsed, dict)
                if self._form is None and isinstance(parsed, dict):
                    self._form = detect_format(parsed)
                record = map_record(parsed, self._form or TEXT, source=self.name, line=line)
            except UnusableSampleError as error:
                self.rejected.add(as_rejected(self.name, error, line=line, field=error.where))
            else:
                yield record
            self.last = line

    def _lines_of_object(self, reader: LineReader) -> Iterator[tuple[int, bytes]]:
        """A file as one line if it is one object, else its lines; raises ``not-records`` for settings."""
        data = b"".join(reader.chunks())
        try:
            value = parse_json(decode(data))
        except UnusableSampleError:
            lines = enumerate(data.split(b"\n"), start=1)
            yield from ((line, raw) for line, raw in lines if raw.strip(BLANK))
            return
        try:
            if isinstance(value, dict):
                self._form = self._form or detect_format(value)
        except UnusableSampleError as error:
            if error.slug == "record-field":
                raise fault("not-records", f"it is one JSON object, and no record: {error.what}") from error
        yield 1, data

    def _columnar(self, kind: str) -> Iterator[Record]:
        with open_rows(self.path, kind) as table:
            # ``datasets`` (its feature ``Json``) writes values of several forms as JSON.
            kinds = {column.name: column.type for column in table.schema if "arrow.json" in str(column.type)}
            rows = (row for batch in table.batches(rows=_ROWS) for row in batch.to_pylist())
            parse = lambda row: {**row, **{name: _parsed(row[name], kind) for name, kind in kinds.items()}}  # noqa: E731
            yield from self._records(enumerate(rows, start=1), parse)


def _parsed(value: Any, kind: Any) -> Any:
    if value is None or "arrow.json" not in str(kind):
        return value
    if isinstance(value, list):
        return [_parsed(item, kind.value_type) for item in value]
    if isinstance(value, dict):
        return {name: _parsed(item, kind.field(name).type) for name, item in value.items()}
    return parse_json(value)
