"""``latentcache export``: a token cache as files for trainers that take no loader of ours."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from latentcache.cli import console, export_forms, flags
from latentcache.cli.console import counted, out, say

_LINE_S = 10.0
#: What to write into a trainer's own settings, where the folder is ``{out}``, ``{python}`` in Python, and an id has
#: ``{width}`` bytes.
_NEXT = {
    "llama-factory": "tokenized_path: {out}   (streaming: false; with --view packed also neat_packing: true)",
    "trl": "datasets.load_from_disk({python})['train'] as train_dataset, skip_prepare_dataset=True",
    "unsloth": "datasets.load_from_disk({python})['train'] as train_dataset; do not call train_on_responses_only",
    "axolotl": "datasets: [{{path: {out}, ds_type: arrow, type: }}], skip_prepare_dataset: true",
    "plain": "datasets.load_from_disk({python})['train'].with_format('torch')",
    "megatron": "--train-data-path {out}/train   (or --data-path {out}/train --split 100,0,0)",
    "datatrove": "DatatroveFolderDataset({train}, seq_len=N, token_size={width})",
    "mds": "train_loader.dataset: {{local: {out}, split: train, max_seq_len: {max_length}}}",
}


Cache = Annotated[Path, typer.Argument(metavar="CACHE", help="A cache of tokens.", readable=False)]
Target = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to make.", readable=False)]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        help="hf-disk: datasets.load_from_disk. megatron: .bin, .idx. datatrove: .ds. mds: for llm-foundry.",
    ),
]
Length = Annotated[
    int | None,
    typer.Option("--length", metavar="N", min=1, help="Tokens in every row (hf-disk, mds).", show_default=False),
]
View = Annotated[
    str | None,
    typer.Option(
        "--view",
        metavar="KIND",
        help="padded (default)|packed|blocks; of mds blocks (default)|padded.",
        show_default=False,
    ),
]
Trainer = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="TRAINER",
        help="plain (default)|llama-factory|trl|unsloth|axolotl (hf-disk).",
        show_default=False,
    ),
]
Overflow = Annotated[
    str | None,
    typer.Option(
        "--overflow",
        metavar="POLICY",
        help="Documents longer than a row: error|drop|truncate_right|truncate_left|split.",
        show_default=False,
    ),
]
PaddingSide = Annotated[
    str | None,
    typer.Option("--padding-side", metavar="SIDE", help="right (default)|left (hf-disk).", show_default=False),
]
Validation = Annotated[
    float,
    typer.Option("--validation", metavar="SHARE", min=0, max=0.99, help="Part of the documents for validation."),
]


def export(
    cache: Cache,
    target: Target,
    *,
    to: To = "hf-disk",
    length: Length = None,
    view: View = None,
    trainer: Trainer = None,
    overflow: Overflow = None,
    padding_side: PaddingSide = None,
    validation: Validation = 0.0,
    as_json: flags.Json = False,
) -> int:
    """A token cache as files that trainers read: rows of one length, or whole documents."""
    asked = export_forms.Asked(
        cache=cache,
        target=target,
        to=to,
        length=length,
        view=view,
        trainer=trainer,
        overflow=overflow,
        padding_side=padding_side,
        validation=validation,
    )
    export_forms.check(asked)
    talk = _Talk("rows" if "length" in export_forms.TAKEN[to] else "documents", quiet=as_json)
    payload = {"cache": str(cache), "out": str(target), "format": to, **export_forms.made(asked, talk.advanced)}
    if as_json:
        console.emit("export", payload, exit_code=0)
    else:
        _show(payload)
    return 0


class _Talk:
    """A line every ten seconds."""

    def __init__(self, what: str, *, quiet: bool) -> None:
        self._what, self._quiet, self._started, self._shown = what, quiet, time.monotonic(), time.monotonic()

    def advanced(self, done: int, total: int) -> None:
        """How far it is."""
        now = time.monotonic()
        if self._quiet or now - self._shown < (1.0 if sys.stderr.isatty() else _LINE_S):
            return
        self._shown = now
        rate = done / (now - self._started)
        say(f"{done} of {total} {self._what}, {rate:.0f} {self._what}/s, {(total - done) / rate:.0f} s left")


def _show(payload: dict[str, Any]) -> None:
    """The text form."""
    for split, number in payload.get("rows", {}).items():
        out(f"{split}: {counted(number, 'row')} of {_row(payload)} ({_about(payload, split)})")
        for reason, tokens in payload["tokens_left"][split].items():
            if tokens:
                out(f"  left out: {tokens} tokens ({reason.replace('_', ' ')})")
    for split, number in payload.get("splits", {}).items():
        out(f"{split}: {counted(number, 'document')}, {payload['tokens'][split]} tokens as {payload['dtype']}")
    if payload["share"]:
        out(f"these are share {payload['share']} of the records: build the whole with --take-from, and export that")
    if "last_id" in payload:
        last = payload["last_id"]
        out("they end with different ids: none marks an end" if last is None else f"each of them ends with id {last}")
    values = {"out": shlex.quote(payload["out"]), "max_length": payload.get("max_length")}
    values |= {"python": repr(payload["out"]), "train": repr(f"{payload['out']}/train")}
    values["width"] = 2 if payload.get("dtype") == "uint16" else 4
    after = _NEXT[payload.get("for", payload["format"])].format(**values)
    out(f"{payload['out']} is complete. Next: {after}")


def _row(payload: dict[str, Any]) -> str:
    most = "up to " if payload["format"] == "mds" and payload["view"] == "padded" else ""
    return f"{most}{payload['max_length']} tokens"


def _about(payload: dict[str, Any], split: str) -> str:
    tokens = f"{payload['tokens'][split]} tokens"
    return f"{tokens} as {payload['dtype']}" if "dtype" in payload else f"{tokens}, {payload['fill'][split]:.1%} full"
