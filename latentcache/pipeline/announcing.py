"""Says what a build sets out to make, so that a training process can begin before it ends (``--stream``).

Decides nothing: rows and samples are those that ``assemble`` will publish if every planned sample can be used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from latentcache.errors import UsageError
from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.survey import Survey
from latentcache.pipeline.work import Planned
from latentcache.recipe import Recipe
from latentcache.store.columns import StringColumn
from latentcache.store.coming import Announcement, ArrivalLog


def announcement(work: Survey, recipe: Recipe, facts: Mapping[str, Any], *, before: int) -> Announcement:
    """What a build will hold, as far as it is known before a picture is read.

    Args:
        work: What is known, and what is to be read.
        recipe: Of the build.
        facts: ``source`` and ``demo`` for the manifest.
        before: Generation that is current, 0 without one.

    Raises:
        UsageError: The recipe stores mirrored pictures, whose turns depend on what is not known yet.
    """
    if recipe.geometry.flip:
        raise UsageError(
            "--stream and --flip were both given",
            why="which picture is served mirrored depends on contents that are not known yet",
            fix="leave one of the two out",
        )
    planned = _in_order(work)
    placed = [(number, place) for number, item in enumerate(planned) for place in item.placements]
    buckets = tuple(sorted({place.bucket for _, place in placed}, key=lambda size: (-size.area, size.width)))
    return Announcement(
        recipe=recipe,
        names=StringColumn.of(item.sample.name for item in planned),
        captions=StringColumn.of(item.sample.caption for item in planned),
        content=_rows(item.content or bytes(HASH_BYTES) for item in planned),
        original_size=_pairs([(item.size.height, item.size.width) for item in planned]),
        sample=np.array([number for number, _ in placed], dtype=np.int32),
        bucket=np.array([buckets.index(place.bucket) for _, place in placed], dtype=np.int32),
        crop=_pairs([(place.crop.top, place.crop.left) for _, place in placed]),
        resize=_pairs([(place.resize.height, place.resize.width) for _, place in placed]),
        buckets=buckets,
        facts=facts,
        before=before,
    )


class Announcer:
    """Tells followers what became of samples; nothing before :meth:`begin`. Use as a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._log: ArrivalLog | None = None
        self._numbers: Callable[[Any], Sequence[int]] = lambda _: ()

    def begin(self, log: Path, numbers: Callable[[Any], Sequence[int]]) -> None:
        """Followers may come: the build has been announced.

        Args:
            log: Of the announcement.
            numbers: From what the build calls a sample to its numbers in the announcement.

        Raises:
            StoreError: The cache cannot be written.
        """
        self._log, self._numbers = self._stack.enter_context(ArrivalLog(log)), numbers

    def looked(self, sample: Any, content: bytes) -> None:
        """A sample was read.

        Args:
            sample: As the build calls it.
            content: Its content hash.
        """
        if self._log is not None:
            self._log.usable((number, content) for number in self._numbers(sample))

    def refused(self, sample: Any) -> None:
        """A sample cannot be used after all."""
        if self._log is not None:
            self._log.refused(self._numbers(sample))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def numbers_of(work: Survey) -> Callable[[int], Sequence[int]]:
    """From the position of a sample in the scan to its number in the announcement."""
    number = {item.index: [number] for number, item in enumerate(_in_order(work))}
    return lambda index: number[index]


def _in_order(work: Survey) -> list[Planned]:
    """The samples of the generation to be."""
    return sorted([*work.known, *work.todo], key=lambda item: item.index)


def _rows(items: Any) -> Any:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(-1, HASH_BYTES).copy()


def _pairs(items: Sequence[tuple[int, int]]) -> Any:
    return np.array(items, dtype=np.uint32).reshape(-1, 2)
