"""The tokenising run: records through the pool, documents into blocks, blocks to the writer, all in one order.

Guarantee: blocks are made of the documents in the order of their records, whoever tokenised them; bounded memory;
after a stop request the full blocks are committed. The one that is not full is left: the next build begins with it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.token_pool import TokenPool, units
from latentcache.pipeline.token_report import TokenProgress
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_worker import Result
from latentcache.pipeline.writing import WriterThread
from latentcache.sources.records import Record, record_size
from latentcache.sources.sample import Refusal
from latentcache.store.blocks import BlockFiller, Tokenised
from latentcache.store.entry import HEADER_BYTES, NewEntry, unpack_header
from latentcache.store.layout import OPEN_SUFFIX, CacheLayout
from latentcache.store.shard import ShardWriter

#: A record that is done with: its document, or why there is none.
Settled = Tokenised | Refusal
#: Records after which a build says how far it is.
_TELL_EVERY = 64


@dataclass(slots=True, kw_only=True)
class TokenRun:
    """One run over the records that are to be tokenised."""

    description: TokeniserDescription
    layout: CacheLayout
    settings: TokenSettings
    stop: StopSignal
    progress: TokenProgress
    refused: dict[bytes, Refusal]
    """Filled with what the tokenizer refuses, by content hash."""
    advanced: Callable[[TokenProgress], None]
    warned: Callable[[str], None] = lambda message: None
    told: Callable[[bytes], None] = lambda content: None
    """Told the content of each record that the tokenizer refuses."""

    def __call__(
        self,
        records: Iterable[Record],
        workers: int,
        among: Callable[[Iterator[Settled]], Iterator[Settled]] = lambda made: made,
    ) -> None:
        """Tokenise and commit.

        Args:
            records: What is tokenised.
            workers: In how many processes.
            among: Puts what is made among what need not be, in the order of the records.

        Raises:
            InterruptedBuildError: Asked to stop; what was acknowledged is committed.
            SourceError: A file is not what it was a moment ago.
            StoreError: The disk is full or fails.
            WorkerError: A process that tokenised died.
        """
        filler = BlockFiller(self.description.recipe)
        self.stop.orderly = True
        with EventLog(self.settings.events) as events, self._pool(workers) as pool:

            def committed(entries: Sequence[NewEntry]) -> None:
                events.commit([entry.key for entry in entries])
                self.progress.written_bytes += sum(len(entry.value) for entry in entries)
                self.progress.committed += sum(_documents_in(entry) for entry in entries)

            writer = WriterThread(
                _new_shard(self.layout),
                committed,
                commit_every=self.settings.commit_every,
                rolling=self.settings.stream,
            )
            try:
                for one in among(self._made(pool, records)):
                    self._take(one, filler, writer)
                    if not self.progress.done % _TELL_EVERY:
                        self.advanced(self.progress)
                    if self.stop.requested:
                        break
                self.progress.restarts = pool.restarts
                last = None if self.stop.requested else filler.finish()
                if last is not None:
                    writer.put([last])
            finally:
                writer.finish()
        self.advanced(self.progress)
        if self.stop.requested:
            raise self.stop.error()

    def _pool(self, workers: int) -> TokenPool:
        memory = self.settings.host_memory
        return TokenPool(self.description, workers, host_memory=memory, warn=self.warned)

    def _made(self, pool: TokenPool, records: Iterable[Record]) -> Iterator[Settled]:
        """What becomes of each record."""
        for unit, results in pool.results(units(records)):
            for record, result in zip(unit, results, strict=True):
                self.progress.characters += record_size(record)
                yield settled(record, result)

    def _take(self, one: Settled, filler: BlockFiller, writer: WriterThread) -> None:
        """A document goes into its block, a refusal to the others."""
        self.progress.done += 1
        if isinstance(one, Refusal):
            self.progress.refused += 1
            self.refused[one.content] = one
            self.told(one.content)
            return
        self.progress.tokens += len(one.ids)
        full = filler.add(one)
        if full is not None:
            writer.put([full])


def settled(record: Record, result: Result) -> Settled:
    """What becomes of a record, from what the tokenizer made of it."""
    if isinstance(result, Refusal):
        return replace(result, content=record.content)
    if not len(result.ids):
        return Refusal(
            name=record.source,
            line=record.line,
            content=record.content,
            cause="no-tokens",
            detail="the tokenizer makes nothing of it",
            hint="take the record out, or let every text end with a token (--add-eos)",
        )
    return Tokenised(content=record.content, ids=result.ids, runs=result.runs, control_strings=result.control_strings)


def _documents_in(entry: NewEntry) -> int:
    return unpack_header(bytes(entry.value[:HEADER_BYTES]), entry.key).original_size.height


def _new_shard(layout: CacheLayout) -> Callable[[], ShardWriter]:
    def make() -> ShardWriter:
        return ShardWriter(layout.shards / f"{secrets.token_hex(8)}{OPEN_SUFFIX}")

    return make
