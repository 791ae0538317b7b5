"""One sample of a cache, and rows of tokens as they are trained: values, text, loss, special tokens, documents."""

from __future__ import annotations

import difflib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.errors import LatentcacheError, PlanError, UsageError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.fields.dtypes import FLOATS, as_floats
from latentcache.fields.registry import load
from latentcache.loader.documents import Documents
from latentcache.loader.formats import IGNORED
from latentcache.plan.documents import loss_spans, plan_rows
from latentcache.report.figures import crops_of
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value
from latentcache.verify.findings import path_json

if TYPE_CHECKING:
    from latentcache.loader.cache import Cache
    from latentcache.loader.rows import Rows

#: Tokens of a document and of a row that are decoded, bars of a histogram, row lengths that are compared.
_TOKENS, _ROW_TOKENS, _BARS = 4000, 1200, 28
_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
#: The length of rows if none is given is at most this.
_DEFAULT = 4096
Segment = Mapping[str, Any]
"""``text``, and ``loss``, ``special``: True or False; ``document``: its number in the row, from 1; 0: padding."""
Decoder = Callable[[Sequence[int]], Any]


class Sample(Value, eq=False):
    """One sample of a cache. ``repr`` and notebooks show it; :attr:`facts` has the same as JSON values."""

    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        return "\n".join(sample_lines(self.facts))

    def _repr_html_(self) -> str:
        return str(load("latentcache.report.page:fragment")("sample", self.facts))


def sample_of(snapshot: Snapshot, row: int) -> Sample:
    """Describe a sample by its row, from 0; its items are read and proven."""
    samples = snapshot.samples
    files = {role: int(part.file[row]) for role, part in samples.inputs.items()}
    facts: dict[str, Any] = {
        "row": row,
        **path_json(samples.names[row]),
        "files": {
            role: path_json(samples.files.names[number])["path"] for role, number in files.items() if number >= 0
        },
        "repeats": int(samples.columns["repeats"][row]) if "repeats" in samples.columns else 1,
    }
    caption = samples.inputs.get("caption")
    if caption is not None and caption.text is not None:
        facts["captions"] = [path_json(text)["path"] for text in caption.text[row].split(BETWEEN)]
    if "original_size" in samples.columns:
        facts["original_size"] = [int(side) for side in samples.columns["original_size"][row]]
    crops = crops_of(snapshot)
    facts["crops"] = (
        []
        if crops is None
        else [
            {
                "resize": crops.resize[number].tolist(),
                "bucket": crops.bucket[number].tolist(),
                "top_left": crops.corner[number].tolist(),
                "loss": round(float(crops.loss[number]), 4),
            }
            for number in np.flatnonzero(crops.sample == row).tolist()
        ]
    )
    reader = EntryReader(snapshot.paths, snapshot)
    facts["fields"] = {name: _field(rows, row, reader) for name, rows in snapshot.fields.items()}
    reader.close()
    return Sample(facts=facts)


def find_sample(snapshot: Snapshot, name: str) -> int:
    """Find the row of a sample by its name, the end of its name if that is clear, or its number from 0.

    Raises:
        UsageError: There is no such sample, or there are several.
    """
    names = list(snapshot.samples.names)
    cache = str(snapshot.paths.root)
    rows = [row for row, whole in enumerate(names) if whole == name]
    rows = rows or [row for row, whole in enumerate(names) if whole.endswith(f"/{name}")]
    if len(rows) == 1:
        return rows[0]
    if rows:
        shown = ", ".join(names[row] for row in rows[:3])
        raise UsageError(f"{name}: {len(rows)} samples have this name", where=cache, fix=f"use one of {shown}")
    if name.isdecimal() and int(name) < len(names):
        return int(name)
    rejected = next((item for item in snapshot.rejected if item.label == name), None)
    if rejected is not None:
        why = f"the build rejected it [{rejected.reason}]: {rejected.detail}"
        fix = rejected.hint or "repair the file"
        raise UsageError(f"{name} is not in the cache", where=cache, why=why, fix=fix)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
    raise UsageError(f"no sample {name!r}", where=cache, fix=f"use a name such as {', '.join(near)}")


def _field(rows: FieldRows, sample: int, reader: EntryReader) -> dict[str, Any]:
    """The items of a sample in one field, with their checks."""
    facts: dict[str, Any] = {"recipe": rows.recipe_id.hex()[:8], "dtype": rows.spec.dtype, "items": []}
    if rows.kind is not None and rows.recipe is not None:
        facts["about"] = dict(rows.kind.describe(rows.recipe, rows.provenance))
    for row in np.flatnonzero(np.asarray(rows.sample) == sample).tolist():
        try:
            values = reader.read(rows.name, row)
        except LatentcacheError as error:
            facts["items"].append({"check": f"{error.what}: {error.why}"})
            continue
        item: dict[str, Any] = {"shape": list(values.shape), "check": "ok", "variant": int(rows.variant[row])}
        if rows.spec.dtype in FLOATS:
            floats = as_floats(values).astype(np.float64)
            numbers = {"min": floats.min(), "max": floats.max(), "mean": floats.mean(), "std": floats.std()}
            item |= {name: float(f"{number:.4g}") for name, number in numbers.items()} if floats.size else {}
        elif values.size:
            item |= {"min": int(values.min()), "max": int(values.max())}
        if rows.spec.collate == "pack":
            item |= _tokens(rows, row, values)
        facts["items"].append(item)
    return facts


