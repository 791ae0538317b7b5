"""A tokenizer as plain data, and what of it moves ids: its parts and its template, each hashed by itself.

Not part of it: truncation and padding (set at run time by whoever used it last), the decoder, and spelling. Spelling
is the order of vocabulary and of added tokens, merges as pairs or with a blank between, settings that are off or left
out, and a post-processor that adds nothing. So are digits of scores beyond float32, which the library itself does not
keep. No tokenizer library is imported and no network is asked. Cost: 0.5 s of CPU for 128 000 entries.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from latentcache.errors import (
    EncoderError,
    ModelNotFoundError,
    UnsupportedModelError,
    UsageError,
    option,
)
from latentcache.identity.content import content_hash, json_hash
from latentcache.value import Value

JSON_NAME = "tokenizer.json"
_RUN_STATE = ("truncation", "padding")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
#: What a template asks for the day by; also the name of the option that gives it, as ``2024-07-26``.
CLOCK = "strftime_now"
_FORMATS = re.compile(rf"{CLOCK}\(\s*(['\"])(.*?)\1\s*\)")
_MODEL_TABLES = ("vocab", "merges")
_STAGES = ("normalizer", "pre_tokenizer", "post_processor")
_ADDED_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


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


def read_tokenizer(path: Path) -> LoadedTokenizer:
    """A tokenizer by its ``tokenizer.json`` or the folder of one; raises EncoderError.

    What ``tokenizer_config.json``, ``special_tokens_map.json`` and ``chat_template.jinja`` beside it add is added.
    """
    folder, file = (path, path / JSON_NAME) if path.is_dir() else (path.parent, path)
    if path.is_dir() and not file.is_file():
        save = f"AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')"
        raise UnsupportedModelError(
            f"{path} has no {JSON_NAME}",
            where=str(path),
            why="only a fast tokenizer gives places in the text",
            fix=f'python -c "from transformers import AutoTokenizer; {save}"',
        )
    if file.suffix != ".json":
        raise UnsupportedModelError(
            f"{path.name} is no {JSON_NAME}",
            where=str(path),
            why="a SentencePiece or tiktoken file alone does not say which tokens are special",
            fix=f"give its folder: {option('tokenizer', path.parent)}",
        )
    tokenizer = _read_json(file)
    if not isinstance(tokenizer.get("model"), dict):
        raise UnsupportedModelError(
            "this JSON is of no tokenizer",
            where=str(folder),
            why="it has no model",
            fix="give the tokenizer's folder",
        )
    files = [folder / name for name in ("special_tokens_map.json", "tokenizer_config.json")]
    added, config = (_read_json(path) if path.is_file() else {} for path in files)
    roles = {**added, **config}
    named = {role: text for role in _ROLES if (text := _content(roles.get(role)))}
    template = _chosen(config.get("chat_template"))
    if (folder / "chat_template.jinja").is_file():
        template = read_template(folder / "chat_template.jinja")
    return _loaded(tokenizer, config, named, template)


def _loaded(
    tokenizer: Mapping[str, Any], config: Mapping[str, Any], named: Mapping[str, str], template: str
) -> LoadedTokenizer:
    """A tokenizer without what a run left there; tokens that only the configuration knows are added."""
    plain = {name: value for name, value in tokenizer.items() if name not in _RUN_STATE}
    plain["added_tokens"] = _added(plain, config, set(named.values()))
    known = token_ids(plain)
    special = {role: token for role, token in named.items() if token in known}
    lost = [role for role in named if role not in special]
    notes = tuple(f"{role} {named[role]!r} is not in the vocabulary and not used" for role in lost)
    return LoadedTokenizer(json=plain, config=dict(config), special=special, chat_template=template, notes=notes)


def _added(tokenizer: Mapping[str, Any], config: Mapping[str, Any], roles: set[str]) -> list[dict[str, Any]]:
    """Added tokens by id, of JSON and configuration; one with a role is special, as transformers makes it."""
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
    order = [added[number] for number in sorted(added)]
    return [{name: entry.get(name, False) for name in ("id", *_ADDED_FIELDS)} for entry in order]


def _chosen(template: Any) -> str:
    """Choose ``default`` among several named templates."""
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    return template if isinstance(template, str) else ""


def token_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token -> id, of the vocabulary and of added tokens."""
    vocab = tokenizer["model"].get("vocab") or {}
    if isinstance(vocab, list):
        vocab = {piece: number for number, (piece, _) in enumerate(vocab)}
    return {**vocab, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}}


