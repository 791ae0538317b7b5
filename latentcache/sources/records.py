"""Records of text: one document each, its content hash, and how the fields of a line become one.

A content hash is made of what was mapped and of nothing else: position, other columns and spelling of the JSON do
not matter, so a line that moves is tokenized once.

Where a ``dataset_info.json`` names the columns, the rules are those of LLaMA-Factory's converters (its
``data/converter.py``): an instruction and an input are joined by a line end, answers in a history are learned, turns
alternate strictly, and records that it skips with a warning are rejected with the field. Elsewhere roles may have any
of the usual names and any order that the template accepts, as in TRL; ``prompt`` with ``completion`` carries loss in
the completion (TRL's ``completion_only_loss``). ``weight`` 0 or 1 (OpenAI) and ``train`` true or false (axolotl) of a
turn say if it carries loss; tools and tool calls reach the template as OpenAI writes them. No torch, no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.identity.content import content_hash
from latentcache.sources.lines import fault, listed, parse_json, shown
from latentcache.value import Value

#: Bumped when the same bytes, read alike, would make other records, or other rejections.
RECORD_RULE = 4
#: Fields of a turn that are given to the template beside its role and content.
PASSED = ("name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_FIRST_ROLES = ("system", "developer")
_THOUGHT = re.compile(r"\s*(<think>.*?</think>)(.*)", re.DOTALL)
EXPECTED = "text, messages, conversations, prompt with completion, or instruction with output"
#: Columns of pixels and sound; a record that fills one is no text.
MEDIA = ("images", "image", "videos", "audios")
#: Fields of records that plain training cannot use -> the reason; the first that fits.
_OTHER_USE: tuple[tuple[tuple[str, ...], str], ...] = (
    (("chosen", "rejected"), "it holds preferences (chosen, rejected), not plain answers"),
    (("prompt", "completions", "labels"), "it holds labels of steps, not plain answers"),
    (("prompt", "completion", "label"), "it holds feedback (label), not plain answers"),
    (("input_ids",), "it holds token ids already: train on them without a cache, or give the texts"),
)
_PROMPT_ALONE = "it holds a prompt without a completion: there is nothing to learn"


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

    def as_json(self) -> dict[str, Any]:
        """As JSON values, for a worker process; without the content hash."""
        place = {"source": self.source, "line": self.line}
        if self.messages is None:
            return {**place, "text": self.text, **({"begin": self.begin} if self.begin else {})}
        turns = [[m.role, m.content, m.learned, [list(pair) for pair in m.fields]] for m in self.messages]
        more = {"options": self.options} if self.options else {}
        return {**place, "messages": turns, "tools": self.tools, **more}


def text_record(source: str, line: int, text: str, content: bytes = b"", *, begin: int = 0) -> Record:
    """A text as a record; its content hash may be known. Raises UnicodeEncodeError for half a surrogate pair."""
    content = content or content_hash((b"prompt %d\n" % begin if begin else b"text\n") + text.encode())
    return Record(source=source, line=line, content=content, text=text, begin=begin)


def chat_record(
    source: str,
    line: int,
    messages: tuple[Message, ...],
    tools: str = "",
    content: bytes = b"",
    *,
    options: str = "",
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


def record_from_json(data: Mapping[str, Any] | Record, content: bytes = b"") -> Record:
    """Inverse of :meth:`Record.as_json`, which a job in the build's own process does without.

    The content hash is computed again if it is not given.
    """
    if isinstance(data, Record):
        return data
    if "text" in data:
        return text_record(data["source"], data["line"], data["text"], content, begin=data.get("begin", 0))
    messages = tuple(
        Message(role=role, content=content, learned=learned, fields=tuple((name, value) for name, value in fields))
        for role, content, learned, fields in data["messages"]
    )
    more = {"options": data.get("options", "")}
    return chat_record(data["source"], data["line"], messages, data.get("tools", ""), content, **more)


class RecordFormat(Value):
    """Names of columns and tags; an empty name is a column that is not used."""

    form: str
    """``text``: one field. ``completion``: prompt and completion. ``chat``: turns with roles of any usual name.
    As LLaMA-Factory reads them, ``alpaca``: instruction, input, output; ``sharegpt`` and ``openai``: turns of two
    sides that alternate, with the roles that the tags name."""
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
COMPLETION = RecordFormat(
    form="completion",
    prompt="prompt",
    response="completion",
    tools="tools",
    role_tag="role",
    content_tag="content",
)
#: Without a dataset_info.json, the optional columns are used if they are there.
ALPACA = RecordFormat(form="alpaca", history="history", system="system", tools="tools")
CHAT = RecordFormat(
    form="chat", messages="messages", role_tag="role", content_tag="content", system="system", tools="tools"
)
SHAREGPT = replace(CHAT, messages="conversations", role_tag="from", content_tag="value")
#: Fields that must be there -> the form that they mean.
_TELLING: tuple[tuple[tuple[str, ...], RecordFormat], ...] = (
    (("messages",), CHAT),
    (("conversations",), SHAREGPT),
    (("instruction", "output"), ALPACA),
    (("prompt", "completion"), COMPLETION),
    (("text",), TEXT),
)
#: Names of roles where no tags name them, those of Unsloth's ``standardize_data_formats`` included -> the template's.
ROLES: Mapping[str, str] = {
    **dict.fromkeys(("user", "human", "input"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "bot", "model", "output"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "call"),
    **{role: role for role in ("system", "developer")},
}


def detect_format(record: Mapping[str, Any]) -> RecordFormat:
    """The form of a record by the names of its fields.

    A record with ``text`` beside the fields of another form is of that other form: data sets of conversations often
    carry a rendered copy. A column of turns may have the tags of OpenAI (``role``) or of ShareGPT (``from``).

    Raises:
        UnusableSampleError: ``record-field``: none or several could be meant. ``not-for-sft``: it is for another kind
            of training.
    """
    found = [form for names, form in _TELLING if all(name in record for name in names)]
    found = [form for form in found if form is not TEXT] or found
    if len(found) == 1 and not (found[0] in (TEXT, COMPLETION) and _other_use(record)):
        return _by_tags(record, found[0])
    if len(found) < 2 and (use := _other_use(record)):
        raise fault("not-for-sft", use)
    fields = listed(list(record)) or "no fields"
    raise fault("record-field", f"expected {'one of ' if found else ''}{EXPECTED}; found {fields}")


def _other_use(record: Mapping[str, Any]) -> str:
    """Why a record is not for plain training; empty if it may be."""
    use = next((use for names, use in _OTHER_USE if all(name in record for name in names)), "")
    return use or (_PROMPT_ALONE if record.keys() == {"prompt"} else "")


def _by_tags(record: Mapping[str, Any], form: RecordFormat) -> RecordFormat:
    """A form whose column has the other form's tags takes those."""
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
        if form.form == "text":
            text = record.get(form.text)
            if not text or not isinstance(text, str):
                text = _text(record, form.text)
            return text_record(source, line, text)
        if form.form == "completion" and isinstance(record.get(form.prompt), str):
            prompt, answer = record[form.prompt], _answer(record, form)
            return text_record(source, line, prompt + answer, begin=len(prompt))
        media = next((name for name in MEDIA if record.get(name)), "")
        if media:
            raise fault("not-for-sft", f"it holds {media}", media)
        turns = tuple(_MAPPERS[form.form](record, form))
        return chat_record(source, line, turns, _tools(record, form.tools), options=_options(record))
    except UnicodeEncodeError as error:
        found = f"half of a surrogate pair, {error.object[error.start]!r}"
        raise fault("record-unicode", found) from error


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
    yield Message(role="assistant", content=_answer(record, form), learned=True)


