"""Tokenises records in worker processes and hands the documents back in the order of the records.

Guarantee: what comes out, and in which order, does not depend on the number of workers. Memory is bounded: two units
of work for each worker, which end at 1 MiB of text or 1024 records, so that a worker is asked rarely and a signal is
heard soon; a record that is larger waits for its part of ``--host-memory``, and one for which all of it would not do
is refused with its size. A worker that ends is replaced and counted; a record that ends workers is found and refused.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from latentcache.encoders.opening_tokens import open_tokeniser
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import WorkerError
from latentcache.pipeline.budget import ByteBudget, default_budget_bytes
from latentcache.pipeline.token_process import TokenProcess, WorkerGoneError
from latentcache.pipeline.token_worker import Result
from latentcache.sources.causes import hint_for
from latentcache.sources.records import Record, record_size, text_record
from latentcache.sources.sample import Refusal

UNIT_CHARACTERS, UNIT_RECORDS = 1 << 20, 1024
#: Text for which a further worker is worth its start: 0.5 s of tokenising.
WORTH_CHARACTERS = 2 << 20
#: Bytes that tokenising holds per character at its peak, at most: measured with the reference tokenizer, whose token
#: is a string with offsets, 110 (prose) to 264 (a conversation in words of one letter); 42 by the fast path.
CHARACTER_BYTES = 320
_MOST_WORKERS = 32
#: Records that end their workers, in one build; with more of them something else is wrong. As of pictures.
_MAX_CONVICTED = 100


def default_workers(characters: int) -> int:
    """Workers for so much text: as many as there are cores, none where their start would cost more than they save."""
    wanted = min(len(os.sched_getaffinity(0)), _MOST_WORKERS, characters // WORTH_CHARACTERS)
    return wanted if wanted > 1 else 0


def units(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in their order, in portions of work."""
    unit: list[Record] = []
    size = 0
    for record in records:
        unit.append(record)
        size += record_size(record)
        if size >= UNIT_CHARACTERS or len(unit) >= UNIT_RECORDS:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


