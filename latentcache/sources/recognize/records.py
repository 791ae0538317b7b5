"""Files of DATA that hold records.

The first of these that fits:
- a folder that Hugging Face ``datasets`` saved (of a dict of data sets, ``train``);
- a folder with LLaMA-Factory's ``dataset_info.json``;
- all files of records below the folder, in the byte order of their names;
- its text files, each one document, or each line one document if asked.

``dataset_info.json`` is read as LLaMA-Factory reads it (its ``data/parser.py``). If an entry has ``columns``, columns
that it does not name are not used. If it has ``tags``, tags that it does not name do not exist. The defaults hold
only without them. An entry whose columns name a prompt alone is text. Entries that need the network, a script or
another kind of training are rejected by name.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from latentcache.errors import (
    EmptySourceError,
    SourceError,
    SourceNotFoundError,
    UsageError,
)
from latentcache.fields.table import Rejected
from latentcache.identity.stat import StatMemo
from latentcache.sources.causes import hint_for, rejected
from latentcache.sources.reading import listed, read_document, shown
from latentcache.sources.records import KINDS, TEXT, RecordFormat, Way
from latentcache.sources.splits import for_training, missing_shards, splits_of, which_split
from latentcache.sources.walk import Walk, extension_of

INFO_NAME = "dataset_info.json"
STATE_NAME, DICT_NAME = "state.json", "dataset_dict.json"
_FORMS = ("alpaca", "sharegpt", "openai")
_SHARED_COLUMNS = ("system", "tools")
_COLUMNS = {"alpaca": ("prompt", "query", "response", "history"), "sharegpt": ("messages",), "openai": ("messages",)}
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
_SERVERS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios")
_PREFERENCE = ("chosen", "rejected", "kto_tag")
#: Formats of records that are not read where they are loose.
_UNREAD = (".csv", ".tsv", ".arrow")
PACKED = (".gz", ".zst", ".bz2", ".xz", ".zip", ".lz4")
_WANTED = frozenset((*KINDS, *_UNREAD, *PACKED))


@dataclass(slots=True)
class RecordFiles:
    """The F files to read, and the rest; filled while DATA is looked at."""

    root: Path
    alone: bool = False
    """True if DATA is this one file."""
    names: list[str] = field(default_factory=list)
    """Below the root."""
    ways: list[Way] = field(default_factory=list)
    """(F,) how each is read."""
    stats: list[Any] = field(default_factory=list)
    """(F, 5) see ``walk.Level``; zeros for a file without a state."""
    rejected: list[Rejected] = field(default_factory=list)
    notes: list[Rejected] = field(default_factory=list)

    def take(self, name: str, way: Way, stat: Any = None) -> None:
        """Add a file; ``stat``: see ``walk.Level``."""
        if stat is None:
            try:
                stat = StatMemo.of((self.root / name).stat()).identity
            except OSError:  # reading it gives the reason
                stat = (0,) * 5
        self.names.append(name)
        self.ways.append(way)
        self.stats.append(stat)

    def walked(self, walk: Walk) -> None:
        """Add what a walk rejected and noted."""
        walk.note_unused()
        self.rejected += walk.rejected
        self.notes += walk.notes.all()

    def note_unused(self, known: Sequence[str] = ()) -> None:
        """Note files below the root that nothing names, beside those that are known."""
        state = {f"{name.rpartition('/')[0]}/{STATE_NAME}" for name in self.names}
        reported = (item.name for item in (*self.rejected, *self.notes))
        used = {*self.names, *known, *reported, *state, INFO_NAME, DICT_NAME, STATE_NAME}
        walk = Walk(self.root, frozenset(), used=used)
        any(False for _ in walk)
        self.walked(walk)


def find_records(data: Path, *, datasets: tuple[str, ...], text_lines: bool, split: str = "") -> RecordFiles:
    """The files of records in a file or folder, not opened yet; raises as ``scan.scan``."""
    if not data.exists():
        raise SourceNotFoundError(f"there is no data at {data}", where=str(data.absolute()), fix="check the path")
    data = data.parent if data.name == INFO_NAME else data
    is_described = is_dataset_info(data)
    if datasets and not is_described:
        fix = f"leave --dataset out, or put {INFO_NAME} there"
        raise UsageError(f"{data} has no {INFO_NAME}", where=str(data), fix=fix)
    if data.is_file() or is_described:
        which_split(data, [""], split)
    found = RecordFiles(data if data.is_dir() else data.parent, alone=data.is_file())
    if data.is_file():
        kind, packed = KINDS.get(extension_of(data.name)), extension_of(data.name) in PACKED
        if kind is None:
            why = "it is packed" if packed else f"expected one of {', '.join(KINDS)}"
            fix = hint_for("compressed") if packed else "rename it by its format"
            raise UsageError(f"{data.name} is not a supported file of records", where=str(data), why=why, fix=fix)
        found.take(data.name, Way(kind=kind, text_lines=text_lines))
    elif is_saved(data):
        for name in saved_files(data, split):
            found.take(name, Way(kind="arrow"))
        splits = saved_splits(data) or [""]
        chosen, known = which_split(data, splits, split), [f"{one}/{INFO_NAME}" for one in splits]
        for one in filter(chosen.__ne__, splits):
            known += [f"{one}/{name}" for _, _, names in os.walk(data / one) for name in names]
            found.notes.append(rejected(f"{one}/", "split-unused", f"{one}/ is of the split {one}; {chosen} is read"))
        found.note_unused(known)
    elif is_described:
        _by_info(found, datasets)
        found.note_unused()
    else:
        _by_walk(found, text_lines, split)
    if not found.names and not found.rejected:
        there = Counter(extension_of(name) or "no extension" for _, _, names in os.walk(data) for name in names)
        counts = ", ".join(f"{count} {extension}" for extension, count in there.most_common(5))
        raise EmptySourceError(
            "the data folder holds no records",
            where=str(data),
            why=f"expected one of {', '.join(KINDS)}; found {counts or 'no files'}",
            fix="give the file or folder that holds the texts or conversations",
        )
    if any(way.kind in ("parquet", "arrow") for way in found.ways) and find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )
    return found


def ways_of(root: Path, readings: Sequence[bytes], part: str, *, text_lines: bool) -> list[Way | None]:
    """Find the way of each file that a snapshot read with these options; None: no way that is known now."""
    try:
        forms = [form for _, form in read_dataset_info(root)[0]] if is_dataset_info(root) else []
    except SourceError:
        forms = []
    ways = [Way(kind="arrow")]
    for kind in {*KINDS.values()}:
        ways += [Way(kind=kind, text_lines=text_lines), *(Way(kind=kind, form=one, text_lines=True) for one in forms)]
    by_reading = {way.reading(part): way for way in ways}
    return [by_reading.get(one) for one in readings]


def is_records(data: Path) -> bool:
    """True if DATA is a file of records by its name, or a folder that describes its records."""
    if os.path.isfile(data):  # noqa: PTH113 - as below
        return extension_of(data.name) in KINDS or data.name == INFO_NAME
    return is_saved(data) or is_dataset_info(data)


def _by_info(found: RecordFiles, datasets: tuple[str, ...]) -> None:
    entries, bad, notes = read_dataset_info(found.root, datasets)
    found.rejected += bad
    found.notes += notes
    for file, form in entries:
        place = (found.root / file).relative_to(found.root).as_posix()
        names, unread, walk = [place], found.rejected, None
        if (found.root / file).is_dir():
            walk, unread = Walk(found.root, _WANTED, folders=(place,)), found.notes
            names = [level.prefix + name for level, start, stop in walk for name in level.names[start:stop]]
        for name in names:
            extension = extension_of(name)
            kind = KINDS.get(extension)
            if extension in PACKED:
                found.rejected.append(rejected(name, "compressed", f"{name} is packed"))
            elif kind is not None and (kind != "text" or (form.form, form.text) == (TEXT.form, TEXT.text)):
                found.take(name, Way(kind=kind, form=form, text_lines=True))  # to LLaMA-Factory, each line is a row
            else:
                why = f"expected one of {', '.join(KINDS)}; found {extension or 'no extension'}"
                if kind is not None:
                    why = f"it holds texts, whose one column is text, and its entry in {INFO_NAME} names others"
                unread.append(rejected(name, "table-unused" if walk else "unread-form", f"{name}: {why}"))
        if walk is not None:
            found.walked(walk)


def _by_walk(found: RecordFiles, text_lines: bool, split: str) -> None:
    """All files of records of one split; text files only if there are none."""
    walk, there = Walk(found.root, _WANTED), list[tuple[str, Any]]()
    for level, start, stop in walk:
        there += [(level.prefix + level.names[at], level.stats[at]) for at in range(start, stop)]
    kinds = [KINDS.get(extension_of(name), extension_of(name)) for name, _ in there]
    read = {"json", "parquet"} if {"json", "parquet"} & {*kinds} else {"text"}
    records = read - {"text"}
    splits = for_training(splits_of([name for (name, _), kind in zip(there, kinds, strict=True) if kind in records]))
    chosen = which_split(found.root, splits or [""], split) if kinds else ""
    each = iter(splits)
    for (name, stat), kind in zip(there, kinds, strict=True):
        if kind in PACKED:
            found.rejected.append(rejected(name, "compressed", f"{name} is packed"))
        elif kind == "text" and kind not in read:
            walk.notes.add(rejected(name, "text-unused", f"{name} is beside records"))
        elif kind not in read:
            walk.notes.add(rejected(name, "table-unused", f"{name} is of a format that is not supported"))
        elif kind in records and (own := next(each)) != chosen:
            walk.notes.add(rejected(name, "split-unused", f"{name} is of the split {own}; {chosen} is read"))
        else:
            found.take(name, Way(kind=kind, text_lines=text_lines), stat)
    walk.notes.add(*missing_shards(found.names))
    found.walked(walk)


def read_dataset_info(
    folder: Path, names: Sequence[str] = ()
) -> tuple[list[tuple[str, RecordFormat]], list[Rejected], list[Rejected]]:
    """(File or folder below the folder, form) of usable entries, rejected ones and notes, in the order of ``names``.

    Raises UsageError for an entry that was asked for and is absent or cannot be used.
    """
    path = folder / INFO_NAME
    fix = f"look at {shlex.quote(str(path))}, and compare it with LLaMA-Factory's data/README.md"
    info = read_document(path, fix)
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        why = f"expected a name and an object for each data set, found {shown(info)}"
        raise SourceError(f"{INFO_NAME} cannot be read", where=str(path), why=why, fix=fix)
    datasets, bad, notes = list[tuple[str, RecordFormat]](), list[Rejected](), list[Rejected]()
    for name in names or info:
        if name not in info:
            why, fix = f"it has {listed(list(info)) or 'none'}", "give one of its names with --dataset"
            raise UsageError(f"{INFO_NAME} has no data set called {name}", where=str(path), why=why, fix=fix)
        entry = info[name]
        cause, detail = _not_usable(entry, folder)
        if cause:
            bad.append(rejected(name, cause, f"{INFO_NAME}: {name}: {detail}"))
            if names:
                raise UsageError(f"{name} cannot be used: {detail}", where=str(path), fix=bad[-1].hint)
            continue
        datasets.append((entry["file_name"], _format(entry)))
        if entry.get("num_samples"):
            detail = f"{INFO_NAME}: {name}: num_samples is {shown(entry['num_samples'])}"
            notes.append(rejected(name, "all-samples", detail))
    return datasets, bad, notes


def is_dataset_info(folder: Path) -> bool:
    """True if a folder has such a file; one that ``datasets`` left beside saved data does not count."""
    # ``Path.is_file`` raises in a folder that is closed to this user.
    return os.path.isfile(folder / INFO_NAME) and not os.path.isfile(folder / STATE_NAME)  # noqa: PTH113


def is_saved(folder: Path) -> bool:
    """True if ``datasets`` saved this folder."""
    return any(os.path.isfile(folder / name) for name in (STATE_NAME, DICT_NAME))  # noqa: PTH113


def saved_splits(folder: Path) -> list[str]:
    """Splits of a data set that was saved; one without a name if it has none."""
    if (folder / STATE_NAME).is_file():
        return [""]
    return [str(name) for name in _saved(folder / DICT_NAME).get("splits", [])]


def saved_files(folder: Path, split: str = "") -> Iterator[str]:
    """Names below the folder of the Arrow files that ``state.json`` lists, in its order."""
    splits = saved_splits(folder)
    split = which_split(folder, splits or [""], split)
    prefix = split and f"{split}/"
    for entry in _saved(folder / f"{prefix}{STATE_NAME}").get("_data_files", []):
        yield prefix + Path(entry["filename"]).name


def _saved(path: Path) -> dict[str, Any]:
    value = read_document(path, "save it again")
    return value if isinstance(value, dict) else {}


def _not_usable(entry: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Reason word and detail of an entry that is not used; two empty words for one that is."""
    server = next((name for name in _SERVERS if name in entry), "")
    if server:
        return "hub-dataset", f"it is on a server ({server}: {shown(entry[server])}); only local files are read"
    if "script_url" in entry:
        return "script-dataset", f"it is made by a script ({shown(entry['script_url'])})"
    if not isinstance(entry.get("file_name"), str):
        return "record-field", f"expected file_name as text, found {shown(entry.get('file_name'))}"
    if entry.get("formatting", "alpaca") not in _FORMS:
        found = shown(entry["formatting"])
        return "record-field", f"expected formatting as one of {', '.join(_FORMS)}, found {found}"
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    named = [*columns.values(), *tags.values()] if isinstance(columns, dict) and isinstance(tags, dict) else [0]
    if not all(one is None or isinstance(one, str) for one in named):
        return "record-field", "expected columns and tags as objects of names"
    special = [column for column in (*_MEDIA, *_PREFERENCE) if columns.get(column)]
    if entry.get("ranking") or special:
        return "not-for-sft", f"it holds {'preferences' if not special else ', '.join(special)}, not plain answers"
    file = entry["file_name"]
    if not os.path.realpath(folder / file).startswith(os.path.realpath(folder) + os.sep):
        return "outside-root", f"{file} is outside the folder of {INFO_NAME}"
    return ("", "") if (folder / file).exists() else ("not-found", f"{file} is not there")


def _format(entry: Mapping[str, Any]) -> RecordFormat:
    form = str(entry.get("formatting", "alpaca"))
    used = {name: column for name, column in entry.get("columns", {}).items() if column}
    if form == "alpaca" and used.keys() == {"prompt"}:  # as its own c4_demo: there is no answer
        return RecordFormat(form="text", text=used["prompt"])
    names: dict[str, str] = {}
    if "columns" in entry:
        names |= {name: entry["columns"].get(name) or "" for name in (*_SHARED_COLUMNS, *_COLUMNS[form])}
    if "tags" in entry:
        names |= {name: entry["tags"].get(name) or "" for name in _TAGS}
    return RecordFormat(form=form, **names)
