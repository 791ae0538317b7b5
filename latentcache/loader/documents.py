"""Documents: the items of a ragged field with one axis, in the order of their samples. Needs no torch.

Guarantee: elements that come back are those that were written, or an error names the sample, the file and the fix.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import content_hash
from latentcache.plan.documents import Corpus, Ints, begins, spread
from latentcache.store.reader import Checksum, EntryReader, Located
from latentcache.store.snapshot import Snapshot

#: Name of the ragged column that says which elements carry loss, if a kind has it: (first, count) of each span.
_SPANS = "spans"


class Documents:
    """The documents of samples, in the order wanted, or of all. Picklable; opens files on first use."""

    def __init__(
        self, snapshot: Snapshot, field: str, *, samples: Ints | None = None, checksum: Checksum = "first"
    ) -> None:
        rows = snapshot.fields[field]
        if not rows.spec.ragged or len(rows.spec.dims) != 1:
            raise UsageError(f"field={field!r}: its items are not documents", fix="use cache.loader(...)")
        self.snapshot, self.field, self.recipe = snapshot, field, rows.recipe
        self.checksum = checksum
        self.dtype: np.dtype[Any] = numpy_dtype(rows.spec.dtype)
        self._reader = EntryReader(snapshot.paths, snapshot, checksum=checksum)
        owner = np.asarray(rows.sample)
        self._rows: Ints = np.arange(len(owner), dtype=np.int32)
        if samples is not None:
            position = np.searchsorted(owner, samples).clip(max=max(len(owner) - 1, 0))
            held = owner[position] == samples if len(owner) else np.zeros(len(samples), dtype=np.bool_)
            self._rows = position[held].astype(np.int32)
        self._samples = owner[self._rows]
        self.lengths = np.asarray(rows.length)[self._rows].astype(np.int64)
        if _SPANS in rows.ragged_columns:
            ends, values = (np.asarray(part) for part in rows.ragged_columns[_SPANS])
            first = begins(ends)[self._rows]
            counts = ends[self._rows] - first
            self.span_ends = np.cumsum(counts)
            self.spans = values[spread(first, counts)]
        else:  # all elements carry loss
            self.span_ends = np.arange(1, len(self._rows) + 1)
            self.spans = np.stack([np.zeros_like(self.lengths), self.lengths], axis=1)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """Elements of all documents."""
        return int(self.lengths.sum())

    @property
    def corpus(self) -> Corpus:
        """The documents as plans need them."""
        return Corpus(length=self.lengths, span_ends=self.span_ends, spans=self.spans, where=self.where)

    @property
    def pad_id(self) -> int:
        """Element that rows are padded with: that of the recipe, else the one that ends a text, else 0."""
        known = (getattr(self.recipe, "pad_id", None), getattr(self.recipe, "eos_id", None))
        return next((number for number in known if number is not None), 0)

    @property
    def learns_parts(self) -> bool:
        """True if only some elements carry loss, so that a part of a document is another document."""
        return getattr(self.recipe, "loss", "all") != "all"

    @property
    def identity(self) -> bytes:
        """16 bytes that name the recipe and the documents in their order; elements follow from these."""
        content = np.asarray(self.snapshot.samples.first_input.content)[self._samples]
        return content_hash(self.snapshot.fields[self.field].recipe_id + content.tobytes())

    def where(self, document: int) -> str:
        """File and line of a document."""
        return str(self.snapshot.samples.names[int(self._samples[document])])

    def read(self, document: int) -> NDArray[Any]:
        """(n,) the elements of one document. Errors as :meth:`gather`."""
        return self._reader.read(self.field, int(self._rows[document]))

    def gather(self, document: Ints, out: NDArray[Any], at: Ints) -> None:
        """Read P documents into ``out`` (n,), which is of :attr:`dtype`."""
        self._reader.gather(self.field, self._rows.take(document), out.view(np.uint8), at * self.dtype.itemsize)

    def located(self, document: Ints, start: Ints, length: Ints, at: Ints, room: int) -> Located:
        """Locate pieces of documents; ``room``: elements of the memory that each is read into."""
        width = self.dtype.itemsize
        rows = self._rows.take(document)
        return self._reader.located(self.field, rows, at * width, room * width, start, length.astype(np.int64))

    def shards(self, document: Ints) -> tuple[Ints, Ints]:
        """(n,) positions in the snapshot's shards of documents, and (n,) their bytes."""
        return self._reader.shards(self.field, self._rows.take(document))

    def close(self) -> None:
        """Close the files; they are opened again when more is read."""
        self._reader.close()
