"""One process that tokenises, as the build sees it: asked, bounded in memory, and said how it ended.

Guarantee: the tokenizer goes to it as text and nothing is pickled; it takes no more memory than it is told, so a
record can end a worker and not the machine (Linux; elsewhere nothing bounds it). Cost: 0.2 s and about 60 MB for a
worker, the tokenizer aside.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from typing import Any

from latentcache import failpoint
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import EncoderError
from latentcache.pipeline.token_worker import (
    Result,
    get_frame,
    pack_description,
    pack_records,
    put_frame,
    unpack_results,
)
from latentcache.sources.records import Record

#: What a worker may take whatever it is asked: interpreter, libraries, a tokenizer of 250 000 entries, and a unit of
#: 1 MiB of text, which the reference tokenizer turns into 110 to 270 MB of offsets and strings.
BASE_BYTES = 1 << 30
_CHILD = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from latentcache.pipeline.token_worker import serve; serve()"
)
_SETTINGS = {"TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


class WorkerGoneError(Exception):
    """A worker ended before it answered; the text says how."""


class TokenProcess:
    """A worker. Used by one thread at a time.

    Args:
        description: What it follows.
        again: Whether it stands in for one that ended.
    """

    def __init__(self, description: TokeniserDescription, *, again: bool = False) -> None:
        self._talk = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._talk,
            env=os.environ | _SETTINGS | _failing(again),
            start_new_session=True,  # Ctrl-C is for the parent, which decides
        )
        self._description: TokeniserDescription | None = description

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def ask(self, unit: list[Record], more_bytes: int = 0) -> list[Result]:
        """One result for each record, in their order.

        Args:
            unit: The records.
            more_bytes: What they may take beyond :data:`BASE_BYTES`.

        Raises:
            WorkerGoneError: It ended.
            EncoderError: The tokenizer cannot be used.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        answer: tuple[Any, bytes] | None = None
        self._bound(BASE_BYTES + more_bytes)
        try:
            if self._description is not None:
                put_frame(stdin, pack_description(self._description))
                self._description = None
            put_frame(stdin, pack_records(unit))
            answer = get_frame(stdout)
        except BrokenPipeError:
            answer = get_frame(stdout)  # it may have said why it ended
        if answer is None:
            raise WorkerGoneError(self._ended())
        head, body = answer
        if isinstance(head, dict):
            raise EncoderError(**{name: head["error"][name] for name in ("what", "where", "why", "fix", "slug")})
        return unpack_results(head, body)

    def kill(self) -> None:
        """End it."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end and let go of its streams."""
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._talk):
            if stream is not None:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue

    def _bound(self, limit: int) -> None:
        """Let it take no more than ``limit`` bytes of memory of its own (``setrlimit(2)``, RLIMIT_DATA)."""
        if sys.platform == "linux":
            try:
                _, hard = resource.prlimit(self.pid, resource.RLIMIT_DATA)
                most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (most, hard))
            except (OSError, OverflowError):  # it has ended, or is watched over by somebody else, or may not be
                return

    def _ended(self) -> str:
        status = self._process.wait()
        self._talk.seek(0)
        said = last_words(self._talk.read().decode("utf-8", "replace"))
        ended = f"ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return f"{ended}: {said}" if said else ended


def _failing(again: bool) -> dict[str, str]:
    """What a worker inherits of a place that tests armed."""
    return {failpoint.VARIABLE: failpoint.for_another(os.environ.get(failpoint.VARIABLE, ""))} if again else {}


def last_words(said: str) -> str:
    """What a process that ended said of the reason: the last line on memory, else the last of all."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    about_memory = [line for line in lines if "memory" in line.lower()]
    return (about_memory or lines or [""])[-1]
