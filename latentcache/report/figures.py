"""Figures of a snapshot for its page: crops, captions, sets, latents; and what changed between two snapshots.

Cost: one pass over columns and captions. The audit of latents reads 1,024 entries and 192 MB at most.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, MissingEntryError, UsageError
from latentcache.fields.captions import BETWEEN
from latentcache.fields.dtypes import FLOATS, as_floats
from latentcache.fields.settings import flat_settings
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value

#: Samples that are named beside a count.
_NAMED = 8
#: Tags, equal captions and sets that are shown, characters of such a caption, captions that show if they are tags.
_TAGS, _EQUAL, _SETS, _EXCERPT, _LOOKED_AT = 40, 12, 24, 160, 2000
#: Captions are lists of tags if their parts between commas have at most this many words on average.
_TAG_WORDS = 3.0
#: Words of fewer letters say little about sentences.
_WORDS = re.compile(r"[^\W_]{4,}")
#: Entries of a field and their bytes that an audit reads.
_ENTRIES, _BYTES = 1024, 192_000_000
#: Spread of all values, as a model trains on them, that is usual.
_USUAL = (0.4, 2.5)
#: Part of the usual spread below which an item is constant.
_CONSTANT = 0.02
#: Cells per side in which items are compared, and the likeness of near copies.
_CELLS, _LIKE = 4, 0.997


def _names(snapshot: Snapshot, samples: Sequence[int]) -> list[str]:
    return [snapshot.samples.names[int(sample)] for sample in samples[:_NAMED]]


# crops


class Crops(Value, eq=False):
    """The n items of a field that are cut from images, without flips and further crops of one bucket."""

    rows: FieldRows
    row: NDArray[np.int64]
    """(n,) rows of the field."""
    sample: NDArray[np.int64]
    original: NDArray[np.int64]
    """(n, 2) height and width of the image, in pixels."""
    resize: NDArray[np.int64]
    """(n, 2) height and width after the resize, in pixels."""
    bucket: NDArray[np.int64]
    """(n, 2) height and width of the crop, in pixels."""
    corner: NDArray[np.int64]
    """(n, 2) top and left of the crop, in pixels of the resized image."""

    @property
    def loss(self) -> NDArray[np.float64]:
        """(n,) fraction of the image outside the crop."""
        kept: NDArray[np.float64] = self.bucket.prod(axis=1) / np.maximum(self.resize.prod(axis=1), 1)
        return np.clip(1 - kept, 0, 1)

    @property
    def enlarged(self) -> NDArray[np.float64]:
        """(n,) enlargement; 1 or less: the image was not enlarged."""
        return np.asarray((self.resize / np.maximum(self.original, 1)).max(axis=1))

    def box(self, number: int) -> dict[str, float]:
        """The crop in percent of the image: ``left``, ``top``, ``width``, ``height``."""
        (top, left), (height, width) = self.corner[number].tolist(), self.bucket[number].tolist()
        tall, wide = self.resize[number].tolist()
        parts = {"left": left / wide, "top": top / tall, "width": width / wide, "height": height / tall}
        return {name: round(100 * part, 2) for name, part in parts.items()}


def crops_of(snapshot: Snapshot) -> Crops | None:
    """The crops of the first field that stores them; None if no field does, or the sizes are unknown."""
    sizes = snapshot.samples.columns.get("original_size")
    rows = next((rows for rows in snapshot.fields.values() if {"crop", "resize"} <= set(rows.columns)), None)
    if rows is None or sizes is None or not len(rows):
        return None
    row = np.flatnonzero(np.asarray(rows.variant) == 0)
    sample = np.asarray(rows.sample)[row].astype(np.int64)
    dims = np.array([group.dims[1:] for group in rows.groups], dtype=np.int64).reshape(-1, 2)
    return Crops(
        rows=rows,
        row=row,
        sample=sample,
        original=np.asarray(sizes)[sample].astype(np.int64),
        resize=np.asarray(rows.columns["resize"])[row].astype(np.int64),
        bucket=dims[np.asarray(rows.group)[row]],
        corner=np.asarray(rows.columns["crop"])[row].astype(np.int64),
    )


def crop_facts(crops: Crops, snapshot: Snapshot) -> dict[str, Any]:
    """Mean and largest loss, and the images that were enlarged most."""
    loss, enlarged = crops.loss, crops.enlarged
    larger = np.flatnonzero(enlarged > 1.001)
    worst = larger[np.argsort(-enlarged[larger], kind="stable")][:_NAMED]
    return {
        "items": len(loss),
        "mean_loss": float(loss.mean()),
        "most_loss": float(loss.max()),
        "over_quarter": int((loss > 0.25).sum()),
        "enlarged": len(larger),
        "enlarged_most": [
            {"name": name, "times": float(enlarged[number]), "size": "{1} x {0}".format(*crops.original[number])}
            for name, number in zip(_names(snapshot, crops.sample[worst].tolist()), worst.tolist(), strict=True)
        ],
    }


# captions and sets


def caption_facts(snapshot: Snapshot) -> dict[str, Any] | None:
    """Frequent tags, missing and equal captions; None if the samples have no captions."""
    caption = snapshot.samples.inputs.get("caption")
    if caption is None or caption.text is None or not len(snapshot.samples):
        return None
    texts = list(caption.text)
    rows_of = defaultdict[str, list[int]](list)
    for row, text in enumerate(texts):
        rows_of[text].append(row)
    equal = sorted((rows for text, rows in rows_of.items() if text.strip() and len(rows) > 1), key=len, reverse=True)
    missing = [row for row, text in enumerate(texts) if not text.strip()]
    kind, tags, captioned = _tags(texts, _times(snapshot))
    return {
        "captions": len(texts) - len(missing),
        "missing": len(missing),
        "missing_names": _names(snapshot, missing),
        "chosen": snapshot.empty_by_choice,
        "characters": int(np.median([len(text) for text in texts])),
        "equal": [
            {"text": _excerpt(texts[rows[0]]), "count": len(rows), "names": _names(snapshot, rows)}
            for rows in equal[:_EQUAL]
        ],
        "equal_groups": len(equal),
        "equal_samples": sum(map(len, equal)),
        "tag_kind": kind,
        "tags": [
            {"text": tag, "count": count, "share": count / max(captioned, 1)}
            for tag, count in tags.most_common(_TAGS)
        ],
        "distinct_tags": len(tags),
        "once": sum(count == 1 for count in tags.values()),
    }


def _tags(texts: Sequence[str], times: Sequence[int]) -> tuple[str, Counter[str], int]:
    """``tags`` or ``words``, in how many captions of an epoch each of them is, and the number of these captions."""
    captions = [[variant for variant in text.split(BETWEEN) if variant.strip()] for text in texts]
    variants = list(chain.from_iterable(captions[:_LOOKED_AT]))
    parts = [part for variant in variants for part in variant.split(",")]
    words = sum(len(part.split()) for part in parts)
    are_tags = bool(parts) and len(parts) >= 2 * len(variants) and words / len(parts) <= _TAG_WORDS
    counts = Counter[str]()
    captioned = 0
    for caption, number in zip(captions, times, strict=True):
        captioned += number if caption else 0
        for tag in {tag for variant in caption for tag in (_split(variant) if are_tags else _words(variant))}:
            counts[tag] += number
    return ("tags" if are_tags else "words"), counts, captioned


def _split(text: str) -> set[str]:
    return {" ".join(part.split()).lower() for part in text.split(",")} - {""}


def _words(text: str) -> set[str]:
    return set(_WORDS.findall(text.lower()))


def _excerpt(text: str) -> str:
    text = text.replace(BETWEEN, " | ")
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _times(snapshot: Snapshot) -> list[int]:
    """How often an epoch serves each sample."""
    column = snapshot.samples.columns.get("repeats")
    return [1] * len(snapshot.samples) if column is None else np.asarray(column).tolist()


def set_facts(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Sets of the samples with their share of an epoch, repeats included; without sets their folders."""
    counts, weights = Counter[str](), Counter[str]()
    sets = {str(part["folder"]): part for part in snapshot.source.get("sets", ()) if part.get("folder")}
    deepest = sorted(sets, key=len, reverse=True)
    for name, number in zip(snapshot.samples.names, _times(snapshot), strict=True):
        inside = (folder for folder in deepest if name.startswith(f"{folder}/"))
        folder = next(inside, "") or name.rpartition("/")[0] or "."
        counts[folder] += 1
        weights[folder] += number
    total = max(sum(weights.values()), 1)
    return [
        {
            "name": folder,
            "samples": counts[folder],
            "repeats": round(weight / counts[folder], 2),
            "share": weight / total,
            "regularization": bool(sets.get(folder, {}).get("is_reg")),
        }
        for folder, weight in weights.most_common(_SETS)
    ]


