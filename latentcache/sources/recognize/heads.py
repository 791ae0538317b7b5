"""What the head of a file shows: images, records, or settings of some program."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from latentcache.errors import UnusableSampleError
from latentcache.sources.formats import TAR, kind_of_archive
from latentcache.sources.formats.files import open_source
from latentcache.sources.formats.rows import opened
from latentcache.sources.formats.tar import tar_members
from latentcache.sources.inventory import IMAGE_EXTENSIONS, extension_of
from latentcache.sources.record_file import RecordReader
from latentcache.sources.records import KINDS, Way

#: Members that are looked at to see if a tar holds images.
_LOOKED_AT = 256


def hold_images(root: Path, names: Sequence[str], *, unread: bool = False) -> bool:
    """True if one of some archives holds images, by its first members or its columns.

    ``unread``: the answer if there are some and none can be read, so that somebody says why.
    """
    unread = unread and bool(names)
    for name in names:
        try:
            if _holds_images(root / name):
                return True
            unread = False
        except ImportError:  # without pyarrow
            return False
        except UnusableSampleError:
            continue
    return unread


def _holds_images(path: Path) -> bool:
    if (kind := kind_of_archive(path.name)) != TAR:
        with opened(path, kind) as table:
            return bool(table.images())
    with open_source(path) as file:
        return any(extension_of(member.name) in IMAGE_EXTENSIONS for member in islice(tar_members(file), _LOOKED_AT))


def shows_records(root: Path, name: str) -> bool:
    """True if a file has a usable record."""
    kind = KINDS[extension_of(name)]
    if kind == "parquet" and hold_images(root, [name]):
        return False
    try:
        return next(iter(RecordReader(root / name, name, Way(kind=kind))), None) is not None
    except (UnusableSampleError, ImportError):
        return False


def shows_settings(root: Path, name: str) -> bool:
    """True if a ``.json`` file is one object, or a list, that is no record."""
    if extension_of(name) != ".json":
        return False
    try:
        next(iter(RecordReader(root / name, name, Way(kind="json"))), None)
    except UnusableSampleError as error:
        return error.slug == "not-records"
    return False
