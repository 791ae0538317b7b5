"""Values and descriptions of samples, for exports.

A sample has tensors, one for each field, and ``about``: its name, caption, sizes, columns of its table, and the keys
of its items. Values are those of a loader that draws nothing: the mean of a posterior, the first crop without a flip,
the first caption. A ragged item has its own length.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from latentcache.fields.captions import BETWEEN, CaptionVariants
from latentcache.fields.dtypes import numpy_dtype
from latentcache.fields.protocol import ReadSpec
from latentcache.fields.table import OF_TABLE, table_values
from latentcache.loader.samples import CAPTION, CachePart, join
from latentcache.loader.values import Affine, posterior
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot

#: Ragged column of tokens: (first, count) of each span with loss.
_SPANS = "spans"


class WholeSample(NamedTuple):
    """One sample."""

    number: int
    tensors: Mapping[str, torch.Tensor]
    about: Mapping[str, Any]


class WholeSamples:
    """The samples of a snapshot that have all of its fields. An image in two sizes is two samples."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._entries = EntryReader(snapshot.paths, snapshot)
        joined = join(CachePart(snapshot), list(snapshot.fields), repeats=False)
        self.excluded, self._sample = joined.excluded, joined.sample
        self._rows = {name: rows[:, 0] for name, rows in joined.rows.items()}
        fields = {name: snapshot.fields[name] for name in self._rows}
        self._keys = {name: fields[name].row_keys(rows) for name, rows in self._rows.items()}
        self._group = {name: np.asarray(fields[name].group)[rows] for name, rows in self._rows.items()}
        self._columns = {name: np.asarray(column) for name, column in snapshot.samples.columns.items()}
        crops = {name: field.columns["crop"] for name, field in fields.items() if "crop" in field.columns}
        self._crops = {name: np.asarray(column)[self._rows[name]] for name, column in crops.items()}

    def __len__(self) -> int:
        return len(self._sample)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(n,) bytes of the stored values of each."""
        total = np.zeros(len(self), dtype=np.int64)
        for name, rows in self._rows.items():
            field = self._snapshot.fields[name]
            total += item_sizes(field, rows) * numpy_dtype(field.spec.dtype).itemsize
        return total

    @property
    def unused(self) -> int:
        """Number of items that no sample has: flips, further crops and captions, prompts."""
        return sum(int((np.asarray(self._snapshot.fields[name].variant) > 0).sum()) for name in self._rows)

    def __getitem__(self, number: int) -> WholeSample:
        tensors = dict[str, torch.Tensor]()
        for name, rows in self._rows.items():
            row = int(rows[number])
            field = self._snapshot.fields[name]
            tensors[name] = item_values(self._entries, field, row)
            if _SPANS in field.ragged_columns:
                tensors["loss_mask"] = _loss_mask(field, row, len(tensors[name]))
        return WholeSample(number, tensors, self.about(number))

    def about(self, number: int) -> dict[str, Any]:
        """The description of a sample, as JSON values."""
        snapshot = self._snapshot
        row = int(self._sample[number])
        about: dict[str, Any] = {"name": snapshot.samples.names[row]}
        if CAPTION in snapshot.samples.inputs:
            about["caption"] = captions_of(snapshot, row, snapshot.fields)[0]
        for name in ("original_size", "repeats"):
            if name in self._columns:
                about[name] = self._columns[name][row].tolist()
        for name in self._rows:
            field = snapshot.fields[name]
            height, width = field.groups[int(self._group[name][number])].dims[1:]
            if height * width > 1:
                about["target_size"] = [height, width]
            if name in self._crops:
                about["crop_top_left"] = self._crops[name][number].tolist()
        image_set = set_of(snapshot, row)
        about |= {name: image_set[name] for name in ("class_words", "is_reg", "split") if image_set.get(name)}
        if table := {name: column for name, column in self._columns.items() if name.startswith(OF_TABLE)}:
            values = {
                name: np.array(table_values(column[row : row + 1])).tolist()[0] for name, column in table.items()
            }
            known = {name: value for name, value in values.items() if value == value}  # no NaN
            about["table"] = {name.removeprefix(OF_TABLE): value for name, value in known.items()}
        about["keys"] = {name: keys[number].tobytes().hex() for name, keys in self._keys.items()}
        return about


def item_sizes(field: FieldRows, rows: NDArray[Any]) -> NDArray[np.int64]:
    """(n,) number of values of items."""
    shapes = [group.shape[1:] if field.spec.ragged else group.shape for group in field.groups]
    values = np.array([np.prod(shape, dtype=np.int64) for shape in shapes], dtype=np.int64)
    length = np.asarray(field.length, dtype=np.int64)[rows] if field.spec.ragged else np.ones(len(rows), np.int64)
    sizes: NDArray[np.int64] = values[np.asarray(field.group)[rows]] * length
    return sizes


def item_values(
    entries: EntryReader,
    field: FieldRows,
    row: int,
    *,
    is_scaled: bool = True,
    draw: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Values of one item, as a loader serves them.

    Args:
        entries: Reads the items of its snapshot.
        field: Its field.
        row: Its row there.
        is_scaled: Give floating values as a model trains on them, not as they are stored.
        draw: Seed of a draw from a stored posterior; None: its mean.
        dtype: Type of floating values; None: the stored one.
    """
    read_time = ReadSpec() if field.recipe is None else field.recipe.read_time
    stored_type = getattr(torch, field.spec.dtype)
    values = torch.from_numpy(entries.read(field.name, row)).view(stored_type)
    if read_time.posterior:
        drawn = torch.empty((1, len(values) // 2, *values.shape[1:]))
        mode, seed = ("mode", 0) if draw is None else ("sample", draw)
        posterior(values[None], field.row_keys(np.array([row])), drawn, mode, (seed, 0))  # type: ignore[arg-type]
        values = drawn[0]
    is_floating = stored_type.is_floating_point
    affine = Affine.of(read_time.affine if is_scaled or not is_floating else None)
    if not is_floating and not affine.changes:
        return values
    wanted = dtype or (stored_type if is_floating else torch.float32)
    return affine.apply(values[None].contiguous(), torch.empty((1, *values.shape), dtype=wanted))[0]


def captions_of(snapshot: Snapshot, sample: int, fields: Iterable[str]) -> list[str]:
    """The captions of a sample, as these fields encode them; one empty caption if it has none."""
    caption = snapshot.samples.inputs.get(CAPTION)
    if caption is None or caption.text is None:
        return [""]
    text: str = caption.text[sample]
    for name in fields:
        field = snapshot.fields[name]
        if field.kind is not None and field.recipe is not None and field.kind.inputs[0] == CAPTION:
            variants: CaptionVariants = getattr(field.recipe, "captions", CaptionVariants())
            return [field.recipe.text(text, variant) for variant in range(variants.count(text))]
    return text.split(BETWEEN)


def set_of(snapshot: Snapshot, sample: int) -> Mapping[str, Any]:
    """The ``ImageSet`` of the folder or table of a sample."""
    sets = snapshot.source.get("sets") or [{}]
    column = snapshot.samples.columns.get("image_set")
    image_set: Mapping[str, Any] = sets[0 if column is None else int(column[sample])]
    return image_set


def _loss_mask(field: FieldRows, row: int, length: int) -> torch.Tensor:
    """(length,) true for tokens with loss."""
    ends, spans = field.ragged_columns[_SPANS]
    mask = torch.zeros(length, dtype=torch.bool)
    for first, count in spans[int(ends[row - 1]) if row else 0 : int(ends[row])].tolist():
        mask[first : first + count] = True
    return mask
