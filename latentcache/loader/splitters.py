"""Whether something would deal the batches of one rank out to all ranks once more, which loses samples in silence.

Decides by who is asking: classes of accelerate that stand among the callers. They name the epoch to a data set in the
process that trains, on every rank, before they ask it for anything; so it does not matter which workers serve it.
Guarantee: nothing of accelerate is imported. Cost: none where accelerate is not loaded, else a look at the callers.
"""

from __future__ import annotations

import sys

from latentcache.errors import UsageError

#: Classes of accelerate that deal batches out to ranks (``accelerate/data_loader.py``).
_SPLITTERS = {"DataLoaderDispatcher", "DataLoaderShard", "IterableDatasetShard"}


def refuse_a_second_split(world_size: int) -> None:
    """Nothing, unless accelerate deals out what a loader of so many ranks serves.

    Args:
        world_size: Number of ranks that the loader was made for.

    Raises:
        UsageError: It does.
    """
    if world_size > 1 and _is_split_by_accelerate():
        raise UsageError(
            "a loader of one rank was given to accelerator.prepare inside a DataLoader",
            why="the batches of this rank would be dealt out to all ranks once more, and samples lost",
            fix="iterate over the loader itself, or keep its DataLoader out of accelerator.prepare",
            slug="sharded-twice",
        )


def _is_split_by_accelerate() -> bool:
    """Whether one of its classes is among those that wait for this call (seen also by workers made with fork)."""
    frame = sys._getframe() if "accelerate" in sys.modules else None
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ in _SPLITTERS:
            return True
        frame = frame.f_back
    return False
