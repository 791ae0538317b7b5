"""``latentcache export``: rows of a token cache as files for trainers that take no loader of ours."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli.console import counted, out, say
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.loader.token_cache import TokenCache
    from latentcache.loader.token_view import TokenView

FORMATS = ("hf-disk",)
VIEWS = ("padded", "packed", "blocks")
_LINE_S = 10.0
#: What to write into a trainer's own settings, where the folder is ``{out}``.
_NEXT = {
    "llama-factory": "tokenized_path: {out}   (streaming: false; with --view packed also neat_packing: true)",
    "trl": "datasets.load_from_disk('{out}')['train'] as train_dataset, skip_prepare_dataset=True",
    "unsloth": "datasets.load_from_disk('{out}')['train'] as train_dataset; do not call train_on_responses_only",
    "axolotl": "datasets: [{{path: {out}, ds_type: arrow, type: }}], skip_prepare_dataset: true",
    "plain": "datasets.load_from_disk('{out}')['train'].with_format('torch')",
}


def export(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache of tokens.", readable=False)],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", readable=False)],
    *,
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="hf-disk: datasets.load_from_disk.")] = "hf-disk",
    length: Annotated[int, typer.Option("--length", metavar="N", min=1, help="Tokens in every row.")],
    view: Annotated[str, typer.Option("--view", metavar="KIND", help="padded|packed|blocks")] = "padded",
    trainer: Annotated[
        str, typer.Option("--for", metavar="TRAINER", help="plain|llama-factory|trl|unsloth|axolotl")
    ] = "plain",
    overflow: Annotated[
        str | None,
        typer.Option(
            "--overflow",
            metavar="POLICY",
            help="Documents longer than a row: error|drop|truncate_right|truncate_left|split.",
            show_default=False,
        ),
    ] = None,
    padding_side: Annotated[str, typer.Option("--padding-side", metavar="SIDE", help="right|left")] = "right",
    validation: Annotated[
        float,
        typer.Option("--validation", metavar="SHARE", min=0, max=0.99, help="Part of the documents for validation."),
    ] = 0.0,
    as_json: flags.Json = False,
) -> int:
    """Rows of a token cache, all of one length, in a form that trainers read."""
    _check(to, view)
    from latentcache.interop.hf_disk import HfDiskSettings, export_hf_disk
    from latentcache.loader.token_opening import open_tokens

    tokens = open_tokens(cache)
    parts = _parts(tokens, validation)
    splits = {name: _view(part, view, length, overflow, padding_side) for name, part in parts.items()}
    facts = _facts(tokens, cache, target, splits)
    facts |= {"view": view, "max_length": length, "overflow": overflow}
    facts |= {"padding_side": padding_side, "validation": validation}
    left = padding_side == "left" and view == "padded"
    settings = HfDiskSettings(out=target, trainer=trainer, view=view, left_padded=left, facts=facts)
    rows = export_hf_disk(splits, settings, _Talk(quiet=as_json).advanced)
    fill = {name: part.fill for name, part in splits.items()}
    payload = {"cache": str(cache), "out": str(target), "format": to, "for": trainer, "rows": rows, "fill": fill}
    payload |= {name: facts[name] for name in ("view", "max_length", "tokens", "tokens_left")}
    if as_json:
        console.emit("export", payload, exit_code=0)
    else:
        _show(payload)
    return 0


def _facts(tokens: TokenCache, cache: Path, target: Path, splits: Mapping[str, TokenView]) -> dict[str, Any]:
    """What an exported folder says of the cache that its rows were made from."""
    return {
        "cache": str(cache.resolve()),
        "cache_from_here": os.path.relpath(cache.resolve(), target.resolve()),
        "generation": tokens.generation,
        "documents": len(tokens),
        "fingerprint": tokens.fingerprint,
        "recipe_id": tokens.recipe.recipe_id.hex(),
        "recipe": tokens.recipe.as_json(),
        "tokens": {name: rows.tokens for name, rows in splits.items()},
        "tokens_left": {name: dict(rows.tokens_left) for name, rows in splits.items()},
    }


class _Talk:
    """A line every ten seconds."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._started, self._shown = quiet, time.monotonic(), time.monotonic()

    def advanced(self, done: int, total: int) -> None:
        """How far it is."""
        now = time.monotonic()
        if self._quiet or now - self._shown < (1.0 if sys.stderr.isatty() else _LINE_S):
            return
        self._shown = now
        rate = done / (now - self._started)
        say(f"{done} of {total} rows, {rate:.0f} rows/s, {(total - done) / rate:.0f} s left")


def _check(to: str, view: str) -> None:
    if to not in FORMATS:
        raise UsageError(f"--to {to!r} is not known", fix=f"--to {'|'.join(FORMATS)}")
    if view not in VIEWS:
        raise UsageError(f"--view {view!r} is not known", fix=f"--view {'|'.join(VIEWS)}")
    if find_spec("pyarrow") is None:
        raise UsageError(
            f"--to {to} needs pyarrow", why="it is not installed", fix="python -m pip install 'latentcache[hf]'"
        )


def _parts(tokens: TokenCache, validation: float) -> dict[str, TokenCache]:
    """Split -> its documents."""
    if not validation:
        return {"train": tokens}
    train, held = tokens.split(validation)
    return {"train": train, "validation": held}


def _view(tokens: TokenCache, view: str, length: int, overflow: Any, side: Any) -> TokenView:
    if view == "padded":
        return tokens.padded(length, padding_side=side, overflow=overflow)
    if side != "right":
        raise UsageError(f"--padding-side {side} with --view {view}", fix="leave it out: full rows have no side")
    if view == "packed":
        return tokens.packed(length, overflow=overflow)
    if overflow is not None:
        raise UsageError(f"--overflow {overflow} with --view blocks", fix="leave it out: blocks cut documents anyway")
    return tokens.blocks(length)


def _show(payload: dict[str, Any]) -> None:
    """The text form."""
    for split, rows in payload["rows"].items():
        about = f"{payload['tokens'][split]} tokens, {payload['fill'][split]:.1%} full"
        out(f"{split}: {counted(rows, 'row')} of {payload['max_length']} tokens ({about})")
        for reason, tokens in payload["tokens_left"][split].items():
            if tokens:
                out(f"  left out: {tokens} tokens ({reason.replace('_', ' ')})")
    out(f"{payload['out']} is complete. Next: {_NEXT[payload['for']].format(out=shlex.quote(payload['out']))}")
