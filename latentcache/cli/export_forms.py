"""What each format of ``latentcache export`` takes, makes and says."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.loader.token_cache import TokenCache
    from latentcache.loader.token_view import TokenView

#: Format -> the flags it takes beside ``--to``, and where rows have a view the one that is not asked for.
TAKEN: Mapping[str, tuple[str, ...]] = {
    "hf-disk": ("length", "view", "for", "overflow", "padding-side", "validation"),
    "megatron": ("validation",),
    "datatrove": ("validation",),
    "mds": ("length", "view", "overflow", "validation"),
}
USUAL_VIEW = {"hf-disk": "padded", "mds": "blocks"}
VIEWS = ("padded", "packed", "blocks")
_WHOLE = "its documents go out whole, and the trainer cuts rows of its own"

Advanced = Callable[[int, int], None]
Payload = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The command line; None where nothing was said."""

    cache: Path
    target: Path
    to: str
    length: int | None
    view: str | None
    trainer: str | None
    overflow: str | None
    padding_side: str | None
    validation: float

    def flags(self) -> dict[str, Any]:
        """Flag -> what was said."""
        names = {"for": "trainer", "padding-side": "padding_side"}
        flags = ("length", "view", "for", "overflow", "padding-side")
        return {flag: getattr(self, names.get(flag, flag)) for flag in flags}


def check(asked: Asked) -> None:
    """Refuse what cannot be before anything is opened.

    Raises:
        UsageError: As said.
    """
    if asked.to not in TAKEN:
        raise UsageError(f"--to {asked.to!r} is not known", fix=f"--to {'|'.join(TAKEN)}")
    for flag, value in asked.flags().items():
        if value is not None and flag not in TAKEN[asked.to]:
            why = "it has no columns and no filling" if asked.to == "mds" else _WHOLE
            raise UsageError(f"--{flag} with --to {asked.to}", why=why, fix=f"leave --{flag} out")
    if "length" in TAKEN[asked.to] and asked.length is None:
        raise UsageError(f"--to {asked.to} without --length", why="it holds rows of one length", fix="--length N")
    if asked.view not in (None, *VIEWS):
        raise UsageError(f"--view {asked.view!r} is not known", fix=f"--view {'|'.join(VIEWS)}")
    if asked.to == "hf-disk" and find_spec("pyarrow") is None:
        raise UsageError(
            "--to hf-disk needs pyarrow", why="it is not installed", fix="python -m pip install 'latentcache[hf]'"
        )


def made(asked: Asked, advanced: Advanced) -> Payload:
    """Write the folder, and give what of the payload the format decides. Errors as those of each format."""
    from latentcache.loader.token_opening import open_tokens

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* holds share ")  # the command says so in its own words
        tokens = open_tokens(asked.cache)
    parts = {"train": tokens}
    if asked.validation:
        parts = dict(zip(("train", "validation"), tokens.split(asked.validation), strict=True))
    facts, share = _facts(tokens, asked), {"share": tokens.share}
    if asked.to == "hf-disk":
        return share | _hf_disk(asked, parts, facts, advanced)
    if asked.to == "mds":
        return share | _mds(asked, parts, facts, advanced)
    return share | _documents(asked, parts, facts, advanced)


def _hf_disk(asked: Asked, parts: Mapping[str, TokenCache], facts: Payload, advanced: Advanced) -> Payload:
    from latentcache.interop.hf_disk import HfDiskSettings, export_hf_disk

    side, trainer = asked.padding_side or "right", asked.trainer or "plain"
    view = asked.view or USUAL_VIEW["hf-disk"]
    splits = {name: _view(part, view, asked, side) for name, part in parts.items()}
    said = _said(splits, view, asked)
    facts = {**facts, **said, "overflow": asked.overflow, "padding_side": side}
    left = side == "left" and view == "padded"
    settings = HfDiskSettings(out=asked.target, trainer=trainer, view=view, left_padded=left, facts=facts)
    rows = export_hf_disk(splits, settings, advanced)
    return {"for": trainer, "rows": rows, "fill": {name: part.fill for name, part in splits.items()}, **said}


def _mds(asked: Asked, parts: Mapping[str, TokenCache], facts: Payload, advanced: Advanced) -> Payload:
    from latentcache.interop.documents import refuse_masked
    from latentcache.interop.mds import DTYPES, MdsSettings, check_view, export_mds

    view, recipe = asked.view or USUAL_VIEW["mds"], parts["train"].recipe
    check_view(view)
    for part in parts.values():
        refuse_masked(part, "mds")
    # A short row at the end would be filled up by a collator that has to know a padding token.
    splits = {name: _view(part, view, asked, "right", tail="drop") for name, part in parts.items()}
    said = _said(splits, view, asked)
    facts = {**facts, **said, "overflow": asked.overflow}
    settings = MdsSettings(out=asked.target, view=view, dtype=recipe.dtype, num_ids=recipe.num_ids, facts=facts)
    return {"rows": export_mds(splits, settings, advanced), "dtype": DTYPES[recipe.dtype], **said}


def _documents(asked: Asked, parts: Mapping[str, TokenCache], facts: Payload, advanced: Advanced) -> Payload:
    from latentcache.interop.datatrove import DATATROVE
    from latentcache.interop.documents import counts, export_documents
    from latentcache.interop.megatron import MEGATRON

    form = {"megatron": MEGATRON, "datatrove": DATATROVE}[asked.to]
    return counts(export_documents(parts, form, asked.target, facts, advanced))


def _said(splits: Mapping[str, TokenView], view: str, asked: Asked) -> dict[str, Any]:
    """What facts and payload both say of rows."""
    return {
        "view": view,
        "max_length": asked.length,
        "tokens": {name: rows.tokens for name, rows in splits.items()},
        "tokens_left": {name: dict(rows.tokens_left) for name, rows in splits.items()},
    }


def _facts(tokens: TokenCache, asked: Asked) -> dict[str, Any]:
    """What an exported folder says of the cache that it was made from."""
    cache = asked.cache.resolve()
    return {
        "cache": str(cache),
        "cache_from_here": os.path.relpath(cache, asked.target.resolve()),
        "generation": tokens.generation,
        "documents": len(tokens),
        "share": tokens.share,
        "fingerprint": tokens.fingerprint,
        "recipe_id": tokens.recipe.recipe_id.hex(),
        "recipe": tokens.recipe.as_json(),
        "tokenizer": _tokenizer(tokens),
        "validation": asked.validation,
    }


def _tokenizer(tokens: TokenCache) -> str:
    """What the build was told."""
    from latentcache.store.token_reader import TokenReader

    manifest = tokens.store.generation.manifest if isinstance(tokens.store, TokenReader) else {}
    return str(manifest.get("provenance", {}).get("tokenizer", ""))


def _view(tokens: TokenCache, view: str, asked: Asked, side: Any, tail: Any = "keep") -> TokenView:
    length, overflow = asked.length or 0, asked.overflow
    if view == "padded":
        return tokens.padded(length, padding_side=side, overflow=overflow)  # type: ignore[arg-type]
    if side != "right":
        raise UsageError(f"--padding-side {side} with --view {view}", fix="leave it out: full rows have no side")
    if view == "packed":
        return tokens.packed(length, overflow=overflow)  # type: ignore[arg-type]
    if overflow is not None:
        raise UsageError(f"--overflow {overflow} with --view blocks", fix="leave it out: blocks cut documents anyway")
    return tokens.blocks(length, tail=tail)
