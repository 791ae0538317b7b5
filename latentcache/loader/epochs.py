"""What every loader says of its epochs: how many batches, which epoch, where in it, and how training goes on there.

Guarantee: numbers are exact before anything is read, the same on every rank, and count as trainers count; ``len`` is
the whole epoch, also after a resume (Lightning compares it with its own counter).
"""

from __future__ import annotations

import contextlib
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import get_worker_info

from latentcache.errors import UsageError
from latentcache.loader.position import Position
from latentcache.loader.prefetch import read_ahead
from latentcache.loader.served import Served, Tally
from latentcache.loader.splitters import refuse_a_second_split
from latentcache.loader.told import Told
from latentcache.loader.transfer import Sent, Transfer
from latentcache.plan.batches import MAX_STEP, BatchPlan, PlanReport
from latentcache.plan.epoch import EpochPlan
from latentcache.plan.given_numbers import is_whole, real, whole


class Epochs(ABC):
    """A loader: ``report`` and ``_position`` say what it serves. A subclass sets them."""

    report: PlanReport
    rank: int
    _position: Position
    _told: Told
    _threads = 1
    """That read ahead."""
    _tally: Tally | None = None

    @abstractmethod
    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Serve the epoch, or what is left of it after ``load_state_dict``."""

    @abstractmethod
    def batch(self, rows: list[int], epoch: int | None = None) -> dict[str, Any]:
        """One batch of the given entries, as this epoch or a given one serves them."""

    @abstractmethod
    def batch_of_plan(self, entries: NDArray[np.integer], epoch: int, step: int) -> dict[str, Any]:
        """One batch of a plan of this loader, whose entries need no look.

        Args:
            entries: (B,) those of a step on this rank.
            epoch: Number of the epoch.
            step: Number of the step in it.
        """

    def __len__(self) -> int:
        """Batches of an epoch on this rank (the same on every rank)."""
        self._told.own()  # whoever asks may start workers next
        return self.report.steps

    @property
    def sampler(self) -> Self:
        """The loader itself, for trainers that call ``loader.sampler.set_epoch`` and nothing else (Lightning)."""
        return self

    @property
    def position(self) -> Position:
        """Where this loader stands; shared with what serves its batches in another way."""
        return self._position

    @property
    def told(self) -> Told:
        """What workers hear of this loader; shared in the same way."""
        return self._told

    def steps(self, epochs: float, grad_accum: int = 1) -> int:
        """Optimizer steps of so many epochs; what is left at the end of an epoch is a step too.

        Counted as the Trainer of transformers counts (``set_initial_training_values``).

        Args:
            epochs: Passes over the data, also a fraction.
            grad_accum: Batches of this rank per optimizer step.

        Raises:
            UsageError: Fewer epochs than none, or no such number of batches.
        """
        passes = real("epochs", epochs, 0, why="epochs are counted from 0", fix="steps(2), or 0.5")
        return math.ceil(passes * self._steps_of_epoch(grad_accum))

    def epoch_at(self, step: int, grad_accum: int = 1) -> float:
        """Epochs that are done after so many optimizer steps; the whole part is the epoch to set next.

        Args:
            step: Optimizer steps since the start of training.
            grad_accum: Batches of this rank per optimizer step.

        Raises:
            UsageError: No such step, or no such number of batches.
        """
        if not is_whole(step, 0):
            raise UsageError(f"step {step!r}", why="steps are whole numbers that count from 0", fix="epoch_at(0)")
        whole, part = divmod(step, self._steps_of_epoch(grad_accum))
        return whole + part * grad_accum / len(self)

    def _steps_of_epoch(self, grad_accum: int) -> int:
        """Optimizer steps of an epoch."""
        return math.ceil(len(self) / whole("grad_accum", grad_accum, 1, why="a step takes whole batches"))

    @property
    def epoch(self) -> int:
        """Number of the epoch that the next pass serves."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass serves; a resumed epoch that is named again goes on.

        Raises:
            UsageError: It is no whole number from 0, or something would deal the batches of this rank out to all
                ranks once more.
        """
        refuse_a_second_split(self.report.batches.world_size)
        epoch = checked_epoch(epoch)
        moved = epoch != self.epoch
        self._position.set_epoch(epoch)
        self._told.say(self.epoch, moved=moved)

    def remaining(self) -> int:
        """Batches of this rank that are left of the epoch."""
        return self._position.remaining()

    def served(self, epoch: int | None = None) -> dict[str, Served]:
        """What was served of each data set until now, on all ranks together, by its name in the mixture.

        By the numbers of epochs: those before this one count as whole, whatever was iterated over, and this one as
        far as it went. Without weights everything is called ``all``.

        Args:
            epoch: Only in this one.

        Raises:
            UsageError: It is no whole number from 0.
        """
        if epoch is not None and not is_whole(epoch, 0):
            raise UsageError(f"epoch {epoch!r}", why="epochs are whole numbers that count from 0", fix="served(0)")
        tally = self._tally
        if tally is None or tally.position is not self._position:
            tokens, entries = self._tokens_of_entries(), len(self._position.entries.bucket)
            self._tally = tally = Tally(self._position, self.report.mixture, entries, tokens)
        return tally.of(range(self.epoch + 1) if epoch is None else [int(epoch)])

    def _tokens_of_entries(self) -> NDArray[np.integer] | None:
        """(N,) tokens of each entry, where it has any and they are known."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Where training stands, as plain values: batches handed out, not batches read ahead. Equal on all ranks.

        Raises:
            UsageError: Worker processes served batches of this epoch, which this process knows nothing of.
        """
        if self._told.served_by_workers:
            raise UsageError(
                "the loader's position does not count what worker processes served",
                why=f"it would say that nothing was served of epoch {self.epoch} yet, or no more than was loaded",
                fix="save the state_dict() of a torchdata StatefulDataLoader over as_iterable(loader); after the last"
                " batch of an epoch, set_epoch to the next one first",
                slug="served-by-workers",
            )
        return self._position.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a checkpoint was made, also with another batch size or number of ranks.

        The next pass serves the rest of that epoch; ``len`` stays the whole epoch.

        Raises:
            PlanError: The checkpoint belongs to other entries or another policy, is of a newer version, or cannot be.
        """
        seed = self._position.seed
        self._position.load(state)
        if get_worker_info() is None:
            self._told.say(self.epoch, moved=True, reordered=self._position.seed != seed)
        else:
            self._told.resumed(self.epoch)

    @abstractmethod
    def close(self) -> None:
        """Stop reading ahead and let go of what is open. Twice is once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_passes", "_tally")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _passes=weakref.WeakSet())

    def _begin(self, batches: BatchPlan, *, rank: int, prefetch: int, device: str | torch.device) -> None:
        """What every loader has.

        Raises:
            UsageError: No such rank or device, or no such number of batches to read ahead.
            DeviceError: The device is not there.
        """
        if not is_whole(rank, 0) or rank >= batches.world_size:
            what = f"rank {rank!r} of {batches.world_size}"
            raise UsageError(
                what, why="ranks are whole numbers that count from 0", fix="pass rank and world_size of this process"
            )
        self._prefetch = whole("prefetch", prefetch, 0, MAX_STEP, why="that many batches cannot wait")
        self.rank, self._transfer, self._told = int(rank), Transfer(device), Told()
        self._passes: weakref.WeakSet[Generator[Sent]] = weakref.WeakSet()

    def _entries_of(self, step: int) -> NDArray[np.integer]:
        """This rank's entries of one step; in a worker those of the epoch that was set before its pass began.

        Raises:
            IndexError: No such step.
            UsageError: A worker cannot tell of which epoch it is.
        """
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of an epoch of {len(self)}")
        self._position.set_epoch(self._told.hear(step, self.epoch))
        return self._position.whole().batch(step, self.rank)

    def _serve(self, plan: EpochPlan, send: Callable[[int], Sent]) -> Iterator[dict[str, Any]]:
        """The batches of a pass, read ahead.

        Args:
            plan: What the pass serves; it began just now.
            send: Makes the batch of a step.

        Raises:
            UsageError: The loader was closed in the middle.
        """
        batches = read_ahead(send, range(len(plan)), self._prefetch, threads=self._threads)
        self._told.served_here()
        served, passing = 0, self._position.passing
        self._passes.add(batches)
        for batch in batches:
            self._position.advance(of=passing)  # before it is handed out: a checkpoint made then has this batch
            served += 1
            yield self._transfer.receive(batch)
        if served < len(plan):
            raise UsageError(
                f"the loader was closed after {served} of {len(plan)} batches",
                why="a pass that ends early would look like a whole epoch",
                fix="close it after the epoch, or iterate again",
            )

    def _stop(self) -> None:
        """End the passes that are under way."""
        for batches in list(self._passes):
            with contextlib.suppress(ValueError):  # another thread is in it; it goes on
                batches.close()


def checked_epoch(epoch: int) -> int:
    """An epoch as a plain number.

    Raises:
        UsageError: It is no whole number from 0.
    """
    if not is_whole(epoch, 0):
        raise UsageError(f"epoch {epoch!r}", why="epochs are whole numbers that count from 0", fix="set_epoch(0)")
    return int(epoch)


def checked_seed(seed: int) -> int:
    """A seed as a plain number: one of numpy is too small for what is computed with it, and no JSON.

    Raises:
        UsageError: It is no whole number.
    """
    if not is_whole(seed):
        raise UsageError(f"seed={seed!r}", why="seeds are whole numbers", fix="seed=0, or seed=int(...) of yours")
    return int(seed)
