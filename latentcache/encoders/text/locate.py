"""From the name of a tokenizer to its complete JSON, its special tokens and its chat template.

A ``tokenizer.json`` is read with the additions of ``tokenizer_config.json``; a folder without one goes through the
conversion of transformers, which is imported only then. Guarantee: a path that does not exist is never looked up on
the network; no code of a model repository is run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latentcache.encoders.faults import first_line
from latentcache.encoders.hub import expanded, hub_folder, is_hub_id, revision_of
from latentcache.errors import ModelNotFoundError, UnsupportedModelError
from latentcache.identity.tokenizer_files import JSON_NAME, LoadedTokenizer, from_json, read_tokenizer

_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
              "*.model", "config.json"]  # fmt: skip


def load_tokenizer(word: str, *, revision: str = "") -> tuple[LoadedTokenizer, str]:
    """A tokenizer by its folder, its ``tokenizer.json``, or a hub id ``org/name``; and the commit of a hub id.

    Raises:
        ModelNotFoundError: Nothing at this path, or no such repository on the hub.
        UnsupportedModelError: The files are not those of a usable tokenizer, with the reason.
    """
    path = expanded(word)
    if path.is_dir():
        return _from_folder(path), ""
    found = read_tokenizer(path) if path.is_file() else None
    if found is not None:
        return found, ""
    if not is_hub_id(word):
        raise ModelNotFoundError(
            f"--tokenizer {word}: no such file or folder",
            where=str(path.absolute()),
            fix="check the path; --tokenizer takes a folder, a tokenizer.json, a hub id, or stub",
        )
    what = {"what": "tokenizer", "flag": "--tokenizer"}
    folder = hub_folder(word, _HUB_FILES, _is_complete, revision=revision, **what)
    return _from_folder(folder), revision_of(folder)


def _from_folder(folder: Path) -> LoadedTokenizer:
    found = read_tokenizer(folder)
    if found is not None:
        return found
    note = f"{folder} has no {JSON_NAME}: transformers converted its files"
    return from_json(_converted(folder), folder, notes=(note,))


def _converted(folder: Path) -> dict[str, Any]:
    """``tokenizer.json`` as transformers makes it of other files.

    Raises:
        UnsupportedModelError: The conversion fails, or the tokenizer has no fast form.
    """
    # Seconds that only a folder without tokenizer.json should pay.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{folder} has no tokenizer that can be loaded",
            where=str(folder),
            why=f"there is no {JSON_NAME}, and transformers says: {first_line(error)}",
            fix="save it once with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) where it works",
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} has no fast form",
            where=str(folder),
            why="only a tokenizer that transformers can write as tokenizer.json gives places in the text",
            fix="use a model with a tokenizer.json",
        )
    converted: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return converted


def _is_complete(folder: Path) -> bool:
    """True if a folder of the local hub cache has both files that decide the recipe; other tools fetch parts."""
    return all((folder / name).is_file() for name in (JSON_NAME, "tokenizer_config.json"))
