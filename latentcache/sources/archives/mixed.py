"""Images that are files and images in archives, of the sets of one layout."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import fields, replace
from typing import Any

import numpy as np

from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, join_tables
from latentcache.sources.archives.scan import ArchiveScan
from latentcache.sources.images import NO_CAPTION, Found, ImageScan
from latentcache.sources.known import Scan, Scanned
from latentcache.sources.layouts.sets import Layout
from latentcache.sources.walk import in_order


def scan_images(layout: Layout, asked: Scan) -> Scanned:
    """Every image of a layout; samples in the order of their files, then of their lines.

    Raises:
        EmptySourceError: There is no image that could be used or rejected.
        SourceAmbiguousError: Several columns of an archive may hold the images or the captions.
        TableError: A table cannot be read.
        SourceError: The folder cannot be listed.
    """
    words: dict[str, Any] = {one.name: getattr(asked, one.name) for one in fields(asked)}
    kinds = {bool(one.archives) for one in layout.sets}
    if len(kinds) == 1:
        return ArchiveScan(**words)(layout) if kinds == {True} else ImageScan(**words)(layout)
    archives = frozenset(name for one in layout.sets for name in one.files)
    both = (
        ImageScan(**words)(replace(layout, used=layout.used | archives)),
        ArchiveScan(**words)(replace(layout, folders=(), notes=())),
    )
    return _joined(*both)


def _joined(one: Scanned, other: Scanned) -> Scanned:
    tables = [one.samples, other.samples]
    names = [name for table in tables for name in table.files.names]
    order = np.array(sorted(range(len(names)), key=lambda number: os.fsencode(names[number])), dtype=np.int64)
    number = np.argsort(order)
    numbers = [number[: len(tables[0].files)], number[len(tables[0].files) :]]
    reading = [
        np.zeros((len(table.files), 16), np.uint8) if table.files.reading is None else np.asarray(table.files.reading)
        for table in tables
    ]
    files = Files(
        names=Strings.of(names[at] for at in order.tolist()),
        stat=np.concatenate([table.files.stat for table in tables])[order],
        content=np.concatenate([table.files.content for table in tables])[order],
        reading=np.concatenate(reading)[order],
    )
    inputs = [table.inputs["image"] for table in tables]
    place = np.concatenate([own[np.asarray(image.file)] for own, image in zip(numbers, inputs, strict=True)])
    line = np.concatenate([np.zeros(len(tables[0]), np.uint32), np.asarray(inputs[1].line)])
    found: tuple[Found, Found] = one.images, other.images
    captions = Counter(found[0].captions) + Counter(found[1].captions)
    said = [scanned.caption_source for scanned in (one, other) if scanned.caption_source != NO_CAPTION]
    return Scanned(
        samples=join_tables(tables, numbers, files, np.lexsort((line, place))),
        rejected=in_order([*one.rejected, *other.rejected]),
        notes=in_order([*one.notes, *other.notes]),
        unread=np.concatenate([one.unread, other.unread])[order],
        files_unchanged=one.files_unchanged and other.files_unchanged,
        caption_source=(*said, NO_CAPTION)[0],
        images=replace(
            found[0],
            captions=dict(captions),
            several=found[0].several + found[1].several,
            first_without=found[0].first_without or found[1].first_without,
            set_samples=tuple(map(sum, zip(found[0].set_samples, found[1].set_samples, strict=True))),
        ),
    )