def _answer(record: Mapping[str, Any], form: RecordFormat) -> str:
    if not isinstance(record.get(form.response), str):
        raise fault("no-answer", f"expected text, found {_found(record, form.response)}", form.response)
    return str(record[form.response])


def _completion(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Turns of a prompt, which carry no loss, and of its completion."""
    prompt, answer = (_chat(record, replace(form, messages=name)) for name in (form.prompt, form.response))
    if not any(message.learned for message in answer):
        raise fault("no-answer", "no turn of the assistant carries loss", form.response)
    return [*(replace(message, learned=False) for message in prompt), *answer]


def _called(turn: Mapping[str, Any], form: RecordFormat, number: int) -> Message:
    """A turn whose content is one call as JSON, or a list of them; a thought may stand before it."""
    where = f"{form.messages}[{number}].{form.content_tag}"
    said = _content(turn, form, number)
    thought = _THOUGHT.fullmatch(said)
    calls = _json_in(thought[2] if thought else said, where)
    fields = (("tool_calls", _tool_calls(_wrapped(calls), where, "")),)
    content = thought[1] if thought else ""
    return Message(role="assistant", content=content, learned=_learned(turn, form, number), fields=fields)


def _two_sides(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Turns of two sides that alternate, with the roles that the tags name.

    In the form ``openai``, results of tools in a row count as one turn.
    """
    names = {form.function_tag: "call", form.user_tag: "user", form.assistant_tag: "assistant"}
    names |= {form.observation_tag: "tool", form.system_tag: "system"}
    names.pop("", None)
    messages = _messages(record, form, names)
    rest = messages[1:] if messages[0].role == "system" else messages
    place, before = 0, ""
    for number, message in enumerate(rest, start=len(messages) - len(rest)):
        if form.form == "openai" and message.role == before == "tool":
            continue
        if message.role not in (("user", "tool"), ("assistant",))[place % 2]:
            where = f"{form.messages}[{number}].{form.role_tag}"
            raise fault("role-order", f"turns of two sides alternate, found one of {message.role}", where)
        place, before = place + 1, message.role
    if before != "assistant":
        last = f"found one of {before}" if before else "found none"
        raise fault("no-answer", f"expected a turn of the assistant at the end, {last}", form.messages)
    return messages if len(rest) < len(messages) else [*_system(record, form), *messages]


def _chat(record: Mapping[str, Any], form: RecordFormat) -> list[Message]:
    """Turns with roles of any usual name; the template decides which orders are allowed."""
    messages = _messages(record, form, ROLES)
    if form.form == "chat" and not any(message.role == "assistant" for message in messages):
        raise fault("no-answer", "expected a turn of the assistant, found none", form.messages)
    return messages if messages[0].role in _FIRST_ROLES else [*_system(record, form), *messages]


def _messages(record: Mapping[str, Any], form: RecordFormat, names: Mapping[str, str]) -> list[Message]:
    messages = []
    for number, turn in enumerate(_turns(record, form)):
        said = _role(turn, form, number)
        role = names.get(said, "")
        if not role:
            where = f"{form.messages}[{number}].{form.role_tag}"
            raise fault("role-order", f"expected one of {listed(list(names))}, found {shown(said)}", where)
        is_call = role == "call" and not turn.get("tool_calls")
        role = "assistant" if role == "call" else role
        messages.append(_called(turn, form, number) if is_call else _message(turn, role, form, number))
    return messages


def _message(turn: Mapping[str, Any], role: str, form: RecordFormat, number: int) -> Message:
    where = f"{form.messages}[{number}]"
    fields, is_openai = [], form.form != "sharegpt"  # whose converter drops all other fields
    for name in PASSED if is_openai else ():
        if turn.get(name) is not None:
            value = turn[name]
            spelled = _tool_calls(value, f"{where}.{name}") if name == "tool_calls" else _spelled(value, where)
            fields.append((name, spelled))
    if is_openai and turn.get("function_call") is not None and not turn.get("tool_calls"):  # the older spelling
        place = f"{where}.function_call"
        fields.append(("tool_calls", _tool_calls(_wrapped(turn["function_call"]), place, "")))
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
    """The list of tools, given as a list or as JSON text, as JSON; empty without any.

    A bare function becomes an OpenAI tool, as LLaMA-Factory does before it writes it (its ``data/tool_utils.py``).
    """
    name = name if not name or record.get(name) else "functions" if name == "tools" else name
    tools = record.get(name) if name else None
    tools = _json_in(tools, name) if isinstance(tools, str) and tools.strip() else tools
    if not tools:
        return ""
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise fault("record-field", f"expected a list of objects, found {shown(tools)}", name)
    return _spelled([tool if tool.get("type") == "function" else _wrapped(tool)[0] for tool in tools], name)


def _wrapped(functions: Any) -> list[dict[str, Any]]:
    """Bare functions, one or a list of them, in the form of OpenAI."""
    return [
        {"type": "function", "function": one} for one in (functions if isinstance(functions, list) else [functions])
    ]


def _options(record: Mapping[str, Any]) -> str:
    """Values for the template that a record brings along, as TRL takes them."""
    name = "chat_template_kwargs"
    values = record.get(name)
    if not values:
        return ""
    if not isinstance(values, dict):
        raise fault("record-field", f"expected an object, found {shown(values)}", name)
    return _spelled(values, name)


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


_MAPPERS: Mapping[str, Callable[[Mapping[str, Any], RecordFormat], Iterable[Message]]] = {
    "alpaca": _alpaca,
    "completion": _completion,
    "sharegpt": _two_sides,
    "openai": _two_sides,
    "chat": _chat,
}


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
