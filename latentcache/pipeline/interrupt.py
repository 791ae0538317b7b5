"""SIGINT and SIGTERM: the first one ends the build in order, a second one leaves at once.

Guarantee: what was acknowledged is committed either way. While a build is only planning, nothing is open, so
the first signal ends it there and then. Later it ends with the batches in hand, which are given up when they take
longer than the patience of those who stop programs (10 s until a container is killed).
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from latentcache.errors import InterruptedBuildError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that the batches in hand may still take after a stop request.
PATIENCE_S = 5.0


class StopSignal:
    """Context manager that turns the two signals into a flag. Outside the main thread it only holds the flag.

    Args:
        last_words: Called with the error when a second signal ends the process at once; must not touch streams.
    """

    def __init__(self, last_words: Callable[[InterruptedBuildError], None] | None = None) -> None:
        self._last_words = last_words
        self.number = 0
        self.orderly = False
        """Set once entries are in flight: from then on a signal only raises the flag."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the build was asked to end."""
        return self.number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Planning that other threads share: a signal only raises the flag, and the build ends when this does.

        An exception out of a handler could leave a lock of the thread pool held, and the build would hang in it.

        Raises:
            InterruptedBuildError: The build was asked to end meanwhile.
        """
        self.orderly = True
        try:
            yield
        finally:
            self.orderly = False
        if self.requested:
            raise self.error()

    def error(self) -> InterruptedBuildError:
        """What the build ends with."""
        name = signal.Signals(self.number).name
        return InterruptedBuildError(
            f"interrupted by {name}", why="everything committed so far is kept", signal_number=self.number
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested and self.orderly:
            self.number = number
            if self._last_words is not None:
                self._last_words(self.error())
            os._exit(128 + number)  # asked twice: commits are durable, there is nothing to tidy
        self.number = number
        if not self.orderly:
            raise self.error()
