"""Documents: the items of a ragged field with one axis, in the order of their samples. Needs no torch.

Guarantee: elements that come back are those that were written, or an error names the sample, the file and the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.dtypes import numpy_dtype
from latentcache.identity.content import content_hash
from latentcache.plan.documents import Corpus, begins, spread
from latentcache.store.reader import Checksum, EntryReader, Located
from latentcache.store.snapshot import Snapshot

Ints = NDArray[np.integer]
#: Name of the ragged column that says which elements carry loss, if a kind has it: (first, count) of each span.
_SPANS = "spans"


class Documents:
    """D documents. Picklable; opens files on first use in each process, and they close when it is forgotten.

    Args:
        snapshot: Where they are.
        field: Name of the field.
        samples: Sample numbers, in the order wanted; None: all.
        checksum: ``first`` or ``always``.

    Raises:
        UsageError: The field does not hold documents.
    """

    def __init__(
        self, snapshot: Snapshot, field: str, *, samples: Ints | None = None, checksum: Checksum = "first"
    ) -> None:
        found = snapshot.fields[field]
        if not found.spec.ragged or len(found.spec.dims) != 1:
            raise UsageError(f"field={field!r}: its items are not documents", fix="use cache.loader(...)")
        self.snapshot, self.field, self.recipe = snapshot, field, found.recipe
        self.dtype: np.dtype[Any] = numpy_dtype(found.spec.dtype)
        self._reader = EntryReader(snapshot.paths, snapshot, checksum=checksum)
        owner, lengths = np.asarray(found.sample), np.asarray(found.length)
        if samples is None:
            self._rows: Ints = np.arange(len(owner), dtype=np.int32)
        else:
            place = np.searchsorted(owner, samples).clip(max=max(len(owner) - 1, 0))
            held = owner[place] == samples if len(owner) else np.zeros(len(samples), dtype=np.bool_)
            self._rows = place[held].astype(np.int32)
        self._samples = owner[self._rows]
        self.lengths = lengths[self._rows].astype(np.int64)
        self.span_ends, self.spans = self._loss_spans(found.ragged_columns)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def tokens(self) -> int:
        """Elements of all documents."""
        return int(self.lengths.sum())

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
    def content(self) -> NDArray[np.uint8]:
        """(D, 16) content hashes."""
        return content_of(self.snapshot, self._samples)

    @property
    def sources(self) -> tuple[str, ...]:
        """Source files."""
        return tuple(self.snapshot.samples.files.names)

    @property
    def source(self) -> NDArray[np.int32]:
        """(D,) source file of each, as a position in :attr:`sources`."""
        return file_of(self.snapshot, self._samples)

    def where(self, document: int) -> str:
        """File and line of a document."""
        return str(self.snapshot.samples.names[int(self._samples[document])])

    def keys(self, documents: Ints) -> NDArray[np.uint8]:
        """(n, 32) item keys."""
        return self.snapshot.fields[self.field].row_keys(self._rows[documents])

    @property
    def corpus(self) -> Corpus:
        """The documents as plans need them."""
        return Corpus(length=self.lengths, span_ends=self.span_ends, spans=self.spans, where=self.where)

    @property
    def identity(self) -> bytes:
        """16 bytes that name the recipe and the documents in their order; elements follow from these."""
        return content_hash(self.snapshot.fields[self.field].recipe_id + np.ascontiguousarray(self.content).tobytes())

    @property
    def pending(self) -> bool:
        """True if a streaming build is still making them: lengths and spans are unknown."""
        return self.snapshot.pending is not None

    def arrived(self, documents: Ints) -> Documents:
        """These documents of a streaming build, once they can be read, numbered from 0.

        Raises:
            MissingEntryError: One of them was rejected.
            NotYetEncodedError: One of them did not come in time.
        """
        rows = self._rows[documents]
        self._reader.ready(self.field, rows)
        lengths = self.snapshot.pending.length(self.field, rows).astype(np.int64)
        spans = [np.array([[0, length]]) for length in lengths.tolist()]
        if _SPANS in getattr(self.snapshot.fields[self.field].kind, "ragged_columns", ()):
            spans = [
                self._spans_in_head(row, key) for row, key in zip(rows.tolist(), self.keys(documents), strict=True)
            ]
        other = Documents.__new__(Documents)
        vars(other).update(vars(self), _rows=rows, _samples=self._samples[documents], lengths=lengths)
        other.span_ends, other.spans = np.cumsum([len(one) for one in spans]), np.concatenate(spans)
        return other

    def _spans_in_head(self, row: int, key: NDArray[np.uint8]) -> Ints:
        """The loss spans of an item, from the head of its entry."""
        header = self._reader.header(self.field, row)
        item = int(np.flatnonzero((header.item_keys() == key).all(axis=1))[0])
        ends, values = header.ragged_columns[_SPANS]
        found: Ints = values[int(ends[item - 1]) if item else 0 : int(ends[item])]
        return found

    def read(self, document: int) -> NDArray[Any]:
        """(n,) the elements of one document.

        Raises:
            CorruptEntryError: Its entry fails its check.
            MissingEntryError: Its shard is gone.
        """
        found = np.empty(int(self.lengths[document]), dtype=self.dtype)
        whole = np.array([document]), np.zeros(1, dtype=np.int64), self.lengths[document : document + 1]
        self.gather(*whole, found, np.zeros(1, dtype=np.int64))
        return found

    def gather(self, document: Ints, start: Ints, length: Ints, out: NDArray[Any], at: Ints) -> None:
        """Read pieces of documents straight into their places in the caller's memory.

        Args:
            document: (P,) document of each piece.
            start: (P,) first element of the piece in its document.
            length: (P,) elements in the piece; pieces are inside their documents.
            out: (n,) of :attr:`dtype`, C-contiguous; what is between the pieces is left as it is.
            at: (P,) where each piece begins in ``out``.

        Errors as :meth:`read`.
        """
        self._reader.gather(
            self.field,
            self._rows.take(document),
            out.view(np.uint8),
            at * self.dtype.itemsize,
            start=start,
            length=length.astype(np.int64),
        )

    def located(self, document: Ints, start: Ints, length: Ints, at: Ints, room: Any) -> Located:
        """Where pieces of documents are, as :meth:`gather` takes them; ``room``: elements of the memory of each."""
        width, rows = self.dtype.itemsize, self._rows.take(document)
        return self._reader.located(self.field, rows, at * width, room * width, start, length.astype(np.int64))

    def fresh(self) -> Documents:
        """The same documents with files of its own."""
        other = Documents.__new__(Documents)
        vars(other).update(vars(self), _reader=self._reader.fresh())
        return other

    def _loss_spans(self, columns: Mapping[str, Any]) -> tuple[Ints, Ints]:
        """(D,) where the spans of each document end, and (S, 2) the spans; without a column all elements learn."""
        if _SPANS not in columns:
            spans = np.stack([np.zeros(len(self.lengths), np.int64), self.lengths], axis=1)
            return np.arange(1, len(spans) + 1), spans
        ends, values = (np.asarray(part) for part in columns[_SPANS])
        counts = (ends - begins(ends))[self._rows]
        if len(self._rows) == len(ends) and (np.diff(self._rows) == 1).all():
            return ends, values
        return np.cumsum(counts), values[spread(begins(ends)[self._rows], counts)]


def content_of(snapshot: Snapshot, samples: Ints | None = None) -> NDArray[np.uint8]:
    """(n, 16) content hashes of the first input of samples."""
    first = next(iter(snapshot.samples.inputs.values()))
    found: NDArray[np.uint8] = np.asarray(first.content)
    return found if samples is None else found[samples]


def file_of(snapshot: Snapshot, samples: Ints) -> NDArray[np.int32]:
    """(n,) source file of samples, as a position in the snapshot's files."""
    first = next(iter(snapshot.samples.inputs.values()))
    found: NDArray[np.int32] = np.asarray(first.file)[samples]
    return found
