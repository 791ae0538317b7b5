"""SIGINT and SIGTERM: the first signal ends a build in order, a second one ends it without waiting.

Guarantee: acknowledged work is committed either way. While a build is planning, nothing is open, and the first signal
raises at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

from latentcache.errors import InterruptedBuildError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
#: Seconds that running batches may still take after a stop request; a container is killed after 10.
PATIENCE_S = 5.0


class StopSignal:
    """Context manager that turns both signals into a flag. Outside the main thread only :meth:`request` sets it."""

    def __init__(self) -> None:
        self.number = 0
        self.patience_s = PATIENCE_S
        """Seconds that running batches may take; none after a second signal."""
        self.orderly = False
        """Set while work is running: a signal only raises the flag then."""
        self._before: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """True if the build was asked to end."""
        return self.number != 0

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def request(self, number: int = signal.SIGINT) -> None:
        """Ask the build to end, as a signal would."""
        self.patience_s = 0.0 if self.requested else PATIENCE_S
        self.number = number

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """A block in which a signal only raises the flag; the build ends when the block does.

        An exception out of a handler could leave a lock of a thread pool held, and the build would hang in it.
        """
        before, self.orderly = self.orderly, True
        try:
            yield
        finally:
            self.orderly = before
        if self.requested and not before:
            raise self.error()

    def error(self) -> InterruptedBuildError:
        """The error that the build ends with, once it is requested."""
        name = signal.Signals(self.number).name
        return InterruptedBuildError(
            f"interrupted by {name}", why="all committed work is kept", signal_number=self.number
        )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(number)
        if not self.orderly:
            raise self.error()