def read_template(path: Path) -> str:
    """A chat template given as a file; ModelNotFoundError if it is not there or not UTF-8."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelNotFoundError(
            f"the chat template cannot be read: {path}",
            where=str(path),
            why=str(error),
            fix="give another one with --chat-template=FILE",
        ) from error


def _content(token: Any) -> str:
    """The text of a special token, given as text or as an object."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else ""


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("it is no object")
    except OSError as error:
        problem = f"{path.name} cannot be read"
        raise EncoderError(problem, where=str(path), why=str(error), fix=f"ls -l {path}") from error
    except (ValueError, RecursionError) as error:
        problem = f"{path.name} is no JSON object"
        raise UnsupportedModelError(problem, where=str(path), why=str(error), fix="download it again") from error
    return value


def tokenizer_parts(tokenizer: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, str]:
    """Part -> hex hash, of the vocabulary, the merges, other settings, each stage, added and special tokens."""
    model = tokenizer.get("model") or {}
    settings = {
        name: value
        for name, value in model.items()
        if name not in _MODEL_TABLES and value is not None and value is not False and value != ""
    }
    added = sorted(tokenizer.get("added_tokens") or (), key=lambda token: int(token["id"]))
    parts = {
        "vocab": model.get("vocab") or [],
        "merges": [
            merge.split(" ", 1) if isinstance(merge, str) else list(merge) for merge in model.get("merges") or ()
        ],
        "model": settings,
        **{stage: _stage(tokenizer.get(stage)) for stage in _STAGES},
        "added_tokens": [[token["id"], *(token.get(name, False) for name in _ADDED_FIELDS)] for token in added],
        "special_tokens": dict(special),
    }
    return {name: json_hash(_without_floats(value)).hex() for name, value in parts.items()}


def tokenizer_fingerprint(parts: Mapping[str, str]) -> str:
    """One hex hash over all parts."""
    return json_hash(dict(parts)).hex()


def _stage(value: Any) -> Any:
    """A stage; a template that adds nothing to a text, as transformers puts in the place of none, is none."""
    is_template = isinstance(value, Mapping) and value.get("type") == "TemplateProcessing"
    return None if is_template and [list(part) for part in value.get("single") or ()] == [["Sequence"]] else value


def _without_floats(value: Any) -> Any:
    """The value with floats as text, to float32: their last decimal digits depend on the writer."""
    if isinstance(value, float):
        return ctypes.c_float(value).value.hex()
    if isinstance(value, Mapping):
        return {name: _without_floats(child) for name, child in value.items()}
    return [_without_floats(child) for child in value] if isinstance(value, list | tuple) else value


def pin_clock(template: str, options: Mapping[str, str]) -> str:
    """A template that asks for the day gets that of its options (name -> JSON): each day would give other ids."""
    if CLOCK not in template or CLOCK not in options:
        return template
    day = date.fromisoformat(json.loads(options[CLOCK]))
    formats = dict.fromkeys(spelled for _, spelled in _FORMATS.findall(template))
    if not formats:
        raise UsageError(
            "the chat template asks for the time, and the format is not written in it",
            why=f"expected {CLOCK} with a format between quotes",
            fix="write the date into the template and give it with --chat-template=FILE",
        )
    answers = "".join(
        f"{{%- if format == {json.dumps(form)} -%}}{day.strftime(form)}{{%- endif -%}}" for form in formats
    )
    # A macro of this name comes before the global one.
    return f"{{%- macro {CLOCK}(format) -%}}{answers}{{%- endmacro -%}}{template}"


def template_hash(template: str) -> str:
    """Hex hash of a template as a recipe has it; empty without a template."""
    return content_hash(template.encode()).hex() if template else ""
