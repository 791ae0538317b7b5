"""Rows of documents that a build under way is still tokenising: one document to a row, waited for batch by batch.

Decides what can be promised before a document is tokenised: its row, and so the number of rows, where each document
has exactly one. Guarantee: a row that comes is the row of the finished cache; one that cannot be (its record is
refused, it is too long, nothing is learned of it) is an error that names file and line. Cost: that of a finished
cache, and 1.3 ms of CPU a batch of 16 rows (docs/log.md, 2026-11-22).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.loader.token_rows import RowArrays, RowReader
from latentcache.plan.pieces import Idle, Overflow, check_policies
from latentcache.plan.row_kinds import padded_rows
from latentcache.plan.rows import Corpus, RowPlan
from latentcache.store.documents import Documents
from latentcache.store.token_reader import TokenReader
from latentcache.token_recipe import TokenRecipe

_KNOWN = "padded(max_length, overflow='truncate_right', idle='error'), which has a row for each document"
#: Policies for longer documents that leave every document exactly one row.
ONE_ROW: tuple[Overflow, ...] = ("error", "truncate_right", "truncate_left")


class FollowedRows:
    """Fills arrays with rows of documents that arrive. Picklable; in the place of a :class:`RowReader`.

    Args:
        store: The documents.
        chosen: (R,) the document of each row.
        max_length: Tokens in a row.
        overflow: What becomes of longer documents; one of :data:`ONE_ROW`.

    Raises:
        UsageError: No such policy, or rows of fewer than 2 tokens.
    """

    def __init__(self, store: TokenReader, chosen: NDArray[np.int32], *, max_length: int, overflow: Overflow) -> None:
        check_policies(max_length, overflow, "error")
        self.store, self.dtype = store, store.dtype
        self._chosen, self._max, self._overflow = chosen, max_length, overflow

    def __len__(self) -> int:
        return len(self._chosen)

    @property
    def plan(self) -> RowPlan:
        """Not known yet.

        Raises:
            UsageError: Always.
        """
        unknown("which tokens stand in which row")

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Not known yet.

        Raises:
            UsageError: Always.
        """
        unknown("how many tokens a row has")

    def where(self, row: int) -> str:
        """File and line of a row."""
        return self.store.documents.where(int(self._chosen[row]))

    def tokens_of(self, rows: NDArray[np.integer]) -> NDArray[np.int64]:
        """(n,) tokens of some rows; waits for them.

        Raises:
            MissingEntryError: A record cannot be used after all.
            NotYetEncodedError: It did not come in time.
        """
        length = self.store.ready(self._chosen[rows]).length
        return np.minimum(length.astype(np.int64), self._max)

    def fill(
        self,
        rows: NDArray[np.integer],
        lengths: NDArray[np.int64],
        out: RowArrays,
        at: NDArray[np.int64],
        narrow: NDArray[Any],
        *,
        pad_id: int,
        left: bool,
    ) -> None:
        """Read rows and put them into their places, as :meth:`RowReader.fill`.

        Raises:
            PlanError: A document is too long, or nothing is learned of it.
            CorruptEntryError: A document fails its check.
            MissingEntryError: A record cannot be used after all, or a shard is gone.
            NotYetEncodedError: It did not come in time.
        """
        numbers = self._chosen[rows]
        some = _Some(self.store, numbers, self.store.ready(numbers))
        corpus = Corpus(
            length=some.documents.length,
            span_ends=some.documents.span_ends,
            spans=some.documents.spans,
            where=some.documents.where,
        )
        plan = padded_rows(corpus, self._max, overflow=self._overflow, idle="error")
        reader = RowReader(some, corpus, plan, dtype=self.dtype.name)
        reader.fill(np.arange(len(rows)), lengths, out, at, narrow, pad_id=pad_id, left=left)


class _Some:
    """Some documents of a reader, numbered from 0: a ``TokenStore`` for one batch."""

    def __init__(self, store: TokenReader, numbers: NDArray[np.int32], documents: Documents) -> None:
        self._store, self._numbers, self.documents = store, numbers, documents

    def ids(self, document: int) -> NDArray[Any]:
        found: NDArray[Any] = self._store.ids(int(self._numbers[document]))
        return found

    def gather(
        self,
        document: NDArray[np.integer],
        start: NDArray[np.integer],
        length: NDArray[np.integer],
        out: NDArray[Any],
        at: NDArray[np.integer],
    ) -> None:
        self._store.gather(self._numbers[document], start, length, out, at)


def check_followed(max_length: int, overflow: Overflow, idle: Idle, lengths: Sequence[int] | None) -> None:
    """Refuse padded rows whose number or order would depend on what is not known yet.

    Raises:
        UsageError: They would.
    """
    if overflow in ONE_ROW and idle == "error" and list(lengths or [max_length]) == [max_length]:
        return
    said = f"overflow={overflow!r}, idle={idle!r}" + (f", lengths={list(lengths)}" if lengths else "")
    unknown(
        f"how many rows there are, with {said},",
        fix=f"{_KNOWN} (overflow='truncate_left' or 'error' too), or wait for the end of the build",
    )


def unknown(what: str, fix: str = "") -> NoReturn:
    """Refuse what follows from lengths of documents.

    Args:
        what: What is asked for.
        fix: What can be had, where it is something else than a row for each document.

    Raises:
        UsageError: Always.
    """
    raise UsageError(
        f"{what} is not known while the build is under way",
        why="it follows from how many tokens each document has, and that is known when all are tokenised",
        fix=fix or f"wait for the end of the build, or use {_KNOWN}",
        slug="not-known-yet",
    )


def coming_name(recipe: TokenRecipe, documents: Documents) -> str:
    """What stands for the fingerprint of documents whose tokens are not known: recipe and records, in their order."""
    return "coming:" + content_hash(recipe.recipe_id + documents.content.tobytes()).hex()
