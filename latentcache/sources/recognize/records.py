"""Files of DATA that hold records.

The first of these that fits:
- a folder that Hugging Face ``datasets`` saved (of a dict of data sets, ``train``);
- all files of records below the folder, in the byte order of their names;
- its text files, each one document, or each line one document if asked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError
from latentcache.sources.causes import Findings, rejected
from latentcache.sources.formats.archives import TAR, kind_of_archive, open_rows, tar_members
from latentcache.sources.formats.files import open_source, read_document
from latentcache.sources.inventory import (
    IMAGE_EXTENSIONS,
    PACKED_EXTENSIONS,
    TABLE_NAMES,
    Inventory,
    count_unused,
    extension_of,
)
from latentcache.sources.options import SourceOptions
from latentcache.sources.records import KINDS, RecordReader
from latentcache.sources.splits import for_training, missing_shards, read_as_train, splits_of, which_split

INFO_NAME = "dataset_info.json"
STATE_NAME, DICT_NAME = "state.json", "dataset_dict.json"
#: Formats of records that are not read where they are loose.
_UNREAD = (".csv", ".tsv", ".arrow")
_WANTED = frozenset((*KINDS, *_UNREAD, *PACKED_EXTENSIONS))
#: Any of these is in an entry of LLaMA-Factory's ``dataset_info.json``.
_ENTRY = ("file_name", "script_url", "hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name")


def find_records(
    inventory: Inventory, options: SourceOptions, findings: Findings, known: Collection[str] = ()
) -> list[str]:
    """Names of the files of records in a file or folder, below its root; raises as ``scan.scan``.

    Only ``.json`` files are opened, to see if they hold records; not those that are ``known`` to do so.
    """
    data = inventory.data
    if inventory.is_file:
        which_split(data, [""], options.split)
        names = [data.name]
    elif splits := saved_splits(inventory):
        names = _by_state(inventory, splits, options, findings)
    elif is_dataset_info(inventory):
        raise SourceError(
            f"{INFO_NAME} of LLaMA-Factory is not followed",
            where=str(data / INFO_NAME),
            why="a file of records is read by the names of its columns",
            fix="give one file of records as DATA, or move this one elsewhere to read all files in the folder",
        )
    else:
        names = _by_names(inventory, options, findings, known)
    if not names and not findings.rejected:
        raise _nothing(inventory)
    if any(map(kind_of_archive, names)) and find_spec("pyarrow") is None:
        raise SourceError(
            "pyarrow is not installed, and these files need it",
            where=str(data),
            why="parquet files and saved data sets are read by an extra",
            fix="pip install 'latentcache[hf]'",
            slug="extra-missing",
        )
    return names


def _nothing(inventory: Inventory) -> EmptySourceError:
    return EmptySourceError(
        "the data folder holds no records",
        where=str(inventory.root),
        why=f"expected one of {', '.join(KINDS)}; found {inventory.contents}",
        fix="give the file or folder that holds the texts or conversations",
    )


def holds_records(inventory: Inventory) -> bool:
    """True if a folder describes records, or one of its files begins with one; texts may be captions."""
    if splits := saved_splits(inventory):
        return not hold_images(inventory.root, next(iter(splits.values()))[:1])
    if is_dataset_info(inventory):
        return True
    return any(begins_with(inventory.root, name) == "record" for name in _apart(inventory))


def _apart(inventory: Inventory) -> Iterator[str]:
    """Files that may hold records, but for metadata tables and the captions of images."""
    for folder in inventory.below():
        images = (name for name in folder.names if extension_of(name) in IMAGE_EXTENSIONS)
        stems = {name.rpartition(".")[0] for name in images}
        for name in folder.others:
            is_caption = extension_of(name) == ".json" and name.rpartition(".")[0] in stems
            if extension_of(name) in KINDS and name not in TABLE_NAMES and not is_caption:
                yield folder.prefix + name


def _note_others(inventory: Inventory, used: Collection[str], findings: Findings) -> None:
    """Note and reject what the inventory could not use, and the files that nothing names."""
    used = {*used, *findings.names()}
    for folder in inventory.below():
        findings.rejected += folder.rejected.values()
        findings.notes.add(*folder.notes)
        names = (folder.prefix + name for name in (*folder.names, *folder.loose))
        count_unused(findings.notes, (name for name in names if name not in used))


def _by_state(
    inventory: Inventory, splits: Mapping[str, list[str]], options: SourceOptions, findings: Findings
) -> list[str]:
    """A data set that ``datasets`` saved."""
    chosen, used = which_split(inventory.root, list(splits), options.split), set(saved_states(splits))
    if not splits[chosen]:
        state = f"{chosen}/{STATE_NAME}"
        fix = "save the data set again with save_to_disk"
        raise SourceError(
            f"{state} lists no files", where=str(inventory.root / state), why=f"{DICT_NAME} names it", fix=fix
        )
    for split in filter(chosen.__ne__, splits):
        names = [folder.prefix + name for folder in inventory.below(split) for name in folder.names]
        findings.notes.count("split-unused", f"files of the split {split}; {chosen} is read", names)
        used.update(names)
    _note_others(inventory, {*used, *splits[chosen]}, findings)
    return splits[chosen]


def _by_names(inventory: Inventory, options: SourceOptions, findings: Findings, known: Collection[str]) -> list[str]:
    """All files of records of one split; text files only if there are none."""
    names = [folder.prefix + name for folder in inventory.below() for name in folder.names]
    names = sorted((name for name in names if extension_of(name) in _WANTED), key=os.fsencode)
    packed = [name for name in names if extension_of(name) in PACKED_EXTENSIONS]
    chosen_names, notes = list[str](), findings.notes
    findings.rejected += [rejected(name, "compressed", f"{name} is packed") for name in packed]
    readable = [name for name in names if extension_of(name) in KINDS]
    texts = [name for name in readable if KINDS[extension_of(name)] == "text"]
    tables = [
        name
        for name in readable
        if KINDS[extension_of(name)] != "text"
        and (name in known or extension_of(name) != ".json" or begins_with(inventory.root, name) != "settings")
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
            chosen_names.append(name)
        else:
            notes.count("split-unused", f"files of the split {split}; {chosen} is read", (name,))
    notes.add(*missing_shards(chosen_names), *read_as_train(dict.fromkeys(readable, 1), named))
    _note_others(inventory, readable, findings)
    return chosen_names


def is_dataset_info(inventory: Inventory) -> bool:
    """True if a folder has a ``dataset_info.json`` as LLaMA-Factory has it; ``datasets`` writes another one."""
    entries = [entry for entry in _document(inventory, INFO_NAME).values() if isinstance(entry, dict)]
    return any(isinstance(entry.get(name), str) for entry in entries for name in _ENTRY)


def saved_splits(inventory: Inventory) -> dict[str, list[str]]:
    """Splits of a data set that ``datasets`` saved -> the Arrow files that ``state.json`` lists, below the root.

    Its only split has no name. A split without such a list has no files. Empty: the folder is another one.
    """
    if files := _data_files(inventory, ""):
        return {"": files}
    names = _document(inventory, DICT_NAME).get("splits")
    splits = {str(name): _data_files(inventory, f"{name}/") for name in (names if isinstance(names, list) else ())}
    return splits if any(splits.values()) else {}


def saved_states(splits: Iterable[str]) -> frozenset[str]:
    """Files beside the Arrow files of these splits."""
    folders = ["", *(f"{split}/" for split in splits if split)]
    return frozenset((DICT_NAME, *(folder + name for folder in folders for name in (STATE_NAME, INFO_NAME))))


def _data_files(inventory: Inventory, prefix: str) -> list[str]:
    """Files that a ``state.json`` lists; none: it is the file of another program, or not there."""
    entries = _document(inventory, prefix + STATE_NAME).get("_data_files")
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("filename"), str) for entry in entries
    ):
        return []
    return [prefix + Path(entry["filename"]).name for entry in entries]


def _document(inventory: Inventory, name: str) -> dict[str, Any]:
    """The object in a JSON file below the root; an empty one if there is none."""
    folder, _, base = name.rpartition("/")
    if base not in inventory.folder(folder).others:
        return {}
    try:
        document = read_document(inventory.root / name, "")
    except SourceError:
        return {}
    return document if isinstance(document, dict) else {}


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
        with open_rows(path, kind) as table:
            return bool(table.images())
    with open_source(path) as file:
        return any(extension_of(member.name) in IMAGE_EXTENSIONS for member in islice(tar_members(file), _LOOKED_AT))


def begins_with(root: Path, name: str) -> str:
    """``record``, or ``settings`` for a ``.json`` file that is one object, or a list, and no record; else empty."""
    if extension_of(name) == ".parquet" and hold_images(root, [name]):
        return ""
    try:
        return "record" if next(iter(RecordReader(root / name, name)), None) is not None else ""
    except UnusableSampleError as error:
        return "settings" if error.slug == "not-records" else ""
    except ImportError:
        return ""
