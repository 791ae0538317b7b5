"""One sample of a cache as a person wants it: file, sizes, crop, caption, values of fields, tokens, recipe."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np

from latentcache.errors import LatentcacheError, UsageError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.fields.dtypes import FLOATS, as_floats
from latentcache.report.figures import crops_of
from latentcache.report.tokens import segments, text_decoder
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value
from latentcache.verify.findings import path_json

#: Tokens of a document that are decoded.
_TOKENS = 4000


class Sample(Value, eq=False):
    """One sample of a cache. ``repr`` and notebooks show it; :attr:`facts` has the same as JSON values."""

    facts: Mapping[str, Any]

    def __repr__(self) -> str:
        return "\n".join(sample_lines(self.facts))

    def _repr_html_(self) -> str:
        from latentcache.report.page import fragment

        return fragment("sample", self.facts)


def sample_of(snapshot: Snapshot, row: int) -> Sample:
    """Describe a sample by its row, from 0; its items are read and proven."""
    samples = snapshot.samples
    facts: dict[str, Any] = {
        "row": row,
        **path_json(samples.names[row]),
        "files": {
            role: path_json(samples.files.names[int(held.file[row])])["path"]
            for role, held in samples.inputs.items()
            if int(held.file[row]) >= 0
        },
        "repeats": int(samples.columns["repeats"][row]) if "repeats" in samples.columns else 1,
    }
    caption = samples.inputs.get("caption")
    if caption is not None and caption.text is not None:
        facts["captions"] = [path_json(text)["path"] for text in caption.text[row].split(BETWEEN)]
    if "original_size" in samples.columns:
        facts["original_size"] = [int(side) for side in samples.columns["original_size"][row]]
    facts["crops"] = _crops(snapshot, row)
    reader = EntryReader(snapshot.paths, snapshot)
    facts["fields"] = {name: _field(rows, row, reader) for name, rows in snapshot.fields.items()}
    reader.close()
    return Sample(facts=facts)


def find_sample(snapshot: Snapshot, name: str) -> int:
    """The row of a sample by its name, by the last part of it if that is clear, or by its number from 0.

    Raises:
        UsageError: There is no such sample, or there are several.
    """
    names = list(snapshot.samples.names)
    rows = [row for row, held in enumerate(names) if held == name]
    rows = rows or [row for row, held in enumerate(names) if held.endswith(f"/{name}")]
    if len(rows) == 1:
        return rows[0]
    if not rows and name.isdecimal() and int(name) < len(names):
        return int(name)
    cache = snapshot.paths.root
    if rows:
        shown = ", ".join(names[row] for row in rows[:3])
        raise UsageError(f"{name}: {len(rows)} samples have this name", where=str(cache), fix=f"use one of {shown}")
    rejected = next((item for item in snapshot.rejected if item.label == name), None)
    if rejected is not None:
        why = f"the build rejected it [{rejected.reason}]: {rejected.detail}"
        raise UsageError(
            f"{name} is not in the cache", where=str(cache), why=why, fix=rejected.hint or "repair the file"
        )
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names[:3]
    raise UsageError(f"no sample {name!r}", where=str(cache), fix=f"use a name such as {', '.join(near)}")


def _crops(snapshot: Snapshot, row: int) -> list[dict[str, Any]]:
    crops = crops_of(snapshot)
    if crops is None:
        return []
    return [
        {
            "resize": crops.resize[number].tolist(),
            "bucket": crops.bucket[number].tolist(),
            "top_left": crops.corner[number].tolist(),
            "loss": round(float(crops.loss[number]), 4),
        }
        for number in np.flatnonzero(crops.sample == row).tolist()
    ]


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