class TokenPool:
    """Tokenisers in processes of their own; a context manager, at whose end they are gone.

    Args:
        description: What they follow.
        workers: How many; 0 tokenises in this process, where nothing but the size of records bounds memory.
        host_memory: Bytes for records that are larger than a unit, of all workers together.
        warn: Told of each worker that ended, by the thread that asks for results.
    """

    def __init__(
        self,
        description: TokeniserDescription,
        workers: int,
        *,
        host_memory: int | None = None,
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._description, self._warn = description, warn
        self._local = open_tokeniser(description) if not workers else None
        self._free: queue.Queue[TokenProcess] = queue.Queue()
        self._workers: list[TokenProcess] = []
        self._count = workers
        self._threads: ThreadPoolExecutor | None = None
        self._budget = ByteBudget(host_memory or default_budget_bytes())
        self._lock, self._ending, self._convicted = threading.Lock(), False, 0
        self._alone = threading.Lock()
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.restarts = 0
        """Workers that ended and were replaced."""

    def __enter__(self) -> Self:
        for _ in range(self._count):
            self._free.put(self._hired())
        if self._workers:
            self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="tokenise")
        return self

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._ending = True
        self._budget.close()
        for worker in self._workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def results(self, work: Iterable[list[Record]]) -> Iterator[tuple[list[Record], list[Result]]]:
        """Each unit with one result for each of its records, in their order.

        Raises:
            WorkerError: Workers keep ending, and no record is to blame.
            EncoderError: A tokenizer cannot be used.
        """
        if self._local is not None:
            for unit in work:
                yield unit, self._weighed(unit, self._local.tokenise)
            return
        assert self._threads is not None
        waiting: deque[tuple[list[Record], Future[list[Result]]]] = deque()
        for unit in work:
            waiting.append((unit, self._threads.submit(self._weighed, unit, self._ask)))
            while len(waiting) > 2 * self._count or (waiting and waiting[0][1].done()):
                yield self._next(waiting)
        while waiting:
            yield self._next(waiting)

    def _next(self, waiting: deque[tuple[list[Record], Future[list[Result]]]]) -> tuple[list[Record], list[Result]]:
        """The first unit that was given out, once it is done."""
        unit, future = waiting.popleft()
        try:
            return unit, future.result()
        finally:
            while not self._words.empty():
                self._warn(self._words.get())

    def _weighed(self, unit: list[Record], tokenise: Callable[[list[Record]], list[Result]]) -> list[Result]:
        """Have those records tokenised that memory is enough for, and refuse the others."""
        most = self._budget.limit // CHARACTER_BYTES
        fits = [record_size(record) <= max(most, UNIT_CHARACTERS) for record in unit]
        if all(fits):
            return tokenise(unit)
        some = [record for record, is_fine in zip(unit, fits, strict=True) if is_fine]
        done = iter(tokenise(some) if some else ())
        limit = self._budget.limit
        return [
            next(done) if is_fine else too_large(record, limit) for record, is_fine in zip(unit, fits, strict=True)
        ]

    def _ask(self, unit: list[Record]) -> list[Result]:
        """Have a unit tokenised by a worker that is free, within the memory that there is for it."""
        size = sum(map(record_size, unit))
        more = size * CHARACTER_BYTES if size > 2 * UNIT_CHARACTERS else 0
        worker = self._free.get()
        try:
            if more and not self._budget.acquire(more):
                raise WorkerError("the build is ending")
            try:
                worker, results = self._asked(worker, unit, max(more, self._budget.limit // self._count))
            finally:
                self._budget.release(more)
            return results
        finally:
            self._free.put(worker)

    def _asked(self, worker: TokenProcess, unit: list[Record], more: int) -> tuple[TokenProcess, list[Result]]:
        """Ask, and where the worker ends, find the record that does it by halves; gives the worker that lives."""
        try:
            return worker, worker.ask(unit, more)
        except WorkerGoneError as error:
            words = str(error)
        worker = self._replaced(worker, unit, words)
        if len(unit) == 1:
            return self._tried_alone(worker, unit[0], more)
        middle = len(unit) // 2
        worker, first = self._asked(worker, unit[:middle], more)
        worker, second = self._asked(worker, unit[middle:], more)
        return worker, first + second

    def _tried_alone(self, worker: TokenProcess, record: Record, more: int) -> tuple[TokenProcess, list[Result]]:
        """One more try for a record that a worker ended with, with all of the memory that there is.

        Whoever killed that worker may have meant another; and a character that the tokenizer does not know costs more
        than was reckoned with. One at a time: the others go on with theirs meanwhile.
        """
        try:
            with self._alone:
                return worker, worker.ask([record], max(more, self._budget.limit))
        except WorkerGoneError as error:
            words = str(error)
        worker = self._replaced(worker, [record], words)
        try:
            worker.ask([text_record("", 0, "a")])
        except WorkerGoneError as error:
            raise _keep_dying(str(error), "no record is to blame: one letter ends them") from error
        with self._lock:
            self._convicted += 1
            if self._convicted > _MAX_CONVICTED:
                raise _keep_dying(words, f"{self._convicted} records were found that end them")
        return worker, [too_large(record, self._budget.limit, words) if "memory" in words else crashed(record, words)]

    def _replaced(self, gone: TokenProcess, unit: list[Record], words: str) -> TokenProcess:
        """Another worker for one that ended."""
        first, last = unit[0], unit[-1]
        where = f"{first.source}:{first.line}" + (f" to {last.source}:{last.line}" if len(unit) > 1 else "")
        with self._lock:
            if self._ending:
                raise WorkerError("the build is ending")
            self.restarts += 1
            self._workers.remove(gone)
            worker = self._hired(again=True)
        gone.close()
        self._words.put(f"a worker process {words}, at {where}; its records are given out again")
        return worker

    def _hired(self, *, again: bool = False) -> TokenProcess:
        worker = TokenProcess(self._description, again=again)
        self._workers.append(worker)
        return worker


def too_large(record: Record, limit: int, words: str = "") -> Refusal:
    """The refusal of a record for which there is not enough memory.

    Args:
        record: The record.
        limit: Bytes that there are.
        words: How a worker ended that tried it; by default it was not tried.
    """
    size = record_size(record)
    found = f"a worker {words}" if words else f"needs about {size * CHARACTER_BYTES:,} bytes to be tokenised"
    return _refused(record, "record-too-large", f"it has {size:,} characters and {found}; --host-memory is {limit:,}")


def crashed(record: Record, words: str) -> Refusal:
    """The refusal of a record that ends its workers.

    Args:
        record: The record.
        words: How the last one ended.
    """
    tried = f"whenever it tokenised its {record_size(record):,} characters"
    return _refused(record, "tokenizer-crash", f"a worker process {words} {tried}")


def _refused(record: Record, cause: str, detail: str) -> Refusal:
    return Refusal(
        name=record.source,
        line=record.line,
        content=record.content,
        cause=cause,
        detail=detail,
        hint=hint_for(cause),
    )


def _keep_dying(words: str, blamed: str) -> WorkerError:
    return WorkerError("worker processes keep dying", why=f"the last one {words}; {blamed}")
