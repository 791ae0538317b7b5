"""Numbers of stored floats that say if a cache is fit to train on: channels, constant items, outliers, copies.

Fields with stacked items and channels first are looked at. Cost: 1 024 entries and 192 MB are read at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CorruptEntryError, MissingEntryError
from latentcache.fields.dtypes import FLOATS
from latentcache.report.preview import Stored
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.value import Value
from latentcache.verify.findings import shown_text

_ENTRIES, _BYTES = 1024, 192_000_000
#: Spread of all values, as a model trains on them, that is usual.
_USUAL = (0.4, 2.5)
#: Part of the usual spread below which an item is constant, and distance in robust deviations of an outlier.
_CONSTANT, _OUTLIER = 0.02, 8.0
#: Cells per side of what is compared between items, and the likeness of near copies.
_CELLS, _LIKE = 4, 0.997
_NAMED = 8


class Measured(Value, eq=False):
    """Numbers of n items of a field."""

    row: NDArray[np.int64]
    mean: NDArray[np.float64]
    """(n, C) mean of each channel, as stored."""
    square: NDArray[np.float64]
    """(n, C) mean square of each channel."""
    cells: NDArray[np.float64]
    """(n, C * 16) means of 4x4 cells, relative to the mean of the item."""
    damaged: tuple[int, ...]
    """Rows that could not be read."""

    @property
    def spread(self) -> NDArray[np.float64]:
        """(n,) standard deviation inside each item, channels apart."""
        return np.asarray(np.sqrt(np.maximum(self.square - np.square(self.mean), 0).mean(axis=1)))


def audit(snapshot: Snapshot, stored: Stored) -> list[dict[str, Any]]:
    """Audit every field with channels."""
    fields = []
    for rows in snapshot.fields.values():
        spec = rows.spec
        if spec.dtype in FLOATS and not spec.ragged and spec.dims[:1] == ("C",) and len(spec.dims) > 2 and len(rows):
            measured = _measure(rows, stored)
            if len(measured.row):
                fields.append(_of_field(snapshot, rows, measured))
    return fields


def _measure(rows: FieldRows, stored: Stored) -> Measured:
    """Read a seeded choice of items, each entry once."""
    first = np.unique(np.asarray(rows.entry), return_index=True)[1]
    mean_bytes = float(np.asarray(rows.bytes).mean())
    count = max(min(_ENTRIES, int(_BYTES / max(mean_bytes, 1))), 1)
    chosen = np.sort(np.random.default_rng(0).permutation(first)[:count])
    damaged, kept = list[int](), list[int]()
    mean, square, cells = [], [], []
    for row in chosen.tolist():
        try:
            latent = stored.latent(rows, row).astype(np.float64)
        except (CorruptEntryError, MissingEntryError):
            damaged.append(row)
            continue
        kept.append(row)
        mean.append(latent.mean(axis=(1, 2, 3)))
        square.append(np.square(latent).mean(axis=(1, 2, 3)))
        cells.append(_cells(latent.mean(axis=1)))
    return Measured(
        row=np.array(kept, dtype=np.int64),
        mean=np.array(mean),
        square=np.array(square),
        cells=np.array(cells),
        damaged=tuple(damaged),
    )


def _cells(latent: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C * 16,) means of cells of (C, H, W)."""
    tall, wide = (np.linspace(0, side, _CELLS + 1).astype(int)[:-1] for side in latent.shape[1:])
    sums = np.add.reduceat(np.add.reduceat(latent, tall, axis=1), wide, axis=2)
    sizes = np.diff(np.append(tall, latent.shape[1]))[:, None] * np.diff(np.append(wide, latent.shape[2]))
    return np.asarray((sums / np.maximum(sizes, 1)).reshape(-1))


def _of_field(snapshot: Snapshot, rows: FieldRows, measured: Measured) -> dict[str, Any]:
    mean, deviation, scaled = _as_trained(rows, measured)
    overall = float(np.sqrt(np.square(deviation).mean()))
    names = snapshot.samples.names

    def named(numbers: Any) -> list[str]:
        samples = np.asarray(rows.sample)[measured.row[np.asarray(numbers, dtype=np.int64)]]
        return [shown_text(names[int(sample)]) for sample in samples[:_NAMED]]

    spread = measured.spread
    constant = np.flatnonzero(spread < _CONSTANT * max(float(np.median(spread)), 1e-9))
    outliers = np.setdiff1d(_outliers(measured), constant)
    copies = _near_copies(measured, np.asarray(rows.sample)[measured.row])
    return {
        "field": rows.name,
        "looked_at": len(measured.row),
        "entries": rows.entries,
        "damaged": [shown_text(names[int(rows.sample[row])]) for row in measured.damaged[:_NAMED]],
        "damaged_count": len(measured.damaged),
        "scaling": scaled,
        "overall": overall,
        "unusual": bool(scaled != "none" and not _USUAL[0] <= overall <= _USUAL[1]),
        "channels": [
            {"mean": float(middle), "std": float(width)} for middle, width in zip(mean, deviation, strict=True)
        ],
        "constant": named(constant),
        "constant_count": len(constant),
        "outliers": named(outliers),
        "outliers_count": len(outliers),
        "copies": [named(pair) for pair in copies[:_NAMED]],
        "copies_count": len(copies),
    }


def _as_trained(rows: FieldRows, measured: Measured) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """Mean and deviation of each channel after the recipe's scale and shift, and the kind of scaling."""
    mean = measured.mean.mean(axis=0)
    deviation = np.sqrt(np.maximum(measured.square.mean(axis=0) - np.square(mean), 0))
    affine: Mapping[str, Any] = (rows.recipe.read_time.affine if rows.recipe is not None else None) or {}
    kind = str(affine.get("kind", "none"))
    if kind == "scale-shift":
        return (mean - affine["shift"]) * affine["scale"], deviation * affine["scale"], kind
    if kind in ("mean-std", "batch-norm"):
        middle, width = (np.asarray(affine[part]).reshape(len(mean), -1).mean(axis=1) for part in ("mean", "std"))
        scale = affine["scale"] if kind == "mean-std" else 1.0
        return (mean - middle) / width * scale, deviation / width * scale, kind
    return mean, deviation, "none"


def _outliers(measured: Measured) -> NDArray[np.intp]:
    """Items whose channels' means or spread are far from the median, measured by the median deviation."""
    values = np.column_stack([measured.mean, np.log(measured.spread + 1e-6)])
    middle = np.median(values, axis=0)
    deviation = np.maximum(1.4826 * np.median(np.abs(values - middle), axis=0), 1e-3)
    distance = (np.abs(values - middle) / deviation).max(axis=1)
    far = np.flatnonzero(distance > _OUTLIER)
    return np.asarray(far[np.argsort(-distance[far], kind="stable")])


def _near_copies(measured: Measured, sample: NDArray[Any]) -> list[tuple[int, int]]:
    """Pairs of different samples whose cells are nearly equal."""
    vectors = measured.cells - measured.cells.mean(axis=0)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(lengths, 1e-9)
    alike = np.triu(vectors @ vectors.T, 1)
    alike[sample[:, None] == sample] = 0
    alike[(lengths < 1e-6)[:, 0]] = 0
    pairs = np.argwhere(alike > _LIKE)
    order = np.argsort(-alike[pairs[:, 0], pairs[:, 1]], kind="stable")
    return [(int(left), int(right)) for left, right in pairs[order]]
