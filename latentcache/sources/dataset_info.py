"""LLaMA-Factory's ``dataset_info.json``, read as that program reads it: which files, of which form, which columns.

Its rule for names (its ``data/parser.py``) is followed: where an entry has ``columns``, a column it does not name
is not used, and where it has ``tags``, a tag it does not name does not exist; the defaults hold only without them.
Columns that name a prompt alone are what it trains on as text.
Entries that need the network, a script or another kind of training are refused by name.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UnusableSampleError, UsageError
from latentcache.sources.causes import refusal
from latentcache.sources.lines import decode, parse_json
from latentcache.sources.reading import read_source
from latentcache.sources.record_format import RecordFormat
from latentcache.sources.rows import listed, shown
from latentcache.sources.sample import Refusal

INFO_NAME = "dataset_info.json"
_FORMS = ("alpaca", "sharegpt", "openai")
_SHARED_COLUMNS = ("system", "tools")
_COLUMNS = {"alpaca": ("prompt", "query", "response", "history"), "sharegpt": ("messages",), "openai": ("messages",)}
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
_MEDIA = ("images", "videos", "audios")
_PREFERENCE = ("chosen", "rejected", "kto_tag")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One usable entry."""

    name: str
    file: str
    """Relative to the folder of the file; a file or a folder of files."""
    form: RecordFormat


def read_dataset_info(folder: Path, names: Sequence[str] = ()) -> tuple[list[Dataset], list[Refusal], list[Refusal]]:
    """Usable entries, refused ones and notes, in the order of ``names``, or of the file.

    Args:
        folder: Where ``dataset_info.json`` lies.
        names: Entries to use; all that lie on this disk when there are none.

    Raises:
        SourceError: The file cannot be read or is no object of objects.
        UsageError: An entry that was asked for is not there or cannot be used.
    """
    info = _read(folder / INFO_NAME)
    missing = [name for name in names if name not in info]
    if missing:
        raise UsageError(
            f"{INFO_NAME} has no data set called {missing[0]}",
            where=str(folder / INFO_NAME),
            why=f"it has {listed(list(info)) or 'none'}",
            fix="give one of its names with --dataset",
        )
    datasets: list[Dataset] = []
    refused: list[Refusal] = []
    notes: list[Refusal] = []
    for name in names or info:
        cause, detail = _not_usable(name, info[name], folder)
        if cause and names:
            item = refusal(name, cause, detail)
            raise UsageError(f"{name} cannot be used: {detail}", where=str(folder / INFO_NAME), fix=item.hint)
        if cause:
            refused.append(refusal(name, cause, f"{INFO_NAME}: {name}: {detail}"))
            continue
        datasets.append(Dataset(name=name, file=info[name]["file_name"], form=_format(info[name])))
        notes += _notes(name, info[name])
    return datasets, refused, notes


def is_dataset_info(folder: Path) -> bool:
    """Whether a folder has such a file; one that ``datasets`` left beside saved data is none."""
    return (folder / INFO_NAME).is_file() and not any((folder / name).is_file() for name in ("state.json",))


def _read(path: Path) -> Mapping[str, Mapping[str, Any]]:
    try:
        raw, _ = read_source(path)
        info = parse_json(decode(raw.removeprefix(b"\xef\xbb\xbf")))
    except UnusableSampleError as error:
        raise SourceError(
            f"{INFO_NAME} cannot be read", where=str(path), why=error.what, fix=f"look at {shlex.quote(str(path))}"
        ) from error
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        raise SourceError(
            f"{INFO_NAME} is no object of data sets",
            where=str(path),
            why=f"expected a name and an object for each data set, found {shown(info)}",
            fix="compare it with LLaMA-Factory's data/README.md",
        )
    return info


def _not_usable(name: str, entry: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """Cause word and detail of an entry that is not used; two empty words for one that is."""
    for kind in ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name"):
        if kind in entry:
            return (
                "hub-dataset",
                f"it is on a server ({kind}: {shown(entry[kind])}); only files of this disk are read",
            )
    if "script_url" in entry:
        return "script-dataset", f"it is made by a script ({shown(entry['script_url'])})"
    if not isinstance(entry.get("file_name"), str):
        return "record-field", f"expected file_name as text, found {shown(entry.get('file_name'))}"
    if entry.get("formatting", "alpaca") not in _FORMS:
        return (
            "record-field",
            f"expected formatting as one of {', '.join(_FORMS)}, found {shown(entry['formatting'])}",
        )
    columns, tags = entry.get("columns", {}), entry.get("tags", {})
    if not (isinstance(columns, dict) and isinstance(tags, dict)) or not _are_names(columns, tags):
        return "record-field", "expected columns and tags as objects of names"
    special = [column for column in (*_MEDIA, *_PREFERENCE) if columns.get(column)]
    if entry.get("ranking") or special:
        return "not-for-sft", f"it holds {'preferences' if not special else ', '.join(special)}, not plain answers"
    return _missing_file(folder, entry["file_name"])


def _are_names(*tables: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, str) for table in tables for value in table.values())


def _missing_file(folder: Path, file: str) -> tuple[str, str]:
    path = folder / file
    if not os.path.realpath(path).startswith(os.path.realpath(folder) + os.sep):
        return "outside-root", f"{file} lies outside the folder of {INFO_NAME}"
    return ("", "") if path.exists() else ("not-found", f"{file} is not there")


def _format(entry: Mapping[str, Any]) -> RecordFormat:
    """Names of an entry, by the rule of the module's docstring."""
    form = str(entry.get("formatting", "alpaca"))
    used = {name: column for name, column in entry.get("columns", {}).items() if column}
    if form == "alpaca" and used.keys() == {"prompt"}:  # as its own c4_demo: nobody answers
        return RecordFormat(form="text", text=used["prompt"])
    names: dict[str, str] = {}
    if "columns" in entry:
        names |= {name: entry["columns"].get(name) or "" for name in (*_SHARED_COLUMNS, *_COLUMNS[form])}
    if "tags" in entry:
        names |= {name: entry["tags"].get(name) or "" for name in _TAGS}
    return RecordFormat(form=form, **names)


def _notes(name: str, entry: Mapping[str, Any]) -> Iterator[Refusal]:
    if entry.get("num_samples"):
        yield refusal(name, "all-samples", f"{INFO_NAME}: {name}: num_samples is {shown(entry['num_samples'])}")
