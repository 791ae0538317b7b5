"""Files of DATA that hold records.

The first of these that fits:
- a folder that Hugging Face ``datasets`` saved (of a dict of data sets, ``train``);
- a folder with LLaMA-Factory's ``dataset_info.json``;
- all files of records below the folder, in the byte order of their names;
- its text files, each one document, or each line one document if asked.

``dataset_info.json`` is read as LLaMA-Factory reads it (its ``data/parser.py``). If an entry has ``columns``, columns
that it does not name are not used. If it has ``tags``, roles that these do not name do not exist. An entry whose
columns name a prompt alone is text. Entries that need the network, a script or another kind of training are rejected
by name.
"""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError, UsageError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import Notes, hint_for, rejected
from latentcache.sources.formats import TAR, kind_of_archive
from latentcache.sources.formats.files import listed, open_source, shown
from latentcache.sources.formats.rows import opened
from latentcache.sources.formats.tar import tar_members
from latentcache.sources.formats.text import read_document
from latentcache.sources.inventory import (
    IMAGE_EXTENSIONS,
    PACKED_EXTENSIONS,
    TABLE_NAMES,
    Inventory,
    count_unused,
    extension_of,
    is_inside,
)
from latentcache.sources.layout import RecordFiles
from latentcache.sources.options import SourceOptions
from latentcache.sources.record_file import RecordReader
from latentcache.sources.records import KINDS, TEXT, RecordFormat, Way
from latentcache.sources.splits import for_training, missing_shards, read_as_train, splits_of, which_split

INFO_NAME = "dataset_info.json"
STATE_NAME, DICT_NAME = "state.json", "dataset_dict.json"
_FORMS = ("alpaca", "sharegpt", "openai")
_SHARED_COLUMNS = ("system", "tools")
_COLUMNS = {"alpaca": ("prompt", "query", "response", "history"), "sharegpt": ("messages",), "openai": ("messages",)}
_ROLE_TAGS = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "function_tag": "call",
              "system_tag": "system"}  # fmt: skip
_SERVERS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios")
_PREFERENCE = ("chosen", "rejected", "kto_tag")
#: Formats of records that are not read where they are loose.
_UNREAD = (".csv", ".tsv", ".arrow")
_WANTED = frozenset((*KINDS, *_UNREAD, *PACKED_EXTENSIONS))
#: Any of these is in an entry of LLaMA-Factory's ``dataset_info.json``.
_ENTRY = frozenset(("file_name", "script_url", *_SERVERS))


def find_records(
    data: Path, options: SourceOptions, inventory: Inventory | None, known: Collection[str] = ()
) -> RecordFiles:
    """The files of records in a file or folder; raises as ``scan.scan``. A file has no inventory.

    Only ``.json`` files are opened, to see if they hold records; not those that are ``known`` to do so.
    """
    splits = saved_splits(inventory) if inventory is not None else {}
    is_info = inventory is not None and not splits and is_dataset_info(inventory)
    if options.datasets and not is_info:
        fix = f"name no data set, or put {INFO_NAME} there"
        raise UsageError(f"{data} has no {INFO_NAME}", where=str(data), fix=fix)
    if inventory is None or is_info:
        which_split(data, [""], options.split)
    if inventory is None:
        records = _alone(data, options)
    elif splits:
        records = _by_state(inventory, splits, options.split)
    elif is_info:
        records = _by_info(inventory, options.datasets)
    else:
        records = _by_names(inventory, options, known)
    if inventory is not None and not records.names and not records.rejected:
        raise _nothing(inventory)
    if any(way.kind in ("parquet", "arrow") for way in records.ways) and find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )
    return records


def _nothing(inventory: Inventory) -> EmptySourceError:
    there = Counter[str]()
    for folder in inventory.below():
        there.update(folder.counts)
    counts = ", ".join(f"{count} {extension or 'no extension'}" for extension, count in there.most_common(5))
    return EmptySourceError(
        "the data folder holds no records",
        where=str(inventory.root),
        why=f"expected one of {', '.join(KINDS)}; found {counts or 'no files'}",
        fix="give the file or folder that holds the texts or conversations",
    )


