"""Tokenises records in worker processes and hands the documents back in the order of the records.

Guarantee: what comes out, and in which order, does not depend on the number of workers; memory is bounded by two
units of work for each worker. Units end at 1 MiB of text or 1024 records, so that a worker is asked rarely and a
signal is heard soon. Cost: 0.2 s and about 60 MB for each worker, a copy of text and ids through two pipes.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from latentcache.encoders.opening_tokens import open_tokeniser
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import EncoderError, WorkerError
from latentcache.pipeline.token_worker import (
    Result,
    get_frame,
    pack_description,
    pack_records,
    put_frame,
    unpack_results,
)
from latentcache.sources.records import Record, record_size

UNIT_CHARACTERS, UNIT_RECORDS = 1 << 20, 1024
#: Text for which a further worker is worth its start: 0.5 s of tokenising.
WORTH_CHARACTERS = 2 << 20
_MOST_WORKERS = 32
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from latentcache.pipeline.token_worker import serve; serve()"
)


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
        workers: How many; 0 tokenises in this process.
    """

    def __init__(self, description: TokeniserDescription, workers: int) -> None:
        self._description = description
        self._local = open_tokeniser(description) if not workers else None
        self._free: queue.Queue[_Worker] = queue.Queue()
        self._workers: list[_Worker] = []
        self._count = workers
        self._threads: ThreadPoolExecutor | None = None

    def __enter__(self) -> Self:
        for _ in range(self._count):
            worker = _Worker(self._description)
            self._workers.append(worker)
            self._free.put(worker)
        if self._workers:
            self._threads = ThreadPoolExecutor(len(self._workers), thread_name_prefix="tokenise")
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def results(self, work: Iterable[list[Record]]) -> Iterator[tuple[list[Record], list[Result]]]:
        """Each unit with one result for each of its records, in their order.

        Raises:
            WorkerError: A worker died.
            EncoderError: A tokenizer cannot be used.
        """
        if self._local is not None:
            for unit in work:
                yield unit, self._local.tokenise(unit)
            return
        assert self._threads is not None
        waiting: deque[tuple[list[Record], Future[list[Result]]]] = deque()
        for unit in work:
            waiting.append((unit, self._threads.submit(self._ask, unit)))
            while len(waiting) > 2 * self._count or (waiting and waiting[0][1].done()):
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def _ask(self, unit: list[Record]) -> list[Result]:
        worker = self._free.get()
        try:
            return worker.ask(unit)
        finally:
            self._free.put(worker)


class _Worker:
    """One process that tokenises. Used by one thread at a time."""

    def __init__(self, description: TokeniserDescription) -> None:
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._talk,
            env=os.environ | {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the parent, which decides
        )
        self._description: TokeniserDescription | None = description

    def ask(self, unit: list[Record]) -> list[Result]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        answer: tuple[Any, bytes] | None = None
        try:
            if self._description is not None:
                put_frame(stdin, pack_description(self._description))
                self._description = None
            put_frame(stdin, pack_records(unit))
            answer = get_frame(stdout)
        except BrokenPipeError:
            answer = get_frame(stdout)  # it may have said why it ended
        if answer is None:
            raise self._died(unit)
        head, body = answer
        if isinstance(head, dict):
            raise EncoderError(**{name: head["error"][name] for name in ("what", "where", "why", "fix", "slug")})
        return unpack_results(head, body)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._talk):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def _died(self, unit: list[Record]) -> WorkerError:
        status = self._process.wait()
        self._talk.seek(0)
        last = self._talk.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return WorkerError(
            "a worker process of the build died",
            where=f"{unit[0].source}:{unit[0].line} to {unit[-1].source}:{unit[-1].line}",
            why=f"{ended}: {last}" if last else ended,
        )
