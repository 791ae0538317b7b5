"""Says what a build sets out to make, so that a training process can begin before it ends (``--stream``).

Decides nothing: rows and samples are those that ``assemble`` will publish if every planned sample can be used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from latentcache.store.coming import Announcement, ArrivalLog, announce
from latentcache.store.layout import CacheLayout


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
    """Tells followers which content samples have; nothing before :meth:`begin`. Use as a context manager."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._log: ArrivalLog | None = None
        self._number: dict[int, int] = {}

    def begin(self, layout: CacheLayout, coming: Announcement, work: Survey) -> None:
        """Say what the build will hold.

        Args:
            layout: The cache.
            coming: Of :func:`announcement`.
            work: What the numbers of samples are positions of.

        Raises:
            StoreError: The cache cannot be written.
        """
        path: Path = announce(layout, coming)
        self._log = self._stack.enter_context(ArrivalLog(path))
        self._number = {item.index: number for number, item in enumerate(_in_order(work))}

    def looked(self, index: int, content: bytes) -> None:
        """A sample was read.

        Args:
            index: Its position in the scan.
            content: Its content hash.
        """
        if self._log is not None:
            self._log.usable([(self._number[index], content)])

    def refused(self, index: int) -> None:
        """A sample cannot be used after all."""
        if self._log is not None:
            self._log.refused([self._number[index]])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _in_order(work: Survey) -> list[Planned]:
    """The samples of the generation to be."""
    return sorted([*work.known, *work.todo], key=lambda item: item.index)


def _rows(items: Any) -> Any:
    return np.frombuffer(b"".join(items), dtype=np.uint8).reshape(-1, HASH_BYTES).copy()


def _pairs(items: Sequence[tuple[int, int]]) -> Any:
    return np.array(items, dtype=np.uint32).reshape(-1, 2)
