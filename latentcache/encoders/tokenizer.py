"""From what a user calls a tokenizer to the JSON that says all of it, its special tokens and its chat template.

Decides: a ``tokenizer.json`` is read as it stands, and what ``tokenizer_config.json`` adds is added; a folder without
one goes through transformers' own conversion. Guarantee: a path that does not exist is never looked up on the
network; no code of a model repository is run; a hub id is looked for in the local hub cache first. transformers is
imported only for a folder that needs its conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.encoders.hub import expanded, first_line, is_hub_id, snapshot
from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError

_JSON_NAME = "tokenizer.json"
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_HUB_FILES = ["tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", "vocab.*", "merges.txt",
              "*.model", "config.json"]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer as plain data."""

    json: dict[str, Any]
    """``tokenizer.json`` without its truncation and padding."""
    config: dict[str, Any]
    """``tokenizer_config.json``; empty where there is none."""
    special: dict[str, str]
    """Role -> token, for those that are in the vocabulary."""
    chat_template: str
    """Jinja; empty where there is none."""
    notes: tuple[str, ...] = ()

    def id_of(self, role: str) -> int | None:
        """The id of a special token by its role, as ``eos_token``."""
        token = self.special.get(role)
        return None if token is None else token_ids(self.json).get(token)


def load_tokenizer(word: str) -> LoadedTokenizer:
    """A tokenizer by its folder, its ``tokenizer.json``, or a hub id ``org/name``.

    Raises:
        ModelNotFoundError: Nothing at this path, or no such repository within reach.
        UnsupportedModelError: What is there is no tokenizer that can be used, with the reason.
    """
    path = expanded(word)
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        if path.suffix != ".json":
            raise UnsupportedModelError(
                f"{path.name} is no tokenizer.json",
                where=str(path),
                why="a SentencePiece or tiktoken file alone does not say which tokens are special",
                fix=f"give the folder it lies in: --tokenizer {path.parent}",
            )
        return _assembled(_read_json(path), path.parent)
    if not is_hub_id(word):
        raise ModelNotFoundError(
            f"there is no tokenizer at {word}",
            where=str(path.absolute()),
            fix="check the path; --tokenizer takes a folder, a tokenizer.json, a hub id, or stub",
        )
    return _from_folder(snapshot(word, _HUB_FILES, _has_tokenizer, what="tokenizer", flag="--tokenizer"))


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, of the vocabulary and of added tokens."""
    vocab = tokenizer["model"].get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}}


def read_template(path: Path) -> str:
    """A chat template given as a file.

    Raises:
        ModelNotFoundError: It is not there or no UTF-8.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(
            f"the chat template cannot be read: {path}", where=str(path), why=str(error), fix="check --chat-template"
        ) from error


def _from_folder(folder: Path) -> LoadedTokenizer:
    if (folder / _JSON_NAME).is_file():
        return _assembled(_read_json(folder / _JSON_NAME), folder)
    converted = _converted(folder)
    note = f"{folder} has no {_JSON_NAME}: transformers converted what is there"
    return _assembled(converted, folder, notes=(note,))


def _assembled(tokenizer: dict[str, Any], folder: Path, notes: tuple[str, ...] = ()) -> LoadedTokenizer:
    """The JSON with what the files beside it add."""
    if not isinstance(tokenizer.get("model"), dict):
        raise UnsupportedModelError(
            "this JSON is of no tokenizer",
            where=str(folder),
            why="it has no model",
            fix="give the tokenizer's folder",
        )
    config = _optional_json(folder / "tokenizer_config.json")
    roles = {**_optional_json(folder / "special_tokens_map.json"), **config}
    named = {role: _content(roles.get(role)) for role in _ROLES}
    tokenizer = {name: value for name, value in tokenizer.items() if name not in ("truncation", "padding")}
    tokenizer["added_tokens"] = _added(tokenizer, config, set(filter(None, named.values())))
    known = token_ids(tokenizer)
    special = {role: token for role, token in named.items() if token in known}
    lost = [f"{role} {token!r} is not in the vocabulary and not used" for role, token in named.items()
            if token and token not in known]  # fmt: skip
    return LoadedTokenizer(
        json=tokenizer, config=config, special=special, chat_template=_template(folder, config), notes=(*notes, *lost)
    )


def _added(tokenizer: Mapping[str, Any], config: Mapping[str, Any], roles: set[str]) -> list[dict[str, Any]]:
    """Added tokens by id: those of the JSON, and those that only the configuration knows.

    A token that has a role is special, as transformers makes it when it loads it.
    """
    added = {int(token["id"]): dict(token) for token in tokenizer.get("added_tokens") or ()}
    for number, token in (config.get("added_tokens_decoder") or {}).items():
        added.setdefault(int(number), {"id": int(number), **token})
    present = {token["content"] for token in added.values()}
    vocab = token_ids({**tokenizer, "added_tokens": []})
    for token in roles - present:
        if token in vocab:
            added[vocab[token]] = {"id": vocab[token], "content": token}
    for entry in added.values():
        if entry["content"] in roles:
            entry["special"] = True
    off = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    fields = ("id", "content", *off)
    return [{name: {**off, **added[n]}[name] for name in fields} for n in sorted(added)]


def _template(folder: Path, config: Mapping[str, Any]) -> str:
    """The file ``chat_template.jinja`` wins; of several named templates, ``default``."""
    if (folder / "chat_template.jinja").is_file():
        return read_template(folder / "chat_template.jinja")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return template if isinstance(template, str) else ""


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
            why=f"there is no {_JSON_NAME}, and transformers says: {first_line(error)}",
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


def _content(token: Any) -> str:
    """The text of a special token, given as text or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _optional_json(path: Path) -> dict[str, Any]:
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise EncoderError(
            f"{path.name} cannot be read", where=str(path), why=str(error), fix=f"ls -l {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedModelError(
            f"{path.name} is no JSON", where=str(path), why=str(error), fix="download it again"
        ) from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path.name} is no JSON object", where=str(path), fix="download it again")
    return value
