"""Images that are rows of metadata tables: every row is a sample, a rejection or a note, and so is every image."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from latentcache.errors import count_of
from latentcache.fields.table import Rejected
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import counted, rejected, unused_lines
from latentcache.sources.layouts.sets import ImageSet, Layout
from latentcache.sources.table import Row, image_named, leads_out, plain, read_table

_LONGEST_NAME = 1000


@dataclass(slots=True, kw_only=True)
class Listed:
    """Images that are rows of the tables of a layout."""

    taken: dict[str, tuple[int, Row, int]] = field(default_factory=dict)
    """Image -> its set, its row and its repeats."""
    tables: dict[str, tuple[bytes, StatMemo]] = field(default_factory=dict)
    """Table -> content hash and memo."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)


def listed_images(
    layout: Layout, root: Path, images: Mapping[int, Mapping[str, str]], said: Collection[str]
) -> Listed:
    """Read the tables of a layout, the deepest one first.

    Args:
        layout: Its sets.
        root: Names are below it.
        images: Set -> names of the images in its folder -> the caption file beside each one, if any.
        said: Names that are rejected or noted already.

    Raises:
        TableError: A table cannot be read as a whole.
    """
    found, unlisted = Listed(), dict[str, Rejected]()
    tables = [number for number, one in enumerate(layout.sets) if one.captions.table]
    others = {name for number, names in images.items() if number not in tables for name in names}
    for number in sorted(tables, key=lambda one: -len(layout.sets[one].prefix)):
        one, inside = layout.sets[number], images.get(number, {})
        table = one.captions.table
        rows, content, memo, notes = read_table(root, table, inside, one.prefix, one.captions)
        matched = match_rows(table, rows, inside, {*said, *unlisted}, root)
        found.tables[table] = content, memo
        found.rejected += matched.rejected
        found.notes += [*notes, *(item for item in matched.notes if item.reason != "unlisted")]
        unlisted |= {item.name: item for item in matched.notes if item.reason == "unlisted"}
        _take(found, number, one, matched.samples)
        beside = sorted(text for name, text in inside.items() if text and name not in others)
        if beside:
            words = "caption files beside images are not used"
            found.notes.append(counted(table, "sidecar-unused", len(beside), words, first=beside[0]))
    left = {name for names in images.values() for name in names}.difference(found.taken, others)
    found.notes += [item for name, item in unlisted.items() if name in left]
    return found


def _take(found: Listed, number: int, one: ImageSet, samples: Mapping[str, Row]) -> None:
    """Add the samples of one table; an image of several tables is seen for each of them."""
    other, unused = list[str](), list[tuple[str, int]]()
    for name, row in samples.items():
        unused += [(one.captions.table, row.line)] if one.captions.unused_line(row.caption) else []
        row = replace(row, caption=one.captions.made(row.caption))
        first, same, repeats = found.taken.get(name, (number, row, 0))
        found.taken[name] = first, same, repeats + one.repeats
        if same.caption != row.caption:
            other.append(name)
    found.notes += unused_lines(unused)
    if other:
        words = "images have another caption in a deeper table, which counts"
        found.notes.append(counted(one.captions.table, "in-two-sets", len(other), words, first=other[0]))


@dataclass(slots=True, kw_only=True)
class Matched:
    """Every row and every image in one of these."""

    samples: dict[str, Row] = field(default_factory=dict)
    """Image -> its row."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)


def match_rows(
    table: str, rows: Sequence[Row], images: Collection[str], said: Collection[str], root: Path
) -> Matched:
    """Match the rows of the table named ``table`` with the images of a folder."""
    found, first_rows, backslashed, absent = Matched(), dict[str, Row](), list[Row](), list[tuple[str, Row]]()
    for row in rows:
        name = image_named(row.name, images)
        known_as = name or _printable(row.name if leads_out(row.name) else plain(row.name))
        first = first_rows.setdefault(known_as, row)
        if first is not row:
            found.notes.append(_repeated(table, known_as, first, row))
        elif not name:
            if leads_out(row.name) or known_as not in said:
                absent.append((known_as, row))
        elif row.cause:
            found.rejected.append(rejected(name, row.cause, row.detail))
        else:
            found.samples[name] = row
        if first is row and name and "\\" in row.name and "\\" not in name:
            backslashed.append(row)
    if backslashed:
        rows_have = count_of(len(backslashed), "rows have")
        detail = f"{rows_have} paths with \\, the first on line {backslashed[0].line}; read as /"
        found.notes.append(rejected(table, "backslash", detail, count=len(backslashed)))
    alike = {_stem(image): image for image in images} if absent else {}
    for name, row in absent:
        meant = f"; did you mean {alike[stem]}?" if (stem := _stem(row.name)) in alike else ""
        found.rejected.append(_absent(f"{table}:{row.line}", name, row, root, meant))
    unlisted = (name for name in images if name not in first_rows)
    found.notes += [rejected(name, "unlisted", f"{table} has no row for it") for name in unlisted]
    return found


def _repeated(table: str, name: str, first: Row, row: Row) -> Rejected:
    """A second row for one file: the first one counts."""
    same = (first.caption, first.cause) == (row.caption, row.cause)
    says = "with the same caption" if same else f"with another caption; that of line {first.line} is used"
    return rejected(table, "duplicate-row", f"lines {first.line} and {row.line} are both for {name}, {says}")


def _absent(where: str, name: str, row: Row, root: Path, meant: str) -> Rejected:
    """A row whose name is no image that can be used."""
    if leads_out(row.name):
        return rejected(name, "outside-root", f"{where} names a file outside the data folder{meant}")
    if _is_file(root, name):
        return rejected(name, "unknown", f"{where} names it, but its extension is none of an image that is read")
    return rejected(name, "not-found", f"{where} names it, and there is no such file{meant}")


def _stem(name: str) -> str:
    """Base name without extension, in one case and one Unicode form."""
    base = PurePosixPath(name.replace("\\", "/").strip()).stem
    return unicodedata.normalize("NFC", base).casefold()


def _printable(name: str) -> str:
    """A name that can be encoded as file names are: a table can hold code points that no file name has."""
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        name = name.encode("utf-8", "backslashreplace").decode()
    return name[:_LONGEST_NAME].replace("\0", "\\0") or "(no name)"


def _is_file(root: Path, name: str) -> bool:
    """True if there is such a file; a name that is too long or not allowed is none."""
    try:
        return (root / name).is_file()
    except (OSError, ValueError):
        return False
