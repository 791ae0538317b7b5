"""Folders that another program describes: LLaMA-Factory's ``dataset_info.json`` and what Hugging Face ``datasets`` saved.

``dataset_info.json`` is read as LLaMA-Factory reads it (its ``data/parser.py``): if an entry has ``columns``, a column
that it does not name is not used, and if it has ``tags``, a tag that it does not name does not exist; the defaults
hold only without them. An entry whose columns name a prompt alone is text. Entries that need the network, a script or
another kind of training are rejected by name. Of a saved dict of data sets, ``train`` is read.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import SourceError, UnusableSampleError, UsageError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import rejected
from latentcache.sources.lines import decode, listed, parse_json, shown
from latentcache.sources.reading import read_source
from latentcache.sources.records import RecordFormat

INFO_NAME = "dataset_info.json"
STATE_NAME, DICT_NAME = "state.json", "dataset_dict.json"
_FORMS = ("alpaca", "sharegpt", "openai")
_SHARED_COLUMNS = ("system", "tools")
_COLUMNS = {"alpaca": ("prompt", "query", "response", "history"), "sharegpt": ("messages",), "openai": ("messages",)}
_TAGS = ("role_tag", "content_tag", "user_tag", "assistant_tag", "observation_tag", "function_tag", "system_tag")
_SERVERS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "cloud_file_name")
_MEDIA = ("images", "videos", "audios")
_PREFERENCE = ("chosen", "rejected", "kto_tag")
_SPLIT = "train"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """One usable entry of a ``dataset_info.json``."""

    name: str
    file: str
    """Relative to the folder; a file or a folder of files."""
    form: RecordFormat


def read_dataset_info(
    folder: Path, names: Sequence[str] = ()
) -> tuple[list[Dataset], list[Rejected], list[Rejected]]:
    """Usable entries, rejected ones and notes, in the order of ``names``, or of the file.

    Args:
        folder: Where ``dataset_info.json`` is.
        names: Entries to use; all that are on this disk if there are none.

    Raises:
        SourceError: The file cannot be read or is no object of objects.
        UsageError: An entry that was asked for is absent or cannot be used.
    """
    info = _read_info(folder / INFO_NAME)
    missing = [name for name in names if name not in info]
    if missing:
        raise UsageError(
            f"{INFO_NAME} has no data set called {missing[0]}",
            where=str(folder / INFO_NAME),
            why=f"it has {listed(list(info)) or 'none'}",
            fix="give one of its names with --dataset",
        )
    datasets: list[Dataset] = []
    bad: list[Rejected] = []
    notes: list[Rejected] = []
    for name in names or info:
        entry = info[name]
        cause, detail = _not_usable(entry, folder)
        if cause and names:
            item = rejected(name, cause, detail)
            raise UsageError(f"{name} cannot be used: {detail}", where=str(folder / INFO_NAME), fix=item.hint)
        if cause:
            bad.append(rejected(name, cause, f"{INFO_NAME}: {name}: {detail}"))
            continue
        datasets.append(Dataset(name=name, file=entry["file_name"], form=_format(entry)))
        if entry.get("num_samples"):
            detail = f"{INFO_NAME}: {name}: num_samples is {shown(entry['num_samples'])}"
            notes.append(rejected(name, "all-samples", detail))
    return datasets, bad, notes


def is_dataset_info(folder: Path) -> bool:
    """True if a folder has such a file; one that ``datasets`` left beside saved data does not count."""
    return (folder / INFO_NAME).is_file() and not (folder / STATE_NAME).is_file()


def is_saved(folder: Path) -> bool:
    """True if ``datasets`` saved this folder."""
    return any((folder / name).is_file() for name in (STATE_NAME, DICT_NAME))


def saved_files(folder: Path) -> Iterator[str]:
    """Names below the folder of the Arrow files that ``state.json`` lists, in its order.

    Raises:
        SourceError: The list cannot be read.
        UsageError: It is a dict of data sets without ``train``.
    """
    prefix = ""
    if not (folder / STATE_NAME).is_file():
        splits = [str(name) for name in _object(folder / DICT_NAME).get("splits", [])]
        if _SPLIT not in splits:
            raise UsageError(
                f"{folder} has no split called {_SPLIT}",
                where=str(folder / DICT_NAME),
                why=f"it has {listed(splits) or 'none'}",
                fix=f"give the folder of one split, e.g. {shlex.quote(str(folder / (splits or ['train'])[0]))}",
            )
        prefix = f"{_SPLIT}/"
    for entry in _object(folder / f"{prefix}{STATE_NAME}").get("_data_files", []):
        yield prefix + Path(entry["filename"]).name


def _object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path.name} cannot be read", where=str(path), why=str(error), fix="save it again"
        ) from error
    return value if isinstance(value, dict) else {}


def _read_info(path: Path) -> Mapping[str, Mapping[str, Any]]:
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
    if not (isinstance(columns, dict) and isinstance(tags, dict)) or not _are_names(columns, tags):
        return "record-field", "expected columns and tags as objects of names"
    special = [column for column in (*_MEDIA, *_PREFERENCE) if columns.get(column)]
    if entry.get("ranking") or special:
        return "not-for-sft", f"it holds {'preferences' if not special else ', '.join(special)}, not plain answers"
    file = entry["file_name"]
    if not os.path.realpath(folder / file).startswith(os.path.realpath(folder) + os.sep):
        return "outside-root", f"{file} is outside the folder of {INFO_NAME}"
    return ("", "") if (folder / file).exists() else ("not-found", f"{file} is not there")


def _are_names(*tables: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, str) for table in tables for value in table.values())


def _format(entry: Mapping[str, Any]) -> RecordFormat:
    """Names of an entry, by the rule of the module's docstring."""
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