def remark_facts(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Remarks of the fields on their items, such as captions cut to the length of the model."""
    remarks = []
    for name, rows in snapshot.fields.items():
        if rows.kind is None or not len(rows):
            continue
        columns = {**rows.columns, **rows.ragged_columns, "length": rows.length}
        for reason, sentence, numbers in rows.kind.remarks(columns):
            samples = np.unique(np.asarray(rows.sample)[numbers]).tolist()
            remark = {"field": name, "reason": reason, "text": sentence, "count": len(samples)}
            remarks.append({**remark, "names": _names(snapshot, samples)})
    return remarks


# latents


class Stored:
    """Reader of items that proves them; raises CorruptEntryError, MissingEntryError."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._reader = EntryReader(snapshot.paths, snapshot)

    def latent(self, rows: FieldRows, row: int) -> NDArray[np.float32]:
        """(C, F, H, W) of a latent, of stored posteriors the means."""
        values = as_floats(self._reader.read(rows.name, row))
        if rows.recipe is not None and rows.recipe.read_time.posterior:
            values = values[: len(values) // 2]
        return values[:, None] if values.ndim == 3 else values

    def levels(self, rows: FieldRows, row: int) -> NDArray[np.uint8]:
        """(H, W) of a mask, from 0 to 255."""
        return np.asarray(self._reader.read(rows.name, row).squeeze(), dtype=np.uint8)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()


class _Items(NamedTuple):
    """Numbers of n items of a field."""

    sample: NDArray[np.int64]
    mean: NDArray[np.float64]
    """(n, C) mean of each channel, as stored."""
    square: NDArray[np.float64]
    """(n, C) mean square of each channel."""
    cells: NDArray[np.float64]
    """(n, C * 16) means of 4x4 cells."""
    damaged: list[int]
    """Samples whose items cannot be read."""


def audit(snapshot: Snapshot, stored: Stored) -> list[dict[str, Any]]:
    """Numbers of each field of latents that say if it is fit to train on: spread, constant items, near copies."""
    fields = []
    for rows in snapshot.fields.values():
        spec = rows.spec
        if spec.dtype in FLOATS and not spec.ragged and spec.dims[:1] == ("C",) and len(spec.dims) > 2 and len(rows):
            items = _read_items(rows, stored)
            if len(items.sample):
                fields.append(_audited(snapshot, rows, items))
    return fields


def _read_items(rows: FieldRows, stored: Stored) -> _Items:
    """Read a seeded choice of items, each entry once."""
    first = np.unique(np.asarray(rows.entry), return_index=True)[1]
    mean_bytes = float(np.asarray(rows.bytes).mean())
    count = max(min(_ENTRIES, int(_BYTES / max(mean_bytes, 1))), 1)
    samples, damaged = list[int](), list[int]()
    mean, square, cells = [], [], []
    for row in np.sort(np.random.default_rng(0).permutation(first)[:count]).tolist():
        try:
            latent = stored.latent(rows, row).astype(np.float64)
        except (CorruptEntryError, MissingEntryError):
            damaged.append(int(rows.sample[row]))
            continue
        samples.append(int(rows.sample[row]))
        mean.append(latent.mean(axis=(1, 2, 3)))
        square.append(np.square(latent).mean(axis=(1, 2, 3)))
        cells.append(_cells(latent.mean(axis=1)))
    return _Items(np.array(samples), np.array(mean), np.array(square), np.array(cells), damaged)


def _cells(latent: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C * 16,) means of cells of (C, H, W)."""
    tall, wide = (np.linspace(0, side, _CELLS + 1).astype(int)[:-1] for side in latent.shape[1:])
    sums = np.add.reduceat(np.add.reduceat(latent, tall, axis=1), wide, axis=2)
    sizes = np.diff(np.append(tall, latent.shape[1]))[:, None] * np.diff(np.append(wide, latent.shape[2]))
    return np.asarray((sums / np.maximum(sizes, 1)).reshape(-1))


def _audited(snapshot: Snapshot, rows: FieldRows, items: _Items) -> dict[str, Any]:
    mean, deviation, scaling = _as_trained(rows, items)
    overall = float(np.sqrt(np.square(deviation).mean()))
    spread = np.sqrt(np.maximum(items.square - np.square(items.mean), 0).mean(axis=1))
    constant = items.sample[spread < _CONSTANT * max(float(np.median(spread)), 1e-9)].tolist()
    copies = _near_copies(items)
    return {
        "field": rows.name,
        "looked_at": len(items.sample),
        "entries": rows.entries,
        "damaged": _names(snapshot, items.damaged),
        "damaged_count": len(items.damaged),
        "scaling": scaling,
        "overall": overall,
        "unusual": bool(scaling != "none" and not _USUAL[0] <= overall <= _USUAL[1]),
        "channels": [
            {"mean": middle, "std": width} for middle, width in zip(mean.tolist(), deviation.tolist(), strict=True)
        ],
        "constant": _names(snapshot, constant),
        "constant_count": len(constant),
        "copies": [_names(snapshot, pair) for pair in copies[:_NAMED]],
        "copies_count": len(copies),
    }


def _as_trained(rows: FieldRows, items: _Items) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """Mean and deviation of each channel after the recipe's scale and shift, and the kind of scaling."""
    mean = items.mean.mean(axis=0)
    deviation = np.sqrt(np.maximum(items.square.mean(axis=0) - np.square(mean), 0))
    affine: Mapping[str, Any] = (rows.recipe.read_time.affine if rows.recipe is not None else None) or {}
    kind = str(affine.get("kind", "none"))
    if kind == "scale-shift":
        return (mean - affine["shift"]) * affine["scale"], deviation * affine["scale"], kind
    if kind in ("mean-std", "batch-norm"):
        middle, width = (np.asarray(affine[part]).reshape(len(mean), -1).mean(axis=1) for part in ("mean", "std"))
        scale = affine["scale"] if kind == "mean-std" else 1.0
        return (mean - middle) / width * scale, deviation / width * scale, kind
    return mean, deviation, "none"


def _near_copies(items: _Items) -> Sequence[Sequence[int]]:
    """Pairs of different samples whose cells are nearly equal, the most alike first."""
    flat = items.cells - items.cells.mean(axis=0)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    flat = flat / np.maximum(lengths, 1e-9)
    alike = np.triu(flat @ flat.T, 1)
    alike[items.sample[:, None] == items.sample] = 0
    alike[(lengths < 1e-6)[:, 0]] = 0
    pairs = np.argwhere(alike > _LIKE)
    order = np.argsort(-alike[pairs[:, 0], pairs[:, 1]], kind="stable")
    nearest: list[list[int]] = items.sample[pairs[order]].tolist()
    return nearest


# two snapshots


def compare_facts(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Differences of two snapshots, and the inputs that both hold (overlap of training and validation).

    Raises:
        UsageError: They hold different kinds of data.
    """
    kinds = [str(snapshot.source.get("data_kind", "")) for snapshot in (before, after)]
    if kinds[0] != kinds[1]:
        raise UsageError(
            f"{kinds[0]} and {kinds[1]} cannot be compared", fix="give two caches of the same kind of data"
        )
    return {
        "sides": [_side(snapshot) for snapshot in (before, after)],
        "recipes": _changed_settings(before, after),
        **_changed_samples(before, after),
    }


def _side(snapshot: Snapshot) -> dict[str, Any]:
    crops = crops_of(snapshot)
    return {
        "path": str(snapshot.paths.root),
        "snapshot": snapshot.number,
        "created": snapshot.manifest.get("created", ""),
        "fields": list(snapshot.fields),
        "samples": len(snapshot.samples),
        "rejected": sum(sample.count for sample in snapshot.rejected),
        "payload_bytes": sum(int(np.asarray(rows.bytes).sum(dtype=np.int64)) for rows in snapshot.fields.values()),
        "mean_loss": float(crops.loss.mean()) if crops is not None else None,
    }


def _changed_settings(before: Snapshot, after: Snapshot) -> list[dict[str, Any]]:
    """Settings that differ, field by field; a field that one side lacks is one line."""
    changes = list[dict[str, Any]]()
    for name in dict.fromkeys([*before.fields, *after.fields]):
        sides = [snapshot.fields.get(name) for snapshot in (before, after)]
        if None in sides:
            first, second = ({"field": "absent" if side is None else "present"} for side in sides)
        else:
            first, second = (flat_settings(side.recipe_json) for side in sides if side is not None)
        for setting in dict.fromkeys([*first, *second]):
            values = [first.get(setting), second.get(setting)]
            if values[0] != values[1]:
                old, new = (str(value)[:120] for value in values)
                changes.append({"field": name, "setting": setting, "before": old, "after": new})
    return changes


def _changed_samples(before: Snapshot, after: Snapshot) -> dict[str, Any]:
    """Samples by name, and by the content of their first input."""
    old, new = ({name: row for row, name in enumerate(side.samples.names)} for side in (before, after))
    # Hashes of 16 bytes; empty if unknown.
    old_content, new_content = (
        np.ascontiguousarray(side.samples.first_input.content).view("S16")[:, 0] for side in (before, after)
    )
    groups = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and old_content[old[name]] != new_content[new[name]]],
    }
    shared = np.isin(new_content, old_content) & (new_content != b"")
    return {
        **{kind: {"count": len(names), "names": names[:_NAMED]} for kind, names in groups.items()},
        "shared_content": int(shared.sum()),
    }
