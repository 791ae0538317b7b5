"""The rows of a loader one after the other: for trainers that take an iterable data set and make batches themselves.

Guarantee: ``len`` is the number of rows that come, so epochs and steps are exact (report R2); a ``DataLoader`` of the
loader's batch size gives the loader's batches, in their order, for any number of workers, because whole batches go to
workers in turn; rows are views of their batch, so ``TokenCollator`` makes it again without a copy. The epoch is what
``set_epoch`` says, never a count of passes: a trainer that resumes passes twice over one.
Cost: that of the loader. A trainer that skips batches to resume reads them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.utils.data import IterableDataset

from latentcache.errors import UsageError
from latentcache.loader.iterable import IterableBatches
from latentcache.loader.token_formats import Batch
from latentcache.loader.token_loader import TokenLoader


class TokenRows(IterableDataset[Batch]):
    """The rows of a loader, in the order of its batches.

    Args:
        loader: Of full batches; it is used here from now on.

    Raises:
        UsageError: Its batches are not all full, or are no batches of rows.
    """

    def __init__(self, loader: TokenLoader) -> None:
        batches = loader.report.batches
        if batches.small_buckets == "partial" or loader.format == "flat" or loader.meta:
            raise UsageError(
                "rows of batches that are not all full, are one row each, or say something of the whole batch",
                why="whoever makes batches of them again would make other ones",
                fix="small_buckets='repeat', 'drop' or 'mask', no meta=, and give format='flat' to the TokenCollator",
            )
        self._batches, self._size = IterableBatches(loader), batches.batch_size

    def __len__(self) -> int:
        """Rows of an epoch on this rank, of all workers together."""
        return len(self._batches) * self._size

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next pass serves."""
        self._batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """Serve this worker's share of the epoch.

        Raises:
            CorruptEntryError: A document fails its check.
            MissingEntryError: A shard is gone.
        """
        for batch in self._batches:
            for place in range(self._size):
                yield {name: value[place] for name, value in batch.items()}


def as_rows(loader: TokenLoader) -> TokenRows:
    """A loader as an iterable data set of rows with a length; make batches of the same size of them.

    Args:
        loader: Of all ranks together (``world_size=1``) where the trainer deals rows out to ranks, as accelerate
            does; it is used by the result from now on.

    Raises:
        UsageError: Its batches are not all full, or are no batches of rows.
    """
    return TokenRows(loader)
