"""From the name of a tokenizer to its complete JSON, its special tokens and its chat template.

A ``tokenizer.json`` is read with the additions of ``tokenizer_config.json``. Guarantee: a path that does not exist is
never looked up on the network; no code of a model repository is run.
"""

from __future__ import annotations

from pathlib import Path

from latentcache.encoders.hub import Wanted, find
from latentcache.errors import UnsupportedModelError
from latentcache.identity.tokenizer_files import JSON_NAME, LoadedTokenizer, read_tokenizer


def load_tokenizer(word: str, *, revision: str = "") -> tuple[LoadedTokenizer, str]:
    """A tokenizer by its folder, its ``tokenizer.json``, or a hub id ``org/name``; and the commit of a hub id.

    Raises:
        ModelNotFoundError: Nothing at this path, or no such repository on the hub.
        UnsupportedModelError: The files are not those of a usable tokenizer, with the reason.
    """
    path, commit = find(word, _WANTED, revision=revision)
    return _read(path), commit


def _read(folder: Path) -> LoadedTokenizer:
    found = read_tokenizer(folder)
    if found is None:
        save = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        raise UnsupportedModelError(
            f"{folder} has no {JSON_NAME}",
            where=str(folder),
            why="only a fast tokenizer gives places in the text",
            fix=f'python -c "from transformers import AutoTokenizer; {save}"',
        )
    return found


def _is_complete(folder: Path) -> bool:
    """True if a folder of the local hub cache has both files that decide the recipe; other tools fetch parts."""
    return all((folder / name).is_file() for name in (JSON_NAME, "tokenizer_config.json"))


_WANTED = Wanted(
    what="tokenizer",
    flag="--tokenizer",
    takes="a folder, a tokenizer.json, a hub id, or stub",
    files=("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
           "*.model", "config.json"),
    is_complete=_is_complete,
)  # fmt: skip