def _alone(data: Path, options: SourceOptions) -> RecordFiles:
    kind, packed = KINDS.get(extension_of(data.name)), extension_of(data.name) in PACKED_EXTENSIONS
    if kind is None:
        why = "it is packed" if packed else f"expected one of {', '.join(KINDS)}"
        fix = hint_for("compressed") if packed else "rename it by its format"
        raise UsageError(f"{data.name} is not a supported file of records", where=str(data), why=why, fix=fix)
    records = RecordFiles(data.parent, alone=True)
    records.take([data.name], Way(kind=kind, text_lines=options.text_lines))
    return records


def ways_of(root: Path, readings: Sequence[bytes], part: str, *, text_lines: bool) -> list[Way | None]:
    """Find the way of each file that a snapshot read with these options; None: no way that is known now."""
    try:
        forms = [form for _, form in read_dataset_info(root)[0]] if (root / INFO_NAME).is_file() else []
    except (SourceError, OSError):
        forms = []
    ways = [Way(kind="arrow")]
    for kind in {*KINDS.values()}:
        ways.append(Way(kind=kind, text_lines=text_lines))
        ways += [Way(kind=kind, form=form, text_lines=True) for form in forms]
    by_reading = {way.reading(part): way for way in ways}
    return [by_reading.get(reading) for reading in readings]


def holds_records(inventory: Inventory) -> bool:
    """True if a folder describes records, or one of its files begins with one; texts may be captions."""
    if splits := saved_splits(inventory):
        return not hold_images(inventory.root, next(iter(splits.values()))[:1])
    if is_dataset_info(inventory):
        return True
    return any(shows_records(inventory.root, name) for name in _apart(inventory))


def _apart(inventory: Inventory) -> Iterator[str]:
    """Files that may hold records, but for metadata tables and the captions of images."""
    for folder in inventory.below():
        images = (name for name in folder.names if extension_of(name) in IMAGE_EXTENSIONS)
        stems = {name.rpartition(".")[0] for name in images}
        for name in folder.others:
            is_caption = extension_of(name) == ".json" and name.rpartition(".")[0] in stems
            if extension_of(name) in KINDS and name not in TABLE_NAMES and not is_caption:
                yield folder.prefix + name


def _with_others(records: RecordFiles, inventory: Inventory, known: Collection[str]) -> RecordFiles:
    """With what the inventory could not use, and a note on the files that nothing names."""
    used = {*records.names, *known, *(item.name for item in (*records.rejected, *records.notes))}
    notes = Notes()
    for folder in inventory.below():
        records.rejected += folder.rejected.values()
        notes.add(*folder.notes)
        names = (folder.prefix + name for name in (*folder.names, *folder.loose))
        count_unused(notes, (name for name in names if name not in used))
    records.notes += notes.all()
    return records


def _by_state(inventory: Inventory, splits: Mapping[str, list[str]], split: str) -> RecordFiles:
    """A data set that ``datasets`` saved."""
    chosen, used = which_split(inventory.root, list(splits), split), set(saved_states(splits))
    if not splits[chosen]:
        state = f"{chosen}/{STATE_NAME}"
        fix = "save the data set again with save_to_disk"
        raise SourceError(
            f"{state} lists no files", where=str(inventory.root / state), why=f"{DICT_NAME} names it", fix=fix
        )
    records, notes = RecordFiles(inventory.root), Notes()
    records.take(splits[chosen], Way(kind="arrow"))
    for its in filter(chosen.__ne__, splits):
        names = [folder.prefix + name for folder in inventory.below(its) for name in folder.names]
        notes.count("split-unused", f"files of the split {its}; {chosen} is read", names)
        used.update(names)
    records.notes += notes.all()
    return _with_others(records, inventory, used)


