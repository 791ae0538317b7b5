"""A tokenizer as plain data, from its files or from one that is loaded already: what a fingerprint is made of.

Decides: a ``tokenizer.json`` is read as it stands, and what ``tokenizer_config.json`` and its like beside it add is
added. Guarantee: no tokenizer library is imported, and no network is asked; a loaded one is asked for its own
JSON. Cost: reading a file of some megabytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError
from latentcache.value import Value

JSON_NAME = "tokenizer.json"
#: What a run left there.
_RUN_STATE = ("truncation", "padding")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class LoadedTokenizer(Value):
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


def read_tokenizer(path: Path) -> LoadedTokenizer | None:
    """A tokenizer by its ``tokenizer.json`` or the folder of one; None for a folder that has none.

    Raises:
        EncoderError: It cannot be read.
        UnsupportedModelError: What is there is no tokenizer.json.
    """
    if path.is_dir():
        return from_json(_read_json(path / JSON_NAME), path) if (path / JSON_NAME).is_file() else None
    if path.suffix != ".json":
        raise UnsupportedModelError(
            f"{path.name} is no {JSON_NAME}",
            where=str(path),
            why="a SentencePiece or tiktoken file alone does not say which tokens are special",
            fix=f"give the folder it lies in: --tokenizer {path.parent}",
        )
    return from_json(_read_json(path), path.parent)


def from_json(tokenizer: dict[str, Any], folder: Path) -> LoadedTokenizer:
    """The JSON with what the files beside it add.

    Raises:
        EncoderError: One of them cannot be read.
        UnsupportedModelError: It is of no tokenizer.
    """
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
    tokenizer = {name: value for name, value in tokenizer.items() if name not in _RUN_STATE}
    tokenizer["added_tokens"] = _added(tokenizer, config, set(filter(None, named.values())))
    known = token_ids(tokenizer)
    special = {role: token for role, token in named.items() if token in known}
    lost = [f"{role} {token!r} is not in the vocabulary and not used" for role, token in named.items()
            if token and token not in known]  # fmt: skip
    return LoadedTokenizer(
        json=tokenizer, config=config, special=special, chat_template=_template(folder, config), notes=tuple(lost)
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
    return _chosen(config.get("chat_template"))


def _chosen(template: Any) -> str:
    """Of several named templates, ``default``."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else ""


def from_loaded(tokenizer: Any) -> LoadedTokenizer:
    """A tokenizer of ``transformers`` or ``tokenizers`` that is loaded already, as it is now.

    Args:
        tokenizer: With ``backend_tokenizer``, or with ``to_str`` itself.

    Raises:
        UnsupportedModelError: It has neither: one in Python alone cannot be written as JSON.
    """
    engine = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not hasattr(engine, "to_str"):
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} cannot be written as {JSON_NAME}",
            why="only what has a fast form can be compared",
            fix="give the tokenizer's folder, or a tokenizer with is_fast",
        )
    found: dict[str, Any] = json.loads(engine.to_str())
    known = token_ids(found)
    named = {role: str(token) for role, token in getattr(tokenizer, "special_tokens_map", {}).items()}
    special = {role: token for role, token in named.items() if role in _ROLES and token in known}
    found = {name: value for name, value in found.items() if name not in _RUN_STATE}
    found["added_tokens"] = _added(found, {}, set(special.values()))
    template = getattr(tokenizer, "chat_template", None)
    return LoadedTokenizer(json=found, config={}, special=special, chat_template=_chosen(template))


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
