"""Scan of DATA into one table of samples: the only module that decides what DATA is.

Files whose stat memo the last snapshot proves are not opened. Every file below DATA is in the samples' files, in
``rejected`` or in ``notes``.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UsageError
from latentcache.fields.protocol import setting
from latentcache.fields.table import Rejected, SampleTable
from latentcache.sources.archives.members import places
from latentcache.sources.archives.tars import kind_of_archive
from latentcache.sources.corpus import find_records, is_records, ways_of
from latentcache.sources.images import NO_CAPTION, ImageScan
from latentcache.sources.known import ScanResult
from latentcache.sources.layouts.find import find_layout, holds_images, is_config
from latentcache.sources.layouts.partners import paired_with
from latentcache.sources.layouts.sets import CAPTION_OPTIONS, Layout
from latentcache.sources.part import Part
from latentcache.sources.reading import kind_of
from latentcache.sources.record_scan import RecordScan, read_records
from latentcache.sources.records import Way
from latentcache.sources.walk import Tree
from latentcache.value import Value, typed_parts

IMAGES, RECORDS = "images", "records"
_BLOCK = 1 << 12
_NO_OPTION = {"flag": None}
_text = partial(setting, default="")


class SourceOptions(Value):
    """Options of reading DATA, most of them options of the command line. The manifest keeps them."""

    kind: str = field(default="", metadata=_NO_OPTION)
    """``images`` or ``records``; empty: decided by DATA."""
    datasets: tuple[str, ...] = setting(
        "Source in a dataset_info.json. Repeatable. [default: all]", flag="--dataset", metavar="NAME", default=()
    )
    text_lines: bool = setting("Treat each line of a text file as a document.", default=False)
    part: Part | None = field(default=None, metadata=_NO_OPTION)
    layout: str = _text(
        "Read DATA as folder, kohya, imagefolder, ... [default: by the content of DATA]", metavar="WORD"
    )
    caption_ext: str = _text("Extension of caption files. [default: .txt, then .caption, then .json]", metavar="EXT")
    default_caption: str | None = setting("Caption of images without one; may be empty. [default: they have none]")
    caption_prefix: str = _text("Put TEXT before every caption.")
    caption_suffix: str = _text("Put TEXT behind every caption.")
    masks: str = _text(
        "Folder of masks in DATA, 'alpha', or 'none' to leave masks out. [default: found]", metavar="FOLDER"
    )
    controls: tuple[str, ...] = setting(
        "Folder of control images in DATA, or 'none'. Repeatable. [default: found]", metavar="FOLDER", default=()
    )
    caption_lines: str = _text(
        "Use the first line of a caption, or each line as a caption. [default: as the layout]", metavar="first|all"
    )
    repeats: bool | None = setting("Serve a sample as often per epoch as DATA says, or once. [default: repeats]")
    split: str = _text("Split to read, if DATA has several. [default: train]", metavar="NAME")
    image_column: str = _text(
        "Column of images, or the end of their names in tars. [default: the only one]", metavar="NAME"
    )
    caption_column: str = _text(
        "Column of captions, or their JSON key in tars. [default: the only one]", metavar="NAME"
    )
    videos: bool = field(default=False, metadata=_NO_OPTION)
    """True: files of videos are samples, as images are; False: they are counted in a note."""

    def __post_init__(self) -> None:
        if self.caption_lines not in ("", "first", "all"):
            raise UsageError(f"--caption-lines={self.caption_lines}: unknown value", fix="--caption-lines=first|all")

    def as_json(self) -> dict[str, Any]:
        """JSON values of what differs from the defaults."""
        given = {one.name: getattr(self, one.name) for one in fields(self) if getattr(self, one.name) != one.default}
        given |= {name: list(value) for name, value in given.items() if isinstance(value, tuple)}
        return given | ({"part": str(self.part)} if self.part else {})

    @property
    def folders(self) -> tuple[str, ...]:
        """Folders of masks and control images."""
        return (self.masks, *self.controls)

    def applied(self, layout: Layout, recorded: Collection[str]) -> tuple[Layout, SourceOptions]:
        """A layout with what is said here, and the options with folders named from its root, as ``paired_with``."""
        given = {name: getattr(self, name) for name in CAPTION_OPTIONS}
        sets = tuple(replace(one, captions=one.captions.with_options(given)) for one in layout.sets)
        if self.repeats is False:
            sets = tuple(replace(one, repeats=1, balance="") for one in sets)
        folders = {"masks": (self.masks,), "controls": self.controls}
        layout, named = paired_with(replace(layout, sets=sets), folders, recorded)
        return layout, replace(self, masks="".join(named["masks"]), controls=named["controls"])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SourceOptions:
        """Inverse of :meth:`as_json`; raises TypeError for an unknown name."""
        part = {"part": Part.parse(data["part"])} if "part" in data else {}
        return cls(**typed_parts(cls, {**data, **part}))


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
    _ways: Sequence[Way | None] = field(default=(), repr=False)
    """Way to read each file of records."""

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
            names: ``image``, ``mask``, ``control``: a place of ``archives.members`` or None; ``caption``:
                ``{"text": ...}``; ``record``: a ``records.Record``.
            strict: False gives None for a record that is not in its file any more.

        Raises:
            ValueError: Rows of records do not ascend.
            SourceError: A file is not what it was when it was scanned.
        """
        rows = np.asarray(rows, dtype=np.int64)
        if self._ways:
            for row, record in read_records(self.root, self.samples, self._ways, rows):
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
        held = self.samples.inputs[name]
        if held.text is not None:
            return [{"text": text} for text in held.text.take(rows)]
        there = (np.asarray(held.file)[rows] >= 0).tolist()
        return [one if own else None for one, own in zip(places(self.samples, rows, name), there, strict=True)]


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
) -> Listing:
    """Everything that is known about DATA without decoding or tokenizing.

    Args:
        data: A folder or an archive of images, a configuration, or a file or folder of records.
        options: What the user says.
        known: Samples of the last snapshot of this DATA.
        rejected: What the same snapshot rejected: lines of files that are not opened again, and contents.
        notes: Of the same snapshot: on archives that are not opened again.
        chosen: (S,) samples of ``known`` whose files are looked at; None: all. Untrusted images are hashed if they
            have their old size, or were rejected; else their content is unknown.
        full: Open all files of these samples, also those whose memo is trusted.
        hash_all: Hash every image of unknown content.
        stopping: Asked between files and every few thousand records. Once it gives True, no further file is read,
            and the listing is not whole.
        recorded: Folders of masks and control images that a snapshot names: they may be gone.

    Raises:
        SourceNotFoundError: There is nothing at this path.
        UsageError: It is not what it was said to be.
        EmptySourceError: There is nothing that could be used or rejected.
        TableError: A metadata table cannot be read.
        SourceError: It cannot be listed or read.
    """
    options, tree = options or SourceOptions(), Tree(data)
    options = replace(options, kind=options.kind or _kind(data, tree))
    is_same = known is not None and {IMAGES: "image", RECORDS: "record"}[options.kind] in known.inputs
    shared: dict[str, Any] = {"known": known if is_same else None, "rejected": rejected}
    shared |= {"chosen": chosen, "full": full, "stopping": stopping}
    if options.kind == RECORDS:
        files = find_records(data, datasets=options.datasets, text_lines=options.text_lines, split=options.split)
        own = {**vars(RecordScan(options=options, **shared)(files)), "_ways": files.ways}
        return Listing(**own, root=files.root.absolute(), data_kind=RECORDS, options=options)
    if not is_config(data) and not (kind_of_archive(data.name) and data.is_file()):
        _check_folder(data)
    layout, options = options.applied(find_layout(data, options.layout, options.split, tree=tree), recorded)
    found = ImageScan(options=options, hash_all=hash_all, notes=notes, **shared)(layout)
    if options.repeats is False:  # an image may be in two sets
        columns = {name: column for name, column in found.samples.columns.items() if name != "repeats"}
        found = replace(found, samples=replace(found.samples, columns=columns))
    return Listing(**vars(found), root=layout.root.absolute(), data_kind=IMAGES, options=options, layout=layout)


