"""Scan of DATA into one table of samples: the only module that decides what DATA is.

Files whose stat memo the last snapshot proves are not opened. Every file below DATA is in the samples' files, in
``rejected`` or in ``notes``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import SourceError
from latentcache.fields.table import Rejected, SampleTable
from latentcache.sources.inventory import Inventory
from latentcache.sources.known import Scan, ScanResult
from latentcache.sources.layout import Layout
from latentcache.sources.locations import locations
from latentcache.sources.options import SourceOptions
from latentcache.sources.readers.folder import NO_CAPTION, read_images
from latentcache.sources.readers.records import read_records, scan_records
from latentcache.sources.recognize.find import IMAGES, RECORDS, find_kind, find_layout

_BLOCK = 1 << 12


class Listing(ScanResult):
    """Contents of DATA."""

    root: Path
    """Absolute; names are below it. Of a single file: its folder."""
    data_kind: str
    """``images`` or ``records``."""
    options: SourceOptions
    """As given, with the kind that was decided."""
    layout: Layout | None = None
    """Layout of the images: its word, why it was chosen, its sets. None: DATA are records."""
    inventory: str = ""
    """Digest of the names and sizes of the files of DATA that may be data, whatever part is read."""

    @property
    def no_caption(self) -> int:
        """Samples without a caption, or with an empty one; 0 if samples are not images."""
        return int(self.images.captions.get(NO_CAPTION, 0)) if self.images is not None else 0

    def job_inputs(
        self, rows: NDArray[np.integer] | Sequence[int], names: Sequence[str], *, strict: bool = True
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """(row, {input name: value}) of samples, in the order of the rows.

        Args:
            rows: Rows of :attr:`samples`; ascending if records are asked for.
            names: ``image``, ``mask``, ``control``: a location of ``locations`` or None; ``caption``:
                ``{"text": ...}``; ``record``: a ``records.Record``.
            strict: False gives None for a record that is not in its file any more.

        Raises:
            ValueError: Rows of records do not ascend.
            SourceError: A file is not what it was when it was scanned.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self.data_kind == RECORDS:
            for row, record in read_records(self.root, self.samples, rows, text_lines=self.options.text_lines):
                if record is None and strict:
                    raise SourceError(
                        "a file was changed while the cache was built from it",
                        where=self.samples.names[row],
                        fix="run the same command again when no program writes to it: committed work is kept",
                    )
                yield row, {"record": record}
        else:
            for start in range(0, len(rows), _BLOCK):
                some = rows[start : start + _BLOCK]
                values = [self._values(name, some) for name in names]
                for number, row in enumerate(some.tolist()):
                    yield row, {name: value[number] for name, value in zip(names, values, strict=True)}

    def _values(self, name: str, rows: NDArray[np.integer]) -> Sequence[Mapping[str, Any] | None]:
        column = self.samples.inputs[name]
        if column.text is not None:
            return [{"text": text} for text in column.text.take(rows)]
        is_held = (np.asarray(column.file)[rows] >= 0).tolist()
        return [
            location if held else None
            for location, held in zip(locations(self.samples, rows, name), is_held, strict=True)
        ]


def scan(
    data: Path,
    options: SourceOptions | None = None,
    known: SampleTable | None = None,
    *,
    rejected: Sequence[Rejected] = (),
    notes: Sequence[Rejected] = (),
    chosen: NDArray[np.bool_] | None = None,
    full: bool = False,
    hash_all: bool = False,
    stopping: Callable[[], bool] = bool,
    recorded: Collection[str] = (),
    inputs: Collection[str] = (),
) -> Listing:
    """List DATA without decoding or tokenizing.

    Args:
        data: A folder or an archive of images, a configuration, or a file or folder of records.
        options: The user's options.
        known: Samples of the last snapshot of this DATA.
        rejected: Rejections of the same snapshot: their lines and contents are not read again.
        notes: Notes of the same snapshot, for archives that are not opened again.
        chosen: (S,) samples of ``known`` whose files are looked at; None: all. Untrusted images are hashed if they
            have their old size, or were rejected; else their content is unknown.
        full: Open all files of these samples, also those whose memo is trusted.
        hash_all: Hash every image of unknown content.
        stopping: Asked between files and every few thousand records. Once it gives True, no further file is read,
            and the listing is not whole.
        recorded: Folders of masks and control images that a snapshot names: they may be gone.
        inputs: Inputs of the requested fields, such as ``image``. They decide between images and records.

    Raises:
        SourceNotFoundError: There is nothing at this path.
        UsageError: It does not fit the options.
        EmptySourceError: There is nothing that could be used or rejected.
        TableError: A metadata table cannot be read.
        SourceError: It cannot be listed or read.
    """
    options = options or SourceOptions()
    inventory = Inventory(data, follow_links=options.follow_links)
    options = replace(options, kind=options.kind or find_kind(inventory, options, inputs))
    is_same = known is not None and {IMAGES: "image", RECORDS: "record"}[options.kind] in known.inputs
    request = Scan(
        options=options,
        known=known if is_same else None,
        rejected=rejected,
        notes=notes,
        chosen=chosen,
        full=full,
        hash_all=hash_all,
        stopping=stopping,
    )
    layout = None
    if options.kind == RECORDS:
        result = scan_records(request, inventory)
    else:
        layout, request.options = options.applied(find_layout(inventory, options), recorded)
        if layout.folders and layout.root.absolute() != data.absolute():
            inventory = Inventory(layout.root, follow_links=options.follow_links)
        result = read_images(request, layout, inventory)
    return Listing(
        **vars(result),
        root=inventory.root.absolute(),
        layout=layout,
        inventory=inventory.digest((layout and layout.folders) or ("",)),
        data_kind=options.kind,
        options=request.options,
    )


def names_root(data: Path, source: Mapping[str, Any]) -> Path:
    """The folder that names are below, by DATA wherever it is now, and the source of the manifest."""
    if "names" in source:
        return Path(os.path.normpath(data.absolute() / source["names"]))
    return data if data.is_dir() else data.parent


def listing_of(root: Path, samples: SampleTable, options: SourceOptions) -> Listing:
    """A snapshot's own samples as a listing, for :meth:`Listing.job_inputs`; DATA is not listed."""
    kind = RECORDS if "record" in samples.inputs else IMAGES
    return Listing(data_kind=kind, root=root, samples=samples, options=options, rejected=(), notes=())