def _tokens(rows: FieldRows, row: int, ids: Any) -> dict[str, Any]:
    """Decoded text of a document, and which tokens carry loss."""
    loss = np.ones(len(ids), dtype=np.bool_)
    if "spans" in rows.ragged_columns:
        ends, spans = rows.ragged_columns["spans"]
        begin = int(ends[row - 1]) if row else 0
        loss[:] = False
        for first, count in np.asarray(spans[begin : int(ends[row])]).tolist():
            loss[first : first + count] = True
    decode, why = text_decoder(rows)
    shown = segments(ids[:_TOKENS], loss[:_TOKENS], np.ones(len(ids[:_TOKENS]), dtype=np.int64), decode)
    return {"tokens": len(ids), "learned": int(loss.sum()), "segments": shown, "undecoded": why}


def sample_lines(facts: Mapping[str, Any]) -> Iterator[str]:
    """A sample as text; tokens with loss are between square marks."""
    yield facts["path"]
    for role, file in facts["files"].items():
        if file != facts["path"]:
            yield f"  {role:9} {file}"
    if "original_size" in facts:
        height, width = facts["original_size"]
        yield f"  size      {width} x {height} pixels"
    for crop in facts["crops"]:
        (tall, wide), (height, width), (top, left) = crop["resize"], crop["bucket"], crop["top_left"]
        cut = f"{crop['loss']:.1%} is cut off"
        yield f"  crop      resized to {wide} x {tall}, {width} x {height} from left {left}, top {top}: {cut}"
    for caption in facts.get("captions", ()):
        yield f"  caption   {caption or '(none)'}"
    if facts["repeats"] != 1:
        yield f"  repeats   {facts['repeats']} per epoch"
    for name, field in facts["fields"].items():
        yield f"{name}  {field['dtype']}, recipe {field['recipe']}"
        yield from (f"  {label:9} {text}" for label, text in field.get("about", {}).items())
        if not field["items"]:
            yield "  values    none: this field has no item of the sample"
        for item in field["items"]:
            yield from _item_lines(item)


def _item_lines(item: Mapping[str, Any]) -> Iterator[str]:
    if "shape" not in item:
        yield f"  values    DAMAGED: {item['check']}"
        return
    shape = " x ".join(map(str, item["shape"]))
    spread = f", mean {item['mean']:g}, std {item['std']:g}" if "mean" in item else ""
    limits = f", {item['min']:g} to {item['max']:g}" if "min" in item else ""
    variant = f", variant {item['variant']}" if item["variant"] else ""
    yield f"  values    {shape}{limits}{spread}{variant}; checksum {item['check']}"
    if "segments" in item:
        yield f"  loss      {item['learned']} of {count_of(item['tokens'], 'tokens')}, marked \u27e6 \u27e7"
        if item["undecoded"]:
            yield f"  note      {item['undecoded']}"
        runs = groupby(item["segments"], key=lambda segment: bool(segment["loss"]))
        texts = [(has_loss, "".join(segment["text"] for segment in run)) for has_loss, run in runs]
        text = "".join(f"\u27e6{text}\u27e7" if has_loss else text for has_loss, text in texts)
        yield from (f"  | {json.dumps(line, ensure_ascii=False)[1:-1]}" for line in text.splitlines())


# rows of tokens