def _by_info(inventory: Inventory, datasets: tuple[str, ...]) -> RecordFiles:
    entries, bad, notes = read_dataset_info(inventory.root, datasets)
    records = RecordFiles(inventory.root, rejected=bad, notes=notes)
    for file, form in entries:
        path = os.path.normpath(file)
        is_folder = (inventory.root / path).is_dir()
        names = [folder.prefix + name for folder in inventory.below(path) for name in folder.names]
        for name in sorted(names, key=os.fsencode) if is_folder else [path]:
            kind = KINDS.get(extension_of(name))
            if extension_of(name) in PACKED_EXTENSIONS:
                records.rejected.append(rejected(name, "compressed", f"{name} is packed"))
            elif kind is not None and (kind != "text" or (form.form, form.text) == (TEXT.form, TEXT.text)):
                records.take([name], Way(kind=kind, form=form, text_lines=True))  # to LLaMA-Factory, a line is a row
            elif kind is not None or not is_folder:
                why = f"expected one of {', '.join(KINDS)}; found {extension_of(name) or 'no extension'}"
                if kind is not None:
                    why = f"it holds texts, whose one column is text, and its entry in {INFO_NAME} names others"
                item = rejected(name, "table-unused" if is_folder else "unread-form", f"{name}: {why}")
                (records.notes if is_folder else records.rejected).append(item)
    return _with_others(records, inventory, {INFO_NAME})


def _by_names(inventory: Inventory, options: SourceOptions, known: Collection[str]) -> RecordFiles:
    """All files of records of one split; text files only if there are none."""
    names = [folder.prefix + name for folder in inventory.below() for name in folder.names]
    names = sorted((name for name in names if extension_of(name) in _WANTED), key=os.fsencode)
    packed = [name for name in names if extension_of(name) in PACKED_EXTENSIONS]
    records, notes = RecordFiles(inventory.root), Notes()
    records.rejected += [rejected(name, "compressed", f"{name} is packed") for name in packed]
    readable = [name for name in names if extension_of(name) in KINDS]
    texts = [name for name in readable if KINDS[extension_of(name)] == "text"]
    tables = [
        name
        for name in readable
        if KINDS[extension_of(name)] != "text" and (name in known or not shows_settings(inventory.root, name))
    ]
    for name in names:
        extension = extension_of(name)
        if extension in _UNREAD:
            notes.add(rejected(name, "table-unused", f"{name} is of a format that is not supported"))
        elif tables and KINDS.get(extension) == "text":
            notes.add(rejected(name, "text-unused", f"{name} is beside records"))
    readable = tables or texts
    named = splits_of(readable, options.split)
    splits = for_training(named)
    chosen = which_split(inventory.root, splits or [""], options.split) if readable else ""
    for name, split in zip(readable, splits, strict=True):
        if split == chosen:
            records.take([name], Way(kind=KINDS[extension_of(name)], text_lines=options.text_lines))
        else:
            notes.count("split-unused", f"files of the split {split}; {chosen} is read", (name,))
    notes.add(*missing_shards(records.names), *read_as_train(dict.fromkeys(readable, 1), named))
    records.notes += notes.all()
    return _with_others(records, inventory, readable)


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
            why, fix = f"it has {listed(list(info)) or 'none'}", "give one of its names"
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


def is_dataset_info(inventory: Inventory) -> bool:
    """True if a folder has a ``dataset_info.json`` as LLaMA-Factory has it; ``datasets`` writes another one.

    A file that cannot be read counts, unless there is something else in the folder that it could belong to.
    """
    if INFO_NAME not in inventory.top.others or saved_splits(inventory):
        return False
    try:
        info = read_document(inventory.root / INFO_NAME, "")
    except SourceError:
        return not any(folder.images for folder in inventory.below())
    entries = list(info.values()) if isinstance(info, dict) else []
    return any(isinstance(entry, dict) and not _ENTRY.isdisjoint(entry) for entry in entries)


