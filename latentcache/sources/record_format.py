"""Which fields of a line are what: the four forms of records, their columns and tags, and how a form is known.

Forms and names are those of LLaMA-Factory's ``dataset_info.json`` (its ``data/parser.py``): what is written for it
is read as it stands. A form is known by the names of the first record alone, and only when one form can be meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Bumped when the same bytes, read alike, would make other records, or other refusals.
RECORD_RULE = 2
#: text: one field. alpaca: instruction, input, output. sharegpt: from and value in turn. openai: role and content.
FORMS = ("text", "alpaca", "sharegpt", "openai")


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


TEXT = RecordFormat(form="text")
#: Without a dataset_info.json, the optional columns are used where they are.
ALPACA = RecordFormat(form="alpaca", history="history", system="system", tools="tools")
SHAREGPT = RecordFormat(form="sharegpt", system="system", tools="tools")
OPENAI = RecordFormat(
    form="openai",
    messages="messages",
    tools="tools",
    role_tag="role",
    content_tag="content",
    user_tag="user",
    assistant_tag="assistant",
    observation_tag="tool",
    function_tag="",
)
#: Field that must be there -> the form it tells of.
_TELLING: tuple[tuple[tuple[str, ...], RecordFormat], ...] = (
    (("messages",), OPENAI),
    (("conversations",), SHAREGPT),
    (("instruction", "output"), ALPACA),
    (("text",), TEXT),
)
EXPECTED = "text, messages, conversations, or instruction with output"


def detect_format(record: Mapping[str, Any]) -> RecordFormat | None:
    """The form of a record by the names of its fields; None when none or several could be meant.

    A record with ``text`` beside the fields of another form is of that other form: data sets of conversations often
    carry their rendering along. ``messages`` in the manner of sharegpt (``from`` and ``value``) are sharegpt.
    """
    found = [form for names, form in _TELLING if all(name in record for name in names)]
    found = [form for form in found if form is not TEXT] or found
    if len(found) != 1:
        return None
    return _by_tags(record, found[0])


def _by_tags(record: Mapping[str, Any], form: RecordFormat) -> RecordFormat:
    """A form whose column has the other form's tags takes those."""
    turns = record[form.messages] if form.form in ("sharegpt", "openai") else None
    first = turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(first, dict):
        return form
    if form is OPENAI and "from" in first and "role" not in first:
        return RecordFormat(form="sharegpt", messages="messages", system="system", tools="tools")
    if form is SHAREGPT and "role" in first and "from" not in first:
        names = {name: getattr(OPENAI, name) for name in RecordFormat.__slots__ if name != "messages"}
        return RecordFormat(**names, messages="conversations")
    return form
