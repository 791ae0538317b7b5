"""The loader as an iterable data set: for trainers and loaders that split a data set over worker processes.

Guarantee: whole batches go to workers in turn (batch j to worker j mod W), so the batches and their order are those
of the loader for any number of workers, and ``len`` is exact. A saved position is exact for 0 and more workers with
torchdata's ``StatefulDataLoader``; what is left of a complete epoch is nothing. Give it to a loader with
``batch_size=None``: the batches are made already. Cost: that of the loader, in each worker for its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from latentcache.errors import UsageError
from latentcache.loader.epochs import Epochs
from latentcache.loader.loader import Batch
from latentcache.loader.shared_numbers import SharedNumbers
from latentcache.loader.splitters import refuse_a_second_split
from latentcache.loader.told import LAST_EPOCH
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.given_numbers import is_whole

#: Places of what is shared with workers.
_EPOCH, _NAMED = range(2)


class IterableBatches(IterableDataset[Batch]):
    """The batches of a loader, dealt out over the workers of a ``DataLoader``.

    Args:
        loader: Is used here from now on: its epoch and position are those of this object.
    """

    def __init__(self, loader: Epochs) -> None:
        self._loader = loader
        loader.told.own()  # workers may be started next
        self._skip: int | None = None
        self._loaded = False
        # workers that outlive an epoch see a later set_epoch, and whether there was one
        self._shared = SharedNumbers(_shared(loader.epoch), 0)
        self._seen = loader.epoch

    def __len__(self) -> int:
        """Batches of an epoch on this rank, of all workers together."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass serves; a resumed epoch that is named again goes on.

        Raises:
            UsageError: It is no whole number from 0, or none of 64 bits.
        """
        self._turn(_shared(epoch))  # first: it refuses, and workers must not see what was refused
        self._own()
        self._shared[_EPOCH], self._shared[_NAMED] = self._seen, 1

    def state_dict(self) -> dict[str, Any]:
        """The loader's position, and how many batches other workers serve before this one's next."""
        state = self._loader.state_dict()
        return state if self._skip is None else {**state, "skip": self._skip}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was made, one of this object or one of a plain loader.

        Raises:
            PlanError: The checkpoint belongs to other entries or another policy, or is newer than this version.
        """
        self._loader.load_state_dict(state)
        self._skip, self._loaded, self._seen = state.get("skip"), True, self._loader.epoch
        self._own()
        if get_worker_info() is None:
            self._shared[_NAMED] = 0
        if not self._shared[_NAMED]:  # torchdata loads in the workers of one pass: those of the next must hear of it
            self._shared[_EPOCH] = _shared(self._seen)

    def __iter__(self) -> Iterator[Batch]:
        """Serve this worker's share of the epoch, or of what is left of it.

        Raises:
            UsageError: Something would deal the batches of this rank out to all ranks once more.
            CorruptEntryError: An entry fails its check.
            MissingEntryError: A shard is gone.
        """
        refuse_a_second_split(self._loader.report.batches.world_size)
        self._own()
        if not self._loaded and self._seen != self._shared[_EPOCH]:
            self._turn(self._shared[_EPOCH])
        info = get_worker_info()
        loaded, self._loaded = self._loaded, False
        if loaded and not self._loader.remaining():
            return iter(())
        if info is None:
            self._skip = None
            return iter(self._loader)
        if not loaded or self._skip is None:
            self._skip = info.id
        # begins here and not with the first batch: a checkpoint may be made before this worker has served one
        plan = self._loader.position.begin()
        return self._share(plan, info.num_workers, self._loader.position.passing, self._loader.position.steps)

    def _share(self, plan: EpochPlan, workers: int, passing: int, before: int) -> Iterator[Batch]:
        """Every ``workers``-th batch; the position counts the batches of the others as served.

        Raises:
            UsageError: The others serve another epoch.
        """
        epoch = self._loader.epoch
        self._loader.told.begin(epoch)
        for step in range(self._skip or 0, len(plan), workers):
            batch = self._loader.batch_of_plan(plan.batch(step, self._loader.rank), epoch, before + step)
            self._loader.position.advance((self._skip or 0) + 1, of=passing)
            self._skip = workers - 1
            yield batch

    def _turn(self, epoch: int) -> None:
        """Go to an epoch; the place in the one it is in already stays."""
        before = self._loader.epoch
        self._loader.set_epoch(epoch)
        self._seen = self._loader.epoch
        if self._seen != before:
            self._skip, self._loaded = None, False

    def _own(self) -> None:
        """In the process that trains, if it is not the one where this was made."""
        if get_worker_info() is None:
            self._shared.own()


def as_iterable(loader: Epochs) -> IterableBatches:
    """A loader as a torch ``IterableDataset`` with a length, for any number of workers.

    Args:
        loader: Made for this rank; it is used by the result from now on.
    """
    return IterableBatches(loader)


def _shared(epoch: int) -> int:
    """An epoch that workers can be told of.

    Raises:
        UsageError: It has more than 64 bits.
    """
    if is_whole(epoch, LAST_EPOCH + 1):
        why = f"workers are told of an epoch in 64 bits, up to {LAST_EPOCH}"
        raise UsageError(f"epoch {epoch!r}", why=why, fix="number the epochs from 0: set_epoch(0)")
    return epoch
