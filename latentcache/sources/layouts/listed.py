"""Images that are rows of metadata tables: every row is a sample, a rejection or a note, and so is every image."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

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
    found, unlisted = Listed(), dict[str, str]()
    tables = [number for number, one in enumerate(layout.sets) if one.captions.table]
    others = {name for number, names in images.items() if number not in tables for name in names}
    for number in sorted(tables, key=lambda one: -len(layout.sets[one].prefix)):
        one, inside = layout.sets[number], images.get(number, {})
        table = one.captions.table
        rows, content, memo = read_table(root, table, inside, one.prefix, one.captions)
        found.tables[table] = content, memo
        own = match_rows(found, table, rows, inside, {*said, *unlisted}, root)
        _take(found, number, one, {name: row for name, row in own.items() if name in inside and not row.cause})
        unlisted |= {name: table for name in inside if name not in own}
        beside = sorted(text for name, text in inside.items() if text and name not in others)
        if beside:
            words = "caption files beside images are not used"
            found.notes.append(counted(table, "sidecar-unused", len(beside), words, first=beside[0]))
    for name, table in unlisted.items():
        if name not in found.taken and name not in others:
            found.notes.append(rejected(name, "unlisted", f"{table} has no row for it"))
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


def match_rows(
    found: Listed, table: str, rows: Sequence[Row], images: Collection[str], said: Collection[str], root: Path
) -> dict[str, Row]:
    """The first row of each name; those that make no sample, and further ones, are rejected and noted."""
    first_rows, alike = dict[str, Row](), dict[str, str]()
    for row in rows:
        image = image_named(row.name, images)
        name = image or _printable(row.name if leads_out(row.name) else plain(row.name))
        first = first_rows.setdefault(name, row)
        where = f"{table}:{row.line}"
        if first is not row:
            same = (first.caption, first.cause) == (row.caption, row.cause)
            says = "with the same caption" if same else f"with another caption; that of line {first.line} is used"
            detail = f"lines {first.line} and {row.line} are both for {name}, {says}"
            found.notes.append(rejected(table, "duplicate-row", detail))
        elif not image and (leads_out(row.name) or name not in said):
            alike = alike or {_stem(one): one for one in images}
            meant = f"; did you mean {alike[_stem(name)]}?" if _stem(name) in alike else ""
            if leads_out(row.name):
                cause, detail = "outside-root", "names a file outside the data folder"
            elif _is_file(root, name):
                cause, detail = "unknown", "names it, but its extension is none of an image that is read"
            else:
                cause, detail = "not-found", "names it, and there is no such file"
            found.rejected.append(rejected(name, cause, f"{where} {detail}{meant}"))
        elif image and row.cause:
            found.rejected.append(rejected(name, row.cause, row.detail))
    return first_rows


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
