"""Splits of a data set: which split a file belongs to, which one is read, and what is left out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from latentcache.errors import SourceAmbiguousError, UsageError, count_of, option
from latentcache.fields.table import Rejected
from latentcache.sources.causes import Notes, counted, rejected
from latentcache.sources.layout import Layout

TRAIN = "train"
#: Names of folders and files -> split (huggingface/datasets ``data_files.py``, ``SPLIT_KEYWORDS``).
SPLITS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "dev", "val"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(?:.*[-_./])?([A-Za-z0-9]+)-[0-9]{5}-of-[0-9]{5}\.[a-z]+")
_SERIES = re.compile(r"(.*-)([0-9]{5})-of-([0-9]{5})(\.[a-z]+)")
_KEYWORD = re.compile(rf"(?<![^-._ 0-9/])(?:{'|'.join(SPLITS)})(?![^-._ 0-9/])", re.IGNORECASE)


def splits_of(names: Sequence[str], asked: str = "") -> list[str]:
    """Split of each file; empty: none.

    If all are named ``train-00000-of-00001.parquet``, by that. Else by a word in the names of their folders, if every
    folder that holds files has one: beside others, a folder called ``test`` is a folder like them. Else by a word in
    the file names, as ``datasets`` finds it. If these have none either, a split that is asked for may name folders.
    """
    shards = [_SHARD.fullmatch(name) for name in names]
    if all(shards):
        return [match[1] for match in shards if match]
    parts = [name.rpartition("/") for name in names]
    of_folder = {folder: _last_word(folder) for folder in {folder for folder, _, _ in parts} - {""}}
    of_file = [_last_word(base) for _, _, base in parts]
    if not all(of_folder.values()) and (not asked or any(of_file)):
        return of_file
    return [of_folder.get(folder, "") or word for (folder, _, _), word in zip(parts, of_file, strict=True)]


def _last_word(text: str) -> str:
    words = _KEYWORD.findall(text)
    return SPLITS[words[-1].lower()] if words else ""


def unread_folders(
    root: Path, folders: Mapping[str, int], asked: str
) -> tuple[str, dict[str, str], tuple[Rejected, ...]]:
    """The split to read of folders (prefix -> images), ``Layout.unread`` of the others, and notes."""
    named = splits_of([*folders], asked)
    splits = for_training(named)
    chosen = which_split(root, splits or [""], asked)
    tops = dict[str, str]()
    for prefix, split in zip(folders, splits, strict=True):
        parts = prefix.removesuffix("/").split("/")
        top = max((number for number, part in enumerate(parts, 1) if _last_word(part)), default=0)
        tops["/".join(parts[:top])] = split
    return chosen, _unread(tops.items(), chosen), tuple(read_as_train(folders, named))


def _unread(splits: Collection[tuple[str, str]], chosen: str) -> dict[str, str]:
    """``Layout.unread`` of folders with their splits."""
    others = {folder: split for folder, split in splits if split != chosen}
    return {**others, **{folder: "" for folder, split in splits if split == chosen}} if others else {}


def read_as_train(files: Mapping[str, int], splits: Sequence[str]) -> Iterator[Rejected]:
    """One note on files (name -> how many) in a top-level folder such as ``test`` that does not count as a split."""
    named = [
        name
        for name, split in zip(files, splits, strict=True)
        if "/" in name and SPLITS.get(name.partition("/")[0].lower(), TRAIN) not in (TRAIN, split)
    ]
    if named:
        folders = sorted({name.partition("/")[0] for name in named})
        count = sum(files[name] for name in named)
        words = count_of(count, f"files of {', '.join(folders)} are read")
        why = "folder names are splits only if every folder has one"
        yield rejected(named[0], "split-read", f"{words}: {why}", count=count)


def missing_shards(names: Iterable[str]) -> Iterator[Rejected]:
    """One note for each series with missing files, such as ``train-00000-of-00003.parquet``."""
    there = defaultdict[tuple[str, str, str], set[int]](set)
    for match in filter(None, map(_SERIES.fullmatch, names)):
        there[match[1], match[3], match[4]].add(int(match[2]))
    for (start, count, end), numbers in there.items():
        if lost := sorted({*range(int(count))} - numbers):
            yield counted(f"{start}{lost[0]:05}-of-{count}{end}", "shard-missing", len(lost), "shards are not there")


def for_training(splits: Sequence[str]) -> list[str]:
    """The same splits; if there are several, what names none is for training."""
    return [split or TRAIN for split in splits] if len({*splits}) > 1 else [*splits]


def which_split(root: Path, splits: Sequence[str], asked: str) -> str:
    """The split to read: the given one, else ``train``, else the only one. Raises an error if there is none."""
    if asked and asked not in splits:
        good = max(splits, key=lambda split: split == TRAIN, default="")
        raise UsageError(
            "DATA has no such split",
            argument="split",
            value=asked,
            where=str(root),
            why=f"it has {', '.join(dict.fromkeys(filter(None, splits))) or 'no splits'}",
            fix=option("split", good) if good else "leave --split out",
        )
    chosen = asked or (TRAIN if TRAIN in splits or len({*splits}) > 1 else splits[0])
    if chosen not in splits:
        raise SourceAmbiguousError(
            f"DATA has {len({*splits})} splits, and none is called {TRAIN}: {', '.join(dict.fromkeys(splits))}",
            where=str(root),
            why="one split is read",
            fix=f"name it: {option('split', splits[0])}",
        )
    return chosen


def choose_split(layout: Layout, asked: str) -> Layout:
    """The sets of one split: the one that is asked for, else ``train``; archives of other splits are noted."""
    splits = for_training([image_set.split for image_set in layout.sets])
    chosen = which_split(layout.root, splits or [""], asked)
    pairs = list(zip(layout.sets, splits, strict=True))
    left = set[str]()
    notes = Notes()
    for image_set, split in pairs:
        if split != chosen and not image_set.folder:
            notes.count("split-unused", f"files of the split {split}; {chosen} is read", sorted(image_set.files))
            left |= image_set.files
    folders = [(image_set.folder, split) for image_set, split in pairs if image_set.folder or not image_set.archives]
    layout = replace(
        layout,
        sets=tuple(image_set for image_set, split in pairs if split == chosen),
        split=chosen,
        unread=_unread(folders, chosen),
        notes=(*layout.notes, *notes.all()),
    )
    return replace(layout, used=frozenset(name for name in layout.used | left if not layout.split_of(name)))
