"""Which pictures a table uses: its rows against the files that are there.

Guarantee: no row and no picture is lost in silence. A row is a sample, a refusal under the name it gives, or a
note; a picture without a row is a note. Names never lead out of the folder. Notes on rows carry the table's name.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import refusal
from latentcache.sources.rows import Row
from latentcache.sources.sample import Refusal, Sample
from latentcache.sources.walk import Walk

_DRIVE = re.compile(r"[A-Za-z]:")
_LONGEST_NAME = 1000


@dataclass(slots=True, kw_only=True)
class _Listing:
    """What the rows so far have come to."""

    table: str
    pictures: Mapping[str, StatMemo]
    known: Collection[str]
    """Names that the walk has refused or noted."""
    root: Path
    first_rows: dict[str, Row] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    notes: list[Refusal] = field(default_factory=list)
    backslashed: list[Row] = field(default_factory=list)
    by_likeness: dict[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What the rows come to: every row and every picture in one of these."""

    samples: list[Sample]
    refused: list[Refusal]
    notes: list[Refusal]


def use_table(table: str, rows: Sequence[Row], walk: Walk) -> Listed:
    """Match the rows of the table named ``table`` with the pictures of a walk; results are in no order."""
    known = {item.name for item in (*walk.refused, *walk.notes)}
    listing = _Listing(table=table, pictures=dict(walk.pictures), known=known, root=walk.root)
    for row in rows:
        _take(row, listing)
    if listing.backslashed:
        first = listing.backslashed[0].line
        detail = f"{len(listing.backslashed)} rows have paths with \\, the first on line {first}; read as /"
        listing.notes.append(refusal(table, "backslash", detail))
    detail = f"{table} has no row for it"
    for name, memo in listing.pictures.items():
        if name not in listing.first_rows:
            listing.notes.append(refusal(name, "unlisted", detail, stat=memo))
    return Listed(samples=listing.samples, refused=listing.refused, notes=listing.notes)


def picture_named(raw: str, pictures: Collection[str]) -> str:
    """The picture that a table means by ``raw``, empty when there is none.

    ``./`` and doubled slashes are harmless, a backslash is a separator where no file has it in its name. Names
    that lead out of the folder are never looked up.
    """
    if raw in pictures:
        return raw
    if leads_out(raw):
        return ""
    return next((name for name in (_plain(raw), _plain(raw.replace("\\", "/"))) if name in pictures), "")


def leads_out(raw: str) -> bool:
    """Whether a name is absolute, has a drive letter or a ``..`` part, with either separator."""
    path = raw.replace("\\", "/")
    return path.startswith("/") or ".." in path.split("/") or _DRIVE.match(raw) is not None


def _take(row: Row, listing: _Listing) -> None:
    """Put one row where it belongs."""
    name = picture_named(row.name, listing.pictures)
    known_as = name or _printable(_plain(row.name) if not leads_out(row.name) else row.name)
    first = listing.first_rows.setdefault(known_as, row)
    if first is not row:
        _repeated(known_as, first, row, listing)
        return
    if name and "\\" in row.name and "\\" not in name:
        listing.backslashed.append(row)
    if not name:
        _absent(known_as, row, listing)
    elif row.cause:
        listing.refused.append(refusal(name, row.cause, row.detail, stat=listing.pictures[name]))
    else:
        listing.samples.append(Sample(name=name, caption=row.caption, stat=listing.pictures[name]))


def _repeated(name: str, first: Row, row: Row, listing: _Listing) -> None:
    """A second row for one file: the first one counts."""
    same = (first.caption, first.cause) == (row.caption, row.cause)
    says = "with the same caption" if same else f"with another caption; that of line {first.line} is used"
    detail = f"lines {first.line} and {row.line} are both for {name}, {says}"
    listing.notes.append(refusal(listing.table, "duplicate-row", detail))


def _absent(name: str, row: Row, listing: _Listing) -> None:
    """A row whose name is no picture that can be used. What the walk has an item for needs no second one."""
    where = f"{listing.table}:{row.line}"
    if leads_out(row.name):
        detail = f"{where} names a file outside the data folder"
        cause = "outside-root"
    elif name in listing.known:
        return
    elif _is_file(listing.root, name):
        detail = f"{where} names it, but its extension is none of a picture that is read"
        cause = "unknown"
    else:
        detail = f"{where} names it, and there is no such file"
        cause = "not-found"
    meant = _most_like(row.name, listing)
    question = f"; did you mean {meant}?" if meant else ""
    listing.refused.append(refusal(name, cause, detail + question))


def _most_like(raw: str, listing: _Listing) -> str:
    """The first picture with the same base name, or stem, in any case and Unicode form; empty when there is none."""
    if listing.by_likeness is None:
        listing.by_likeness = {}
        for name in listing.pictures:
            for likeness in _likenesses(name):
                listing.by_likeness.setdefault(likeness, name)
    found = (listing.by_likeness.get(likeness) for likeness in _likenesses(raw))
    return next((name for name in found if name), "")


def _likenesses(name: str) -> tuple[str, str]:
    base = PurePosixPath(name.replace("\\", "/").strip()).name
    base = unicodedata.normalize("NFC", base).casefold()
    return base, base.rpartition(".")[0] or base


def _plain(name: str) -> str:
    """Without ``.`` parts and doubled slashes."""
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _printable(name: str) -> str:
    """A name that can be encoded as file names are: a table can hold code points that no file name has."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        name = name.encode("utf-8", "backslashreplace").decode()
    return name[:_LONGEST_NAME].replace("\0", "\\0") or "(no name)"


def _is_file(root: Path, name: str) -> bool:
    """Whether there is such a file; a name that is too long or not allowed is none."""
    try:
        return (root / name).is_file()
    except (OSError, ValueError):
        return False
