"""Rows of tokens as they are trained: text, loss, special tokens, document borders, lengths, efficiency."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.errors import LatentcacheError, PlanError
from latentcache.fields.registry import load
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED
from latentcache.plan.documents import loss_spans
from latentcache.plan.rows import plan_rows
from latentcache.store.snapshot import FieldRows
from latentcache.verify.findings import shown_text

if TYPE_CHECKING:
    from latentcache.loader.cache import Cache
    from latentcache.loader.rows import Rows

#: Rows that are decoded, tokens of each that are shown, bars of a histogram, lengths that are compared.
_ROWS, _SHOWN, _BARS = 12, 1200, 28
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: The length of rows if none is given is at most this.
_DEFAULT = 4096
Segment = Mapping[str, Any]
"""``text``, and ``loss``, ``special``: True or False; ``document``: its number in the row, from 1; 0: padding."""


def token_facts(cache: Cache, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of each field of documents.

    ``layout``: arguments of ``cache.rows``; empty: padded to the power of two that holds the longest document.
    """
    (snapshot,) = cache.snapshots
    names = [name for name, rows in snapshot.fields.items() if rows.spec.collate == "pack" and len(rows)]
    return [_of_field(cache, snapshot.fields[name], layout) for name in names]


def _of_field(cache: Cache, held: FieldRows, layout: Mapping[str, Any]) -> dict[str, Any]:
    documents = cache.documents(held.name)
    decode, why = text_decoder(held)
    rows, note = rows_of(cache, held.name, documents, layout)
    facts = {
        "field": held.name,
        "documents": len(documents),
        "tokens": documents.tokens,
        "learned": int(np.asarray(documents.spans)[:, 1].sum(dtype=np.int64)),
        "shortest": int(documents.lengths.min()),
        "longest": int(documents.lengths.max()),
        "median": int(np.median(documents.lengths)),
        "histogram": histogram(documents.lengths),
        "efficiency": _efficiency(documents),
        "decoded": decode is not None,
        "undecoded": why,
        "note": note,
    }
    return facts | (row_facts(rows, decode) if rows is not None else {"rows": []})


def rows_of(cache: Cache, field: str, documents: Documents, layout: Mapping[str, Any]) -> tuple[Rows | None, str]:
    """The rows of a layout, and a sentence on how they are made; None if no row can be made."""
    longest = int(documents.lengths.max())
    options, note = dict(layout), ""
    if not options:
        length = min(1 << max(longest - 1, 1).bit_length(), _DEFAULT)
        options = {"pad": length, "overflow": "truncate_right"}
        note = f"one document a row of {length} tokens; --pack, --pad or --chunk show your layout"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return cache.rows(**options, field=field), note
    except PlanError as error:
        return None, f"{error.what}: {error.fix}"


def row_facts(rows: Rows, decode: Callable[[Sequence[int]], Any] | None) -> dict[str, Any]:
    """Some decoded rows: the first, and those with the least and the most learned tokens."""
    dropped = {reason: tokens for reason, tokens in rows.tokens_dropped.items() if tokens}
    (part,) = rows.parts
    learned = loss_spans(part.documents.corpus, part.plan).learned()
    order = np.argsort(learned, kind="stable").tolist()
    chosen = list(dict.fromkeys([*range(min(6, len(rows))), *order[:3], *order[-3:]]))[:_ROWS]
    return {
        "kind": rows.settings.kind,
        "length": rows.length,
        "count": len(rows),
        "packing_efficiency": rows.packing_efficiency,
        "dropped": dropped,
        "truncated": len({name for reason, name, _ in rows.dropped if reason == "truncated"}),
        "rows": [_row(rows, row, decode) for row in chosen],
    }


def _row(rows: Rows, row: int, decode: Callable[[Sequence[int]], Any] | None) -> dict[str, Any]:
    try:
        batch = rows.batch([row])
    except LatentcacheError as error:
        return {"row": row, "name": shown_text(rows.where(row)), "error": error.what, "segments": []}
    ids, labels = (batch[name][0].numpy() for name in (rows.settings.field, "labels"))
    document, left_out = _owners(rows, row)
    return {
        "row": row,
        "name": shown_text(rows.where(row)),
        "tokens": int(rows.row_lengths[row]),
        "learned": int((labels != IGNORED).sum()),
        "documents": int(document.max(initial=0)),
        "padding": int((document == 0).sum()),
        "left_out": left_out,
        "not_shown": max(len(ids) - _SHOWN, 0),
        "segments": segments(ids[:_SHOWN], labels[:_SHOWN] != IGNORED, document[:_SHOWN], decode),
    }


def _owners(rows: Rows, row: int) -> tuple[Any, int]:
    """(L,) the document of each place, from 1; 0: padding. And the tokens of these documents outside the row."""
    (part,) = rows.parts
    pieces = part.plan.pieces(row)
    lengths = part.plan.length[pieces.start : pieces.stop].astype(np.int64)
    owner, total = np.zeros(rows.length, dtype=np.int64), int(lengths.sum())
    owner[:total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    documents = np.unique(part.plan.document[pieces.start : pieces.stop])
    return owner, int(part.documents.lengths[documents].sum()) - total


def segments(ids: Any, loss: Any, document: Any, decode: Callable[[Sequence[int]], Any] | None) -> list[Segment]:
    """Runs of ids of one document that all carry loss or all carry none, as text; padding is one segment."""
    changes = np.flatnonzero((np.diff(document) != 0) | (np.diff(loss.astype(np.int8)) != 0)) + 1
    runs = list[Segment]()
    for begin, end in pairwise([0, *changes.tolist(), len(ids)]):
        owner, has_loss = int(document[begin]), bool(loss[begin])
        if begin == end:
            continue
        if not owner:
            runs.append({"text": f"{end - begin} x padding", "loss": False, "special": True, "document": 0})
            continue
        some = ids[begin:end].tolist()
        pieces = [(" ".join(map(str, some)), False)] if decode is None else decode(some)
        runs += [
            {"text": shown_text(text), "loss": has_loss, "special": special, "document": owner}
            for text, special in pieces
        ]
    return runs


def text_decoder(held: FieldRows) -> tuple[Callable[[Sequence[int]], Any] | None, str]:
    """What decodes the ids of a field, or None and why not."""
    if held.kind is None or held.recipe is None or not held.kind.decoder:
        return None, "no decoder is known for this field, so ids are shown"
    try:
        decode: Callable[[Sequence[int]], Any] = load(held.kind.decoder)(held.recipe, held.provenance)
    except LatentcacheError as error:
        return None, f"ids are shown: {error.what}"
    return decode, ""


def histogram(lengths: Any) -> list[dict[str, int]]:
    """Documents by length, in bars of equal width."""
    longest = int(lengths.max())
    width = max(-(-longest // _BARS), 1)
    counts = np.bincount((np.asarray(lengths) - 1).clip(min=0) // width)
    return [
        {"from": number * width + 1, "to": (number + 1) * width, "count": count}
        for number, count in enumerate(counts.tolist())
    ]


def _efficiency(documents: Documents) -> list[dict[str, Any]]:
    """Part of a row that holds tokens, of padded and of packed rows of several lengths."""
    longest, facts = int(documents.lengths.max()), []
    for length in _LENGTHS:
        parts = {}
        for kind in ("pad", "pack"):
            plan = plan_rows(documents.corpus, kind=kind, length=length, overflow="truncate_right")
            positions = len(plan) * length
            parts[kind] = plan.tokens / positions if positions else 0.0
        over = int((documents.lengths > length).sum())
        facts.append({"length": length, **parts, "longer": over})
        if length >= 2 * longest:
            break
    return facts