def names_root(data: Path, source: Mapping[str, Any]) -> Path:
    """The folder that names are below, by DATA wherever it is now, and the source of the manifest."""
    if "names" in source:
        return Path(os.path.normpath(data.absolute() / source["names"]))
    return data if data.is_dir() else data.parent


def listing_of(root: Path, samples: SampleTable, options: SourceOptions) -> Listing:
    """A snapshot's own samples as a listing, for :meth:`Listing.job_inputs`; DATA is not listed."""
    held: dict[str, Any] = {"root": root, "samples": samples, "options": options, "rejected": (), "notes": ()}
    if "record" not in samples.inputs:
        return Listing(data_kind=IMAGES, **held)
    readings = [one.tobytes() for one in np.asarray(samples.files.reading)]
    ways = ways_of(root, readings, str(options.part or ""), text_lines=options.text_lines)
    return Listing(data_kind=RECORDS, _ways=ways, **held)


def _kind(data: Path, tree: Tree) -> str:
    """Find the kind of DATA. A folder without images and records counts as images: that error lists its files."""
    is_file = os.path.isfile(data)  # noqa: PTH113 - ``Path.is_file`` raises in a folder that is closed to this user
    if not is_file:
        _check_folder(data)
    if holds_images(data, tree):
        return IMAGES
    if is_records(data):
        return RECORDS
    if is_file:
        _check_folder(data)
    try:
        return RECORDS if find_records(data, datasets=(), text_lines=False).names else IMAGES
    except EmptySourceError:
        return IMAGES


def _check_folder(data: Path) -> None:
    try:
        mode = data.stat().st_mode
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError | NotADirectoryError)
        kind = SourceNotFoundError if is_absent else SourceError
        what = "no such folder" if is_absent else "the data folder cannot be used"
        fix = f"check it with `ls -ld {shlex.quote(str(data))}`"
        raise kind(f"{what}: {data}", where=str(data), why=str(error.strerror), fix=fix) from error
    if not stat.S_ISDIR(mode):
        why = f"expected a folder of images, found {'a file' if stat.S_ISREG(mode) else kind_of(mode)}"
        fix = f"give the folder that holds the images: `latentcache build {shlex.quote(str(data.parent))}`"
        raise UsageError(f"DATA is not a folder: {data}", where=str(data), why=why, fix=fix)
