"""Messages between a build and its workers: JSON objects over a pair of sockets, each behind its length.

Decides nothing. Guarantee: a message arrives whole or not at all; the worker's end may be used from any thread and
never raises (a build that is gone is noticed where messages are received); the build's end never waits, so a worker
that was stopped cannot stop the build. No pickle: what a worker says is data. Cost: about 20 µs a message.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from typing import Any

Message = dict[str, Any]
"""Has ``kind``; what else there is depends on it."""

_LENGTH = struct.Struct("<I")
_CHUNK_BYTES = 1 << 16


class _Frames:
    """Cuts what arrives into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole now."""
        self._bytes += data
        found = []
        while len(self._bytes) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            found.append(json.loads(self._bytes[_LENGTH.size : end]))
            del self._bytes[:end]
        return found


def _frame(kind: str, facts: Message) -> bytes:
    body = json.dumps({"kind": kind, **facts}).encode("ascii")
    return _LENGTH.pack(len(body)) + body


class Channel:
    """The worker's end: any thread sends, one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._sending = threading.Lock()
        self._frames = _Frames()
        self._arrived: list[Message] = []

    def send(self, kind: str, **facts: Any) -> None:
        """Say something; nothing happens where nobody listens any more."""
        frame = _frame(kind, facts)
        with self._sending:
            try:
                self._socket.sendall(frame)
            except OSError:
                return

    def receive(self) -> Message | None:
        """Wait for the next message; None when the other end is gone."""
        while not self._arrived:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except OSError:
                return None
            if not data:
                return None
            self._arrived = self._frames.feed(data)
        return self._arrived.pop(0)

    def close(self) -> None:
        """Say no more; who waits in :meth:`receive` is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Line:
    """The build's end: nothing here ever waits."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(False)
        self._frames = _Frames()
        self._unsent = bytearray()
        self.ended = False
        """Whether the worker's end is gone and everything it said was received."""

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def send(self, kind: str, **facts: Any) -> None:
        """Say something, now or as soon as there is room for it."""
        self._unsent += _frame(kind, facts)
        self.flush()

    def flush(self) -> None:
        """Send what had no room before."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # it is gone; what it said last is still to be received

    def arrived(self) -> list[Message]:
        """Everything that is whole by now."""
        found: list[Message] = []
        while not self.ended:
            try:
                data = self._socket.recv(_CHUNK_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.ended = not data
            found += self._frames.feed(data)
        return found

    def close(self) -> None:
        """Say no more, and hear no more."""
        self._socket.close()


def channel_pair() -> tuple[Line, socket.socket]:
    """The build's end, and the socket of the worker's, which no other process inherits."""
    mine, theirs = socket.socketpair()
    return Line(mine), theirs
