"""Records of text: one document each, its content hash, and how the fields of a line become one.

A content hash is made of what was mapped and of nothing else: position, other columns and spelling of the JSON do
not matter, so a line that moves is tokenized once. Forms and names are those of LLaMA-Factory's
``dataset_info.json`` (its ``data/parser.py``), and so are the rules of its converters: an instruction and an input
are joined by a line end, answers in a history are learned, sharegpt turns alternate strictly. Records that it skips
with a warning are rejected with the field. Beyond it, ``weight`` 0 or 1 (OpenAI) and ``train`` true or false
(axolotl) of a turn say if it carries loss; tool calls reach the template as objects. No torch, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import content_hash
from latentcache.sources.lines import fault, listed, parse_json, shown

#: Bumped when the same bytes, read alike, would make other records, or other rejections.
RECORD_RULE = 2
#: Fields of a turn that are given to the template beside its role and content.
PASSED = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_FIRST_ROLES = ("system", "developer")
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
    messages: tuple[Message, ...] | None = None
    """A system message, if there is one, is the first."""
    tools: str = ""
    """JSON list of the tools that the template is given; empty without any."""


def text_record(source: str, line: int, text: str, content: bytes = b"") -> Record:
    """A text as a record; its content hash may be known. Raises UnicodeEncodeError for half a surrogate pair."""
    content = content or content_hash(b"text\n" + text.encode())
    return Record(source=source, line=line, content=content, text=text)


def chat_record(
    source: str, line: int, messages: tuple[Message, ...], tools: str = "", content: bytes = b""
) -> Record:
    """A conversation as a record, as :func:`text_record`."""
    if content:
        return Record(source=source, line=line, content=content, messages=messages, tools=tools)
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


def record_from_json(data: Mapping[str, Any], content: bytes = b"") -> Record:
    """Inverse of :func:`record_json`; the content hash is computed again if it is not given."""
    if "text" in data:
        return text_record(data["source"], data["line"], data["text"], content)
    messages = tuple(
        Message(role=role, content=content, learned=learned, fields=tuple((name, value) for name, value in fields))
        for role, content, learned, fields in data["messages"]
    )
    return chat_record(data["source"], data["line"], messages, data.get("tools", ""), content)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFormat:
    """Names of columns and tags; an empty name is a column that is not used."""

    form: str
    """``text``: one field. ``alpaca``: instruction, input, output. ``sharegpt``: from and value in turn. ``openai``:
    role and content."""
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


def map_record(record: Any, form: RecordFormat, *, source: str, line: int) -> Record:
    """One parsed line as a record.

    Raises:
        UnusableSampleError: ``slug`` is the reason, ``where`` the field: ``record-field``, ``record-empty``,
            ``record-unicode``, ``role-order``, ``no-answer``.
    """
    if not isinstance(record, dict):
        raise fault("record-field", f"expected an object, found {shown(record)}")
    try:
        if form.form == "text":
            return text_record(source, line, _text(record, form.text))
        turns = {"alpaca": _alpaca, "sharegpt": _sharegpt, "openai": _openai}[form.form]
        return chat_record(source, line, tuple(turns(record, form)), _tools(record, form.tools))
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair, {error.object[error.start]!r}"
        raise fault("record-unicode", found, _place_of_half(record, form)) from error


def _text(record: Mapping[str, Any], name: str) -> str:
    text = _string(record, name, name)
    if not text:
        raise fault("record-empty", "the text is empty", name)
    return text


def _alpaca(record: Mapping[str, Any], form: RecordFormat) -> Iterator[Message]:
    """System, history, then the instruction with its input, then the answer."""
    yield from _system(record, form)
    for number, pair in enumerate(_optional_list(record, form.history)):
        where = f"{form.history}[{number}]"
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise fault("record-field", f"expected a question and an answer, found {shown(pair)}", where)
        yield Message(role="user", content=pair[0])
        yield Message(role="assistant", content=pair[1], learned=True)
    is_null = form.prompt in record and record[form.prompt] is None
    query = [_string(record, form.prompt, form.prompt)] if form.prompt and not is_null else []
    query.append(_optional_string(record, form.query))
    yield Message(role="user", content="\n".join(filter(None, query)))
    if not isinstance(record.get(form.response), str):
        raise fault("no-answer", f"expected text, found {_found(record, form.response)}", form.response)
    yield Message(role="assistant", content=record[form.response], learned=True)


def _sharegpt(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Turns of user or observation at odd places, of assistant or function at even ones."""
    turns = _turns(record, form)
    system = list(_system(record, form))
    first = 0
    if form.system_tag and _role(turns[0], form, 0) == form.system_tag:
        system = [Message(role="system", content=_content(turns[0], form, 0))]
        first = 1
    sides = ((form.user_tag, form.observation_tag), (form.assistant_tag, form.function_tag))
    messages = []
    for place, turn in enumerate(turns[first:]):
        number, role, wanted = place + first, _role(turn, form, place + first), sides[place % 2]
        if role not in filter(None, wanted):
            expected = " or ".join(filter(None, wanted))
            where = f"{form.messages}[{number}].{form.role_tag}"
            raise fault("role-order", f"expected {expected}, found {shown(role)}", where)
        messages.append(_sharegpt_message(turn, role, form, number))
    _check_end(messages, form)
    return [*system, *messages]


