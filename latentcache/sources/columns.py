"""Columns of DATA: which one names or holds the images, and which one the captions. One rule for every table."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from latentcache.errors import SourceAmbiguousError, keyword, option
from latentcache.sources.causes import fault
from latentcache.sources.formats.files import listed

#: Names of the column of file names, in any case.
FILE_COLUMNS = ("file_name", "image", "file", "filename", "path")
#: Names of the column of captions, in any case; of an object in a JSON file the first one counts.
CAPTION_COLUMNS = ("caption", "text", "prompt")
#: Names of the columns of the point in the middle of a focus crop; see ``fields.clips``.
FOCUS_COLUMNS = ("focus_x", "focus_y")


def named(columns: Iterable[str], names: Collection[str]) -> list[str]:
    """The columns that have one of these names, in any case and without blanks around them."""
    return [column for column in columns if column.strip().lower() in names]


def choose_column(path: Path, what: str, columns: Sequence[str], meant: Sequence[str], asked: str = "") -> str:
    """The column of images or captions: the one that is asked for, else the only one that is meant.

    Args:
        path: The table.
        what: ``image`` or ``caption``.
        columns: Names of the columns that could be asked for.
        meant: Those of them that are meant without a word.
        asked: Name that the user or a configuration says.

    Returns:
        The name; empty if no column is of captions.

    Raises:
        UnusableSampleError: ``no-image-column`` or ``no-caption-column``.
        SourceAmbiguousError: Several columns are meant.
    """
    several = meant
    if asked:
        several = [asked] * columns.count(asked) or named(columns, (asked.strip().lower(),))
    if len(several) > 1:
        is_named = len({*several}) > 1
        raise SourceAmbiguousError(
            f"{len(several)} columns of {path.name} may hold the {what}s: {listed(several)}",
            where=str(path),
            why="one of them is used" if is_named else "they have one name",
            fix=f"name it: {option(f'{what}_column', several[0])}" if is_named else "rename one of them",
            fix_python=f"name it: {keyword(f'{what}_column', several[0])}" if is_named else "",
        )
    if not several and (asked or what == "image"):
        wanted = f"a column called {asked}" if asked else "a column of images"
        error = fault(f"no-{what}-column", f"expected {wanted}; found columns: {listed(columns) or 'none'}", path)
        if columns:
            error.fix = f"name one of these columns with {option(f'{what}_column')}"
            error.fix_python = f"name one of these columns with {keyword(f'{what}_column')}"
        raise error
    return next(iter(several), "")