def token_facts(cache: Cache, layout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Facts of each field of documents.

    ``layout``: arguments of ``cache.rows``; empty: padded to the power of two that holds the longest document.
    """
    (snapshot,) = cache.snapshots
    fields = [rows for rows in snapshot.fields.values() if rows.spec.collate == "pack" and len(rows)]
    return [_document_facts(cache, field, layout) for field in fields]


def _document_facts(cache: Cache, field: FieldRows, layout: Mapping[str, Any]) -> dict[str, Any]:
    documents = cache.documents(field.name)
    lengths = np.asarray(documents.lengths)
    decode, why = text_decoder(field)
    rows, note = _rows_of(cache, field.name, int(lengths.max()), layout)
    width = max(-(-int(lengths.max()) // _BARS), 1)
    bars = np.bincount((lengths - 1).clip(min=0) // width).tolist()
    facts = {
        "field": field.name,
        "documents": len(documents),
        "tokens": documents.tokens,
        "learned": int(np.asarray(documents.spans)[:, 1].sum(dtype=np.int64)),
        "shortest": int(lengths.min()),
        "longest": int(lengths.max()),
        "median": int(np.median(lengths)),
        "histogram": [
            {"from": number * width + 1, "to": (number + 1) * width, "count": count}
            for number, count in enumerate(bars)
        ],
        "efficiency": _efficiency(documents),
        "decoded": decode is not None,
        "undecoded": why,
        "note": note,
    }
    return facts | (row_facts(rows, decode) if rows is not None else {"rows": []})


def _rows_of(cache: Cache, field: str, longest: int, layout: Mapping[str, Any]) -> tuple[Rows | None, str]:
    """The rows of a layout, and a sentence on how they are made; None if no row can be made."""
    options = dict(layout)
    note = ""
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


def row_facts(rows: Rows, decode: Decoder | None) -> dict[str, Any]:
    """Up to twelve decoded rows: the first, and those with the least and the most learned tokens."""
    (part,) = rows.parts
    learned = loss_spans(part.documents.corpus, part.plan).learned()
    order = np.argsort(learned, kind="stable").tolist()
    return {
        "kind": rows.settings.kind,
        "length": rows.length,
        "count": len(rows),
        "packing_efficiency": rows.packing_efficiency,
        "dropped": {reason: tokens for reason, tokens in rows.tokens_dropped.items() if tokens},
        "rows": [
            _row(rows, row, decode) for row in dict.fromkeys([*range(min(6, len(rows))), *order[:3], *order[-3:]])
        ],
    }


def _row(rows: Rows, row: int, decode: Decoder | None) -> dict[str, Any]:
    try:
        batch = rows.batch([row])
    except LatentcacheError as error:
        return {"row": row, "name": rows.where(row), "error": error.what, "segments": []}
    ids, labels = (batch[name][0].numpy() for name in (rows.settings.field, "labels"))
    document, left_out = _documents_of(rows, row)
    shown = slice(_ROW_TOKENS)
    return {
        "row": row,
        "name": rows.where(row),
        "tokens": int((document > 0).sum()),
        "learned": int((labels != IGNORED).sum()),
        "documents": int(document.max(initial=0)),
        "padding": int((document == 0).sum()),
        "left_out": left_out,
        "not_shown": max(len(ids) - _ROW_TOKENS, 0),
        "segments": segments(ids[shown], labels[shown] != IGNORED, document[shown], decode),
    }


def _documents_of(rows: Rows, row: int) -> tuple[Any, int]:
    """(L,) the document of each token, from 1, padding 0; and how many tokens of these documents are elsewhere."""
    (part,) = rows.parts
    pieces = part.plan.pieces(row)
    lengths = part.plan.length[pieces.start : pieces.stop].astype(np.int64)
    owner = np.zeros(rows.length, dtype=np.int64)
    total = int(lengths.sum())
    owner[:total] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    documents = np.unique(part.plan.document[pieces.start : pieces.stop])
    return owner, int(part.documents.lengths[documents].sum()) - total


def segments(ids: Any, loss: Any, document: Any, decode: Decoder | None) -> list[Segment]:
    """Split a row into runs of one document that all carry loss or all carry none; padding is one segment."""
    changes = np.flatnonzero((np.diff(document) != 0) | (np.diff(loss.astype(np.int8)) != 0)) + 1
    runs = list[Segment]()
    for begin, end in pairwise([0, *changes.tolist(), len(ids)]):
        if begin == end:
            continue
        owner = int(document[begin])
        has_loss = bool(loss[begin])
        if not owner:
            runs.append({"text": f"{end - begin} x padding", "loss": False, "special": True, "document": 0})
            continue
        run = ids[begin:end].tolist()
        pieces = [(" ".join(map(str, run)), False)] if decode is None else decode(run)
        runs += [{"text": text, "loss": has_loss, "special": special, "document": owner} for text, special in pieces]
    return runs


def text_decoder(rows: FieldRows) -> tuple[Decoder | None, str]:
    """The decoder of a field's ids, or None and why there is none."""
    if rows.kind is None or rows.recipe is None or not rows.kind.decoder:
        return None, "no decoder is known for this field, so ids are shown"
    try:
        decode: Decoder = load(rows.kind.decoder)(rows.recipe, rows.provenance)
    except LatentcacheError as error:
        return None, f"ids are shown: {error.what}"
    return decode, ""


def _efficiency(documents: Documents) -> list[dict[str, Any]]:
    """Compare how full padded and packed rows of several lengths are."""
    facts = list[dict[str, Any]]()
    for length in _LENGTHS:
        fact: dict[str, Any] = {"length": length, "longer": int((documents.lengths > length).sum())}
        for kind in ("pad", "pack"):
            plan = plan_rows(documents.corpus, kind=kind, length=length, overflow="truncate_right")
            fact[kind] = plan.tokens / max(len(plan) * length, 1)
        facts.append(fact)
        if length >= 2 * int(documents.lengths.max()):
            break
    return facts
