"""What workers are told while they live: the epoch that the process which trains has set, heard as a pass begins.

Workers of a ``DataLoader`` hold copies of a loader, and ``persistent_workers=True`` keeps them for every epoch.
Decides which epoch such a copy serves. Guarantee: a pass is of one epoch, in every worker. What is set between two
passes holds from the next one; what is set in the middle changes none of its batches, and where a worker began the
pass before and another after it, that is an error and not a mixture. Where it cannot be seen that a pass begins,
because a sampler has an order of its own, another epoch is an error too. Cost: a batch reads a few numbers in memory.
"""

from __future__ import annotations

from torch.utils.data import get_worker_info

from latentcache.errors import UsageError
from latentcache.loader.shared_numbers import SharedNumbers

#: Most that workers can be told.
LAST_EPOCH = 2**63 - 1
_EPOCH, _ORDERS, _TIMES, _PASS, _SERVED, _RESUMED = range(6)
_UNTELLABLE = -1
#: What names a pass in one number: the seed that torch drew for its workers with what was said before they were made
#: (a program may seed torch alike before every epoch), which pass of theirs it is, and behind these its epoch.
_SEED_BITS, _PASS_BITS, _EPOCH_BITS = 30, 12, 20


class Told:
    """Of one loader and its copies in workers. Picklable."""

    def __init__(self) -> None:
        self._numbers = SharedNumbers(0, 0, 0, 0, 0, 0)
        self._heard, self._orders, self._passes = 0, 0, 0
        self._last: int | None = None
        self._born: int | None = None
        self._in_order, self._counts = True, True

    @property
    def served_by_workers(self) -> bool:
        """Whether workers have served batches of what was said last: no position in this process knows of them."""
        return get_worker_info() is None and bool(self._numbers[_SERVED])

    def own(self) -> None:
        """Before this process starts workers; in a worker nothing."""
        if get_worker_info() is None:
            self._numbers.own()

    def say(self, epoch: int, *, moved: bool, reordered: bool = False) -> None:
        """To workers, those that are there already too: what the next pass serves. A worker says nothing.

        Args:
            epoch: Number of the epoch.
            moved: Whether the position is another one now, which has nothing to do with what workers served.
            reordered: Whether the order of epochs is another one now, by a checkpoint of another seed.
        """
        if get_worker_info() is not None:
            return
        self._numbers.own()
        self._heard, self._orders = self._heard + 1, self._orders + reordered
        self._numbers[_EPOCH] = epoch if epoch <= LAST_EPOCH else _UNTELLABLE
        self._numbers[_ORDERS], self._numbers[_SERVED] = self._orders, self._numbers[_SERVED] and not moved
        self._numbers[_RESUMED] = 0
        self._numbers[_TIMES] = self._heard  # last: it says that the others are there

    def resumed(self, epoch: int) -> None:
        """In a worker: it was loaded with a checkpoint of this epoch, and goes on there until another one is said.

        Where nothing was said, the workers of later passes go on with that epoch too, as one process would.
        """
        self._counts = False  # of the rest of an epoch some workers see nothing: they would count one pass less
        if not (self._numbers[_TIMES] or self._numbers.foreign) and epoch <= LAST_EPOCH:
            self._numbers[_EPOCH], self._numbers[_RESUMED] = epoch, 1

    def served_here(self) -> None:
        """A pass began in this process, and a position counts it."""
        if get_worker_info() is None:
            self._numbers.own()
            self._numbers[_SERVED] = 0

    def hear(self, step: int, epoch: int) -> int:
        """In a worker: the epoch that a step is served of, one by its step after the other.

        Args:
            step: Number of the batch in its epoch.
            epoch: The epoch that this copy serves so far.

        Raises:
            UsageError: It cannot be told which one, or other workers serve this pass of another one.
        """
        info = get_worker_info()
        if info is None:
            return epoch
        begins = self._last is None or step == info.id
        self._in_order &= begins or step == (self._last or 0) + info.num_workers
        self._last = step
        times = self._numbers[_TIMES]
        if begins or not self._in_order:
            epoch = self._next(epoch, times)
        if begins:
            self.begin(epoch)
            self._heard = times  # not where that was refused: the next pass must hear it again
        return epoch

    def begin(self, epoch: int) -> None:
        """In a worker: it begins its share of a pass, of this epoch.

        Raises:
            UsageError: Another worker serves this pass of another epoch, or nothing can be heard here.
        """
        info = get_worker_info()
        assert info is not None
        self._passes += 1
        self._born = self._heard if self._born is None else self._born
        if self._numbers.foreign:
            self._refuse_another_pass()
            return
        self._numbers[_SERVED] = 1
        if not self._counts:
            return
        drawn = (info.seed - info.id + self._born) % (1 << _SEED_BITS)
        pass_ = drawn << _PASS_BITS | self._passes % (1 << _PASS_BITS)
        served, last = pass_ << _EPOCH_BITS | epoch % (1 << _EPOCH_BITS), self._numbers[_PASS]
        self._numbers[_PASS] = served
        if last >> _EPOCH_BITS == pass_ and last != served:
            other = last % (1 << _EPOCH_BITS)
            raise UsageError(
                f"a pass over worker processes is of epoch {epoch} here and of {other} in another",
                why="an epoch was set after the pass had begun: samples would come twice, and others not at all",
                fix="call set_epoch before iter(...) of the DataLoader",
                slug="epoch-in-a-pass",
            )

    def _refuse_another_pass(self) -> None:
        if self._passes > 1:
            raise UsageError(
                "workers that stay cannot be told of an epoch by a loader that came from another process",
                fix="call set_epoch before the first pass over the DataLoader, or make the loader where it is used",
            )

    def _next(self, epoch: int, times: int) -> int:
        """The epoch that was said, if anything was said since this was asked last; else the one that is served.

        Raises:
            UsageError: It cannot be served from here on.
        """
        if self._numbers.foreign:
            return epoch
        if times == self._heard:
            return self._numbers[_EPOCH] if self._numbers[_RESUMED] else epoch
        said = self._numbers[_EPOCH]
        if self._numbers[_ORDERS] != self._orders:
            raise _deaf("a checkpoint of another seed was loaded after they had started")
        if said == _UNTELLABLE:
            raise _deaf(f"they are told of an epoch in 64 bits, up to {LAST_EPOCH}")
        if said != epoch and not self._in_order:
            raise _deaf("steps come in an order of a sampler's own, so that nobody sees where a pass begins")
        return said


def _deaf(why: str) -> UsageError:
    return UsageError(
        "workers that stay cannot serve the epoch that was set",
        why=why,
        fix="DataLoader(as_iterable(loader), batch_size=None), or leave out persistent_workers=True",
    )
