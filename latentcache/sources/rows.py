"""What a row of a table is, and which of its columns count: the same for CSV and JSONL.

Guarantee: a column is chosen by its name alone and only when no other could be meant; every error names the file,
the line and the columns that were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import TableError
from latentcache.sources.captions import caption_fault

#: Names of the column of file names, and of the column of captions; in any case.
FILE_COLUMNS = ("file_name", "image", "file", "filename", "path")
CAPTION_COLUMNS = ("text", "caption", "prompt")
_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row: a file name as it is written, and a caption or the cause why there is none."""

    name: str
    caption: str
    line: int
    cause: str = ""
    detail: str = ""


def table_error(path: Path, line: int, what: str, why: str, fix: str) -> TableError:
    """An error of a table at one line (from 1); line 0 means the whole file."""
    where = f"{path}:{line}" if line else str(path)
    return TableError(f"{path.name}: {what}", where=where, why=why, fix=fix)


def has_columns(found: Sequence[str]) -> bool:
    """Whether these cells are a header: a column of file names and one of captions are among them."""
    return bool(_matching(found, FILE_COLUMNS) and _matching(found, CAPTION_COLUMNS))


def choose_columns(path: Path, line: int, found: Sequence[str]) -> tuple[int, int]:
    """Positions of the file column and the caption column.

    Raises:
        TableError: One of them is missing, or there are two.
    """
    return (
        _only_column(path, line, found, FILE_COLUMNS, "file names"),
        _only_column(path, line, found, CAPTION_COLUMNS, "captions"),
    )


def make_row(table: str, line: int, name: str, caption: Any) -> Row:
    """A row with its caption checked: text, without NUL and half surrogate pairs."""
    if not isinstance(caption, str):
        detail = f"{table}:{line} has {shown(caption)} as the caption, expected text"
        return Row(name=name, caption="", line=line, cause="table-row", detail=detail)
    fault = caption_fault(caption)
    if fault:
        detail = f"the caption in {table}:{line} has {fault}"
        return Row(name=name, caption="", line=line, cause="caption-unicode", detail=detail)
    return Row(name=name, caption=caption, line=line)


def shown(value: object) -> str:
    """A value for a message, cut to a sane length."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def listed(columns: Sequence[str]) -> str:
    """Column names for a message, cut to a sane length."""
    text = ", ".join(column if column.isprintable() else repr(column) for column in columns)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _matching(found: Sequence[str], wanted: Sequence[str]) -> list[int]:
    return [position for position, column in enumerate(found) if column.strip().lower() in wanted]


def _only_column(path: Path, line: int, found: Sequence[str], wanted: tuple[str, ...], holds: str) -> int:
    """The one column that holds something.

    Raises:
        TableError: None or several could be meant.
    """
    positions = _matching(found, wanted)
    if len(positions) == 1:
        return positions[0]
    choice = f"{', '.join(wanted[:-1])} or {wanted[-1]}"
    if not positions:
        why = f"expected a column named {choice}; found columns: {listed(found)}"
        fix = f"name the columns in the first line of {path.name}, e.g. `file_name,text`"
        if path.suffix != ".csv":
            fix = f'give every line of {path.name} the form {{"file_name": "a.jpg", "text": "a caption"}}'
        raise table_error(path, line, f"no column of {holds}", why, fix)
    names = listed([found[position] for position in positions])
    why = f"each of {names} could be meant; found columns: {listed(found)}"
    raise table_error(path, line, f"{len(positions)} columns of {holds}", why, "keep one of them")