def saved_splits(inventory: Inventory) -> dict[str, list[str]]:
    """Splits of a data set that ``datasets`` saved -> the Arrow files that ``state.json`` lists, below the root.

    Its only split has no name. A split without such a list has no files. Empty: the folder is another one.
    """
    if files := _data_files(inventory, ""):
        return {"": files}
    splits = {str(split): _data_files(inventory, f"{split}/") for split in _value(inventory, DICT_NAME, "splits")}
    return splits if any(splits.values()) else {}


def saved_states(splits: Iterable[str]) -> frozenset[str]:
    """Files beside the Arrow files of these splits."""
    folders = ["", *(f"{split}/" for split in splits if split)]
    return frozenset((DICT_NAME, *(folder + name for folder in folders for name in (STATE_NAME, INFO_NAME))))


def _data_files(inventory: Inventory, prefix: str) -> list[str]:
    """Files that a ``state.json`` lists; none: it is the file of another program, or not there."""
    entries = _value(inventory, prefix + STATE_NAME, "_data_files")
    if not all(isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries):
        return []
    return [prefix + Path(entry["filename"]).name for entry in entries]


def _value(inventory: Inventory, name: str, key: str) -> list[Any]:
    """A list in a JSON file below the root; empty if there is none."""
    folder, _, base = name.rpartition("/")
    if base not in inventory.folder(folder).others:
        return []
    try:
        document = read_document(inventory.root / name, "")
    except SourceError:
        return []
    value = document.get(key) if isinstance(document, dict) else None
    return value if isinstance(value, list) else []


def _not_usable(entry: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Reason word and detail of an entry that is not used; two empty words for one that is."""
    elsewhere = next((name for name in ("script_url", *_SERVERS) if name in entry), "")
    if elsewhere:
        cause = "script-dataset" if elsewhere == "script_url" else "hub-dataset"
        return (
            cause,
            f"only local files are read, and its data are elsewhere ({elsewhere}: {shown(entry[elsewhere])})",
        )
    file, columns, tags = entry.get("file_name"), entry.get("columns", {}), entry.get("tags", {})
    named = [*columns.values(), *tags.values()] if isinstance(columns, dict) and isinstance(tags, dict) else [0]
    are_names = all(name is None or isinstance(name, str) for name in named)
    if not isinstance(file, str) or entry.get("formatting", "alpaca") not in _FORMS or not are_names:
        expected = (
            f"file_name as text, formatting as one of {', '.join(_FORMS)}, columns and tags as objects of names"
        )
        return "record-field", f"expected {expected}; found {shown(entry)}"
    special = [column for column in (*_MEDIA, *_PREFERENCE) if columns.get(column)]
    if entry.get("ranking") or special:
        return "not-for-sft", f"it holds {'preferences' if not special else ', '.join(special)}, not plain answers"
    if not is_inside(str(folder / file), os.path.realpath(folder)):
        return "outside-root", f"{file} is outside the folder of {INFO_NAME}"
    return ("", "") if (folder / file).exists() else ("not-found", f"{file} is not there")


def _format(entry: Mapping[str, Any]) -> RecordFormat:
    form, tags = str(entry.get("formatting", "alpaca")), entry.get("tags", {})
    used = {name: column for name, column in entry.get("columns", {}).items() if column}
    if form == "alpaca" and used.keys() == {"prompt"}:  # as its own c4_demo: there is no answer
        return RecordFormat(form="text", text=used["prompt"])
    names = {name: tags[name] for name in ("role_tag", "content_tag") if tags.get(name)}
    if "columns" in entry:
        names |= {name: used.get(name, "") for name in (*_SHARED_COLUMNS, *_COLUMNS[form])}
    roles = tuple((tags[tag], role) for tag, role in _ROLE_TAGS.items() if tags.get(tag))
    return RecordFormat(form="alpaca" if form == "alpaca" else "chat", roles=roles, **names)


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
