"""The rank of this process and the number of ranks: given, or found, and said by ``repr(loader)``.

Data-parallel ranks differ from global ones under tensor and pipeline parallelism, so numbers that are given together
are believed. If neither is given, torch.distributed decides, then RANK and WORLD_SIZE of the environment.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from latentcache.errors import UsageError
from latentcache.plan.numbers import whole

#: Classes of accelerate that deal the batches of a DataLoader out to ranks (``accelerate/data_loader.py``).
_SHARDING = {"DataLoaderDispatcher", "DataLoaderShard", "IterableDatasetShard"}


def find_ranks(rank: int | None, world_size: int | None) -> tuple[int, int, str]:
    """The rank, the number of ranks, and where they are from."""
    source: str = "given"
    numbers: tuple[Any, Any] = rank, world_size
    if (rank is None) != (world_size is None):
        name, missing = ("rank", "world_size") if world_size is None else ("world_size", "rank")
        raise UsageError(
            f"{name}={rank if world_size is None else world_size!r}: {missing} is missing",
            why="one number alone does not say which part of each step this process gets",
            fix="pass rank and world_size, or neither",
        )
    if rank is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        numbers = (torch.distributed.get_rank(), torch.distributed.get_world_size())
        source = "torch.distributed"
    elif rank is None:
        texts = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
        numbers = (0, 1)
        source = "one process"
        if texts != (None, None):
            try:
                numbers = (int(texts[0] or ""), int(texts[1] or ""))
                source = "environment"
            except ValueError:
                raise UsageError(
                    f"RANK={texts[0]} and WORLD_SIZE={texts[1]} in the environment do not say the rank",
                    fix="pass rank and world_size",
                ) from None
    total = whole("world_size", numbers[1], 1)
    return whole("rank", numbers[0], 0, total - 1, why="ranks count from 0"), total, source


def check_ranks(rank: int, world_size: int, source: str) -> None:
    """Raise an error if torch.distributed, started after a loader was made, says other numbers."""
    if source == "given" or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    now = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if now != (rank, world_size):
        raise UsageError(
            f"the loader is that of rank {rank} of {world_size} ({source}), this is rank {now[0]} of {now[1]}",
            why="it was made before torch.distributed was started here, and other ranks would serve the same samples",
            fix="make the loader after init_process_group, or pass rank and world_size",
        )


def check_double_sharding(world_size: int) -> None:
    """Raise an error if a class of accelerate would shard the batches of one rank a second time."""
    frame = sys._getframe() if world_size > 1 and "accelerate" in sys.modules else None
    while frame is not None:
        if type(frame.f_locals.get("self")).__name__ in _SHARDING:
            raise UsageError(
                "a loader of one rank was given to accelerator.prepare inside a DataLoader",
                why="the batches of this rank would be dealt out to all ranks again, and samples lost",
                fix="iterate over the loader itself, or keep its DataLoader out of accelerator.prepare",
                slug="sharded-twice",
            )
        frame = frame.f_back