def _sharegpt_message(turn: Mapping[str, Any], role: str, form: RecordFormat, number: int) -> Message:
    if role == form.function_tag:
        return _called(turn, form, number)
    content = _content(turn, form, number)
    if role == form.assistant_tag:
        return Message(role="assistant", content=content, learned=_learned(turn, form, number))
    return Message(role="tool" if role == form.observation_tag else "user", content=content)


def _called(turn: Mapping[str, Any], form: RecordFormat, number: int) -> Message:
    """A turn whose content is one call as JSON, or a list of them."""
    where = f"{form.messages}[{number}].{form.content_tag}"
    calls = _json_in(_content(turn, form, number), where)
    calls = [{"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]
    fields = (("tool_calls", _tool_calls(calls, where, "")),)
    return Message(role="assistant", content="", learned=_learned(turn, form, number), fields=fields)


def _openai(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Roles as they are; which orders are allowed is left to the template, within reason."""
    turns = _turns(record, form)
    names = {form.function_tag: "assistant", form.user_tag: "user", form.assistant_tag: "assistant"}
    names |= {form.observation_tag: "tool", form.system_tag: "system", "developer": "developer"}
    names.pop("", None)
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        role, where = _role(turn, form, number), f"{form.messages}[{number}].{form.role_tag}"
        if role not in names:
            raise fault("role-order", f"expected one of {listed(list(names))}, found {shown(role)}", where)
        if names[role] in _FIRST_ROLES and number:
            raise fault("role-order", f"{role} may only be the first turn", where)
        if names[role] == "tool" and not any(message.role == "assistant" for message in messages):
            raise fault("role-order", "a tool answers before the assistant asked", where)
        is_call = role == form.function_tag != form.assistant_tag and not turn.get("tool_calls")
        message = _called(turn, form, number) if is_call else _openai_message(turn, names[role], form, number)
        messages.append(message)
    _check_end(messages, form)
    return [*([] if messages[0].role in _FIRST_ROLES else _system(record, form)), *messages]


def _openai_message(turn: Mapping[str, Any], role: str, form: RecordFormat, number: int) -> Message:
    where = f"{form.messages}[{number}]"
    fields = []
    for name in PASSED:
        if turn.get(name) is not None:
            value = turn[name]
            spelled = _tool_calls(value, f"{where}.{name}") if name == "tool_calls" else _spelled(value, where)
            fields.append((name, spelled))
    has_calls = any(name == "tool_calls" for name, _ in fields)
    content = "" if has_calls and turn.get(form.content_tag) is None else _content(turn, form, number)
    learned = role == "assistant" and _learned(turn, form, number)
    if role != "assistant" and (turn.get("train") is True or turn.get("weight") not in (None, 0, 1)):
        raise fault("record-field", "only turns of the assistant can carry loss", where)
    return Message(role=role, content=content, learned=learned, fields=tuple(fields))


def _turns(record: Mapping[str, Any], form: RecordFormat) -> list[dict[str, Any]]:
    turns = record.get(form.messages)
    if not isinstance(turns, list):
        raise fault("record-field", f"expected a list of turns, found {_found(record, form.messages)}", form.messages)
    if not turns:
        raise fault("record-empty", "the conversation has no turns", form.messages)
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise fault("record-field", f"expected an object, found {shown(turn)}", f"{form.messages}[{number}]")
    return turns


def _check_end(messages: Sequence[Message], form: RecordFormat) -> None:
    if not messages or messages[-1].role != "assistant":
        last = f"found one of {messages[-1].role}" if messages else "found none"
        raise fault("no-answer", f"expected a turn of the assistant at the end, {last}", form.messages)


def _role(turn: Mapping[str, Any], form: RecordFormat, number: int) -> str:
    return _string(turn, form.role_tag, f"{form.messages}[{number}].{form.role_tag}")


def _content(turn: Mapping[str, Any], form: RecordFormat, number: int) -> str:
    """Text, or the texts of a list of parts put together."""
    where = f"{form.messages}[{number}].{form.content_tag}"
    parts = turn.get(form.content_tag)
    if not isinstance(parts, list):
        return _string(turn, form.content_tag, where)
    for place, part in enumerate(parts):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise fault("record-field", f"expected a part of text, found {shown(part)}", f"{where}[{place}]")
    return "".join(part["text"] for part in parts)


def _learned(turn: Mapping[str, Any], form: RecordFormat, number: int) -> bool:
    """True if a turn of the assistant carries loss: unless ``weight`` is 0 or ``train`` is false."""
    where = f"{form.messages}[{number}]"
    weight, train = turn.get("weight"), turn.get("train")
    if weight is not None and weight not in (0, 1):
        raise fault("record-field", f"expected 0 or 1, found {shown(weight)}", f"{where}.weight")
    if train is not None and not isinstance(train, bool):
        raise fault("record-field", f"expected true or false, found {shown(train)}", f"{where}.train")
    return weight != 0 and train is not False


def _system(record: Mapping[str, Any], form: RecordFormat) -> Iterator[Message]:
    text = _optional_string(record, form.system)
    if text:
        yield Message(role="system", content=text)


def _tools(record: Mapping[str, Any], name: str) -> str:
    """The list of tools, given as a list or as JSON text, as JSON; empty without any."""
    tools = record.get(name) if name else None
    tools = _json_in(tools, name) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fault("record-field", f"expected a list of objects, found {shown(tools)}", name)
    return _spelled(tools, name)


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
        arguments, place = function.get("arguments", {}), f"{where}[{number}]{inside}.arguments"
        arguments = _json_in(arguments, place) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict):
            raise fault("record-field", f"expected an object, found {shown(arguments)}", place)
        opened.append({**call, "function": {**function, "arguments": arguments}})
    return _spelled(opened, where)


def _json_in(text: str, where: str) -> Any:
    """The JSON in a field; its line is well formed, so the field is at fault."""
    try:
        return parse_json(text)
    except UnusableSampleError as error:
        found = error.what.removeprefix("no JSON: ")
        raise fault("record-field", f"expected JSON as text: {found}", where) from error


def _place_of_half(record: Mapping[str, Any], form: RecordFormat) -> str:
    """The first field with half a surrogate pair, else the first with one as an escape in JSON."""
    columns = {
        "text": (form.text,),
        "alpaca": (form.system, form.history, form.prompt, form.query, form.response, form.tools),
    }.get(form.form, (form.system, form.messages, form.tools))
    texts = [pair for name in columns if name in record for pair in _texts(record[name], name)]
    halves = (place for place, text in texts if any("\ud800" <= letter <= "\udfff" for letter in text))
    escaped = (place for place, text in texts if "\\ud" in text.lower())
    return next(halves, "") or next(escaped, "")


def _texts(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """(place, text) of every text in a value, names of objects included."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _texts(item, f"{place}[{number}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield place, name
            yield from _texts(item, f"{place}.{name}")


def _spelled(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except (ValueError, TypeError) as error:
        raise fault("record-field", f"it cannot be written as JSON: {error}", where) from error


def _string(record: Mapping[str, Any], name: str, where: str) -> str:
    if not isinstance(record.get(name), str):
        raise fault("record-field", f"expected text, found {_found(record, name)}", where)
    return str(record[name])


def _optional_string(record: Mapping[str, Any], name: str) -> str:
    return _string(record, name, name) if name and record.get(name) is not None else ""


def _optional_list(record: Mapping[str, Any], name: str) -> list[Any]:
    value = record.get(name) if name else None
    if value is not None and not isinstance(value, list):
        raise fault("record-field", f"expected a list, found {shown(value)}", name)
    return value or []


def _found(record: Mapping[str, Any], name: str) -> str:
    return shown(record[name]) if name in record else f"the fields {listed(list(record)) or 'none'}"
