"""From what a user calls a tokenizer to the JSON that says all of it, its special tokens and its chat template.

Decides: a ``tokenizer.json`` is read as it stands, and what ``tokenizer_config.json`` adds is added; a folder without
one goes through transformers' own conversion. Guarantee: a path that does not exist is never looked up on the
network; no code of a model repository is run; a hub id is looked for in the local hub cache first. transformers is
imported only for a folder that needs its conversion.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from latentcache.encoders.hub import expanded, first_line, is_hub_id, snapshot
from latentcache.errors import ModelNotFoundError, UnsupportedModelError
from latentcache.identity.tokenizer_files import JSON_NAME, LoadedTokenizer, from_json, read_tokenizer

_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
              "*.model", "config.json"]  # fmt: skip


def load_tokenizer(word: str) -> LoadedTokenizer:
    """A tokenizer by its folder, its ``tokenizer.json``, or a hub id ``org/name``.

    Raises:
        ModelNotFoundError: Nothing at this path, or no such repository within reach.
        UnsupportedModelError: What is there is no tokenizer that can be used, with the reason.
    """
    path = expanded(word)
    if path.is_dir():
        return _from_folder(path)
    found = read_tokenizer(path) if path.is_file() else None
    if found is not None:
        return found
    if not is_hub_id(word):
        raise ModelNotFoundError(
            f"there is no tokenizer at {word}",
            where=str(path.absolute()),
            fix="check the path; --tokenizer takes a folder, a tokenizer.json, a hub id, or stub",
        )
    return _from_folder(snapshot(word, _HUB_FILES, _has_tokenizer, what="tokenizer", flag="--tokenizer"))


def _from_folder(folder: Path) -> LoadedTokenizer:
    found = read_tokenizer(folder)
    if found is not None:
        return found
    note = f"{folder} has no {JSON_NAME}: transformers converted what is there"
    return from_json(_converted(folder), folder, notes=(note,))


def _converted(folder: Path) -> dict[str, Any]:
    """``tokenizer.json`` as transformers makes it of other files.

    Raises:
        UnsupportedModelError: It cannot, or its tokenizer has no fast form.
    """
    # Seconds that only a folder without tokenizer.json should pay.
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, ImportError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{folder} holds no tokenizer that can be loaded",
            where=str(folder),
            why=f"there is no {JSON_NAME}, and transformers says: {first_line(error)}",
            fix="save it once with AutoTokenizer.from_pretrained(...).save_pretrained(FOLDER) where it works",
        ) from error
    if not tokenizer.is_fast:
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} has no fast form",
            where=str(folder),
            why="only what transformers can write as tokenizer.json is used: places in the text are needed",
            fix="use a model with a tokenizer.json",
        )
    converted: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return converted


def _has_tokenizer(folder: Path) -> bool:
    return any(folder.glob("tokenizer*"))
