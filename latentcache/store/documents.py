"""The documents of a token cache as columns: where each one's ids lie, and which of its tokens carry loss.

Labels and masks are never stored as tensors: a label is a run of tokens that carry loss, a mask is a length. The
same documents can lie in blocks of a cache or, as a twin for trying things, in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import HASH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """D documents in the order of their sources, S runs of tokens with loss."""

    content: NDArray[np.uint8]
    """(D, 16) hash of each record after its fields were mapped."""
    block: NDArray[np.int32]
    """(D,) which block holds it."""
    start: NDArray[np.uint32]
    """(D,) its first token in the block."""
    length: NDArray[np.uint32]
    """(D,) its tokens."""
    span_ends: NDArray[np.int64]
    """(D,) where its runs end in ``spans``; they begin where those of the document before end."""
    spans: NDArray[np.uint32]
    """(S, 2) first token, counted in the document, and number of tokens of each run; rising, not touching."""
    source: NDArray[np.int32]
    """(D,) which file of the manifest's list it came from."""
    line: NDArray[np.uint32]
    """(D,) its line, or its row, in that file, from 1."""
    sources: tuple[str, ...] = ()
    """The files that ``source`` points into, relative to the data folder."""

    def __len__(self) -> int:
        return len(self.length)

    def runs(self, document: int) -> NDArray[np.uint32]:
        """(n, 2) the runs of one document."""
        return self.spans[int(self.span_ends[document - 1]) if document else 0 : int(self.span_ends[document])]

    def where(self, document: int) -> str:
        """File and line of one document's record, for messages: ``chats.jsonl:17``."""
        source = int(self.source[document])
        name = self.sources[source] if source < len(self.sources) else f"source {source}"
        return f"{name}:{int(self.line[document])}"


def as_items(content: NDArray[np.uint8]) -> NDArray[Any]:
    """(N,) one item for each hash, in the order of its bytes. Of hashes of one length, no zero at the end is lost."""
    return np.ascontiguousarray(content).view(f"S{HASH_BYTES}").ravel()


def take_spans(
    ends: NDArray[np.int64], spans: NDArray[np.uint32], chosen: NDArray[Any]
) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Ends and runs of some documents, in the order in which they are named.

    Args:
        ends: (D,) where the runs of each document end.
        spans: (S, 2) the runs of all.
        chosen: (N,) positions of documents, from 0; one may be named several times.
    """
    begins = np.concatenate([np.zeros(1, dtype=np.int64), ends[:-1]]) if len(ends) else ends
    counts = (ends - begins)[chosen]
    new_ends = np.cumsum(counts, dtype=np.int64)
    rows = np.arange(int(counts.sum()), dtype=np.int64) + np.repeat(begins[chosen] - (new_ends - counts), counts)
    return new_ends, spans[rows]


class TokenStore(Protocol):
    """Documents and their ids. Picklable; usable in forked children; closing or forgetting it lets go of files."""

    documents: Documents
    """The columns."""

    def ids(self, document: int) -> NDArray[Any]:
        """(n,) ids of one document, uint16 or uint32, read-only.

        Raises:
            CorruptEntryError: Its block fails its check; ``sample`` is ``documents.where(document)``.
            MissingEntryError: Its shard is gone.
        """

    def gather(
        self,
        document: NDArray[np.integer],
        start: NDArray[np.integer],
        length: NDArray[np.integer],
        out: NDArray[Any],
        at: NDArray[np.integer],
    ) -> None:
        """Copy pieces of documents into their places. Called many times a second.

        Args:
            document: (P,) which document each piece is of.
            start: (P,) first token of the piece in its document.
            length: (P,) tokens in the piece; pieces lie inside their documents.
            out: (n,) uint16 or uint32, as the recipe's ``dtype`` says, C-contiguous; what lies between the pieces is
                left as it is. Not all of them are written when an error is raised.
            at: (P,) where each piece begins in ``out``.

        Raises:
            CorruptEntryError: A block fails its check.
            MissingEntryError: A shard is gone.
        """


class MemoryTokens:
    """A :class:`TokenStore` in memory.

    Args:
        ids: The ids of each document.
        spans: The runs with loss of each document; all of it where they are not given.
    """

    def __init__(
        self, ids: Sequence[Sequence[int]], spans: Sequence[Sequence[tuple[int, int]]] | None = None
    ) -> None:
        self._ids = [np.array(document, dtype=np.uint32) for document in ids]
        runs = [[(0, len(document))] for document in ids] if spans is None else spans
        lengths = np.array([len(document) for document in ids], dtype=np.uint32)
        count = np.arange(len(ids), dtype=np.int32)
        self.documents = Documents(
            content=np.zeros((len(ids), 16), dtype=np.uint8),
            block=count,
            start=np.zeros_like(lengths),
            length=lengths,
            span_ends=np.cumsum([len(some) for some in runs], dtype=np.int64),
            spans=np.array([run for some in runs for run in some], dtype=np.uint32).reshape(-1, 2),
            source=np.zeros_like(count),
            line=count.astype(np.uint32) + 1,
            sources=("memory",),
        )

    def ids(self, document: int) -> NDArray[Any]:
        """The ids of one document."""
        return self._ids[document]

    def gather(
        self,
        document: NDArray[np.integer],
        start: NDArray[np.integer],
        length: NDArray[np.integer],
        out: NDArray[Any],
        at: NDArray[np.integer],
    ) -> None:
        """Copy pieces into their places."""
        pieces = zip(document.tolist(), start.tolist(), length.tolist(), at.tolist(), strict=True)
        for number, first, count, place in pieces:
            out[place : place + count] = self._ids[number][first : first + count]
