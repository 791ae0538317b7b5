"""Messages between a build and its workers, and the form in which values travel.

A message is a line of JSON. Guarantee: it arrives whole or not at all. The worker's end may be used from any thread
and never raises. The build's end never waits, so a worker that was stopped cannot stop the build. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from latentcache import errors
from latentcache.errors import LatentcacheError
from latentcache.fields.protocol import Failure, Job, Output
from latentcache.identity.key import KEY_BYTES

_CHUNK_BYTES = 1 << 18
_PARTS = ("what", "what_python", "where", "why", "fix", "fix_python", "slug")
Form = dict[str, Any]


class Channel:
    """One end of a connection: any thread sends, one receives. If it never waits, :meth:`flush` sends the rest."""

    def __init__(self, end: socket.socket, *, waits: bool = True) -> None:
        self._socket = end
        self._socket.setblocking(waits)
        self._sending = threading.Lock()
        self._unsent, self._received = bytearray(), bytearray()
        self._messages: list[Form] = []
        self.ended = False
        """True if the other end is gone and everything it sent was received."""

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def send(self, kind: str, /, **parts: Any) -> None:
        """Send a message; nothing happens if the other end is gone."""
        line = json.dumps({"kind": kind, **parts}, separators=(",", ":"), default=_plain).encode("ascii") + b"\n"
        with self._sending:
            self._unsent += line
            self._send()

    def flush(self) -> None:
        """Send bytes that had no room before."""
        with self._sending:
            self._send()

    def receive(self) -> Form | None:
        """Wait for the next message; None if the other end is gone."""
        while not self._messages and not self.ended:
            self._receive()
        return self._messages.pop(0) if self._messages else None

    def arrived(self) -> list[Form]:
        """All messages that are complete by now, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                self._receive()
        found, self._messages = self._messages, []
        return found

    def close(self) -> None:
        """Close the connection; a thread that waits in :meth:`receive` is woken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the other end is gone; its last messages are still to be received

    def _receive(self) -> None:
        """Receive some bytes and cut them into messages. Raises BlockingIOError."""
        try:
            data = self._socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            data = b""
        self.ended = not data
        self._received += data
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
            self._messages += map(json.loads, lines)


def channel_pair() -> tuple[Channel, socket.socket]:
    """The build's end, and the socket of the worker's end, which no other process inherits."""
    mine, theirs = socket.socketpair()
    return Channel(mine, waits=False), theirs


def _plain(value: Any) -> Any:
    """A value as JSON: by its own method, a dataclass by the names of its fields, bytes as hex, arrays as lists."""
    if hasattr(value, "as_json"):
        return value.as_json()
    if is_dataclass(value):
        return {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else list(value)


def split_keys(body: bytes) -> list[bytes]:
    """Item keys that were joined."""
    return [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]


def jobs_form(jobs: Mapping[int, Job]) -> list[list[Any]]:
    """Jobs by number as JSON. What outputs are compared with stays here: builds have no such outputs."""
    return [
        [
            *(number, job.sample, job.name, job.inputs, job.content.hex(), job.sample_columns, job.cost),
            [(output.item, output.group, output.variant) for output in job.outputs],
        ]
        for number, job in jobs.items()
    ]


def jobs_of(form: Sequence[Sequence[Any]]) -> dict[int, Job]:
    """Inverse of :func:`jobs_form`."""
    return {
        number: Job(
            sample=sample,
            name=name,
            inputs=inputs,
            content=bytes.fromhex(content),
            sample_columns=sample_columns,
            cost=cost,
            outputs=tuple(Output(item=item, group=group, variant=variant) for item, group, variant in outputs),
        )
        for number, sample, name, inputs, content, sample_columns, cost, outputs in form
    }


def failure_of(form: Form) -> Failure:
    """A failure from its JSON form."""
    hashes = {name: bytes.fromhex(form[name]) for name in ("content", "contents")}
    return Failure(**{**form, **hashes, "stat": tuple(form["stat"])})


def error_form(error: BaseException) -> Form:
    """Any error as JSON."""
    form = {"class": type(error).__name__, "what": str(error)}
    match error:
        case LatentcacheError():
            return form | {"exit_code": error.exit_code} | {part: getattr(error, part) for part in _PARTS}
        case MemoryError():
            return form | {"class": "MemoryError"}
        case OSError():
            return form | {"about": (error.errno, error.strerror or str(error), error.filename)}
    return form | {"trace": "".join(traceback.format_exception(error))}


def as_error(form: Form) -> BaseException:
    """Inverse of :func:`error_form`: class, words and exit status are kept; a bug is a RuntimeError with a trace."""
    if "exit_code" in form:
        known = getattr(errors, form["class"], LatentcacheError)
        error: LatentcacheError = known(form["what"])
        vars(error).update({part: form[part] for part in (*_PARTS, "exit_code")})
        return error
    if form["class"] == "MemoryError":
        return MemoryError(form["what"])
    if "about" in form:
        return OSError(*form["about"])
    is_plain = form["class"] == "RuntimeError"
    found = RuntimeError(form["what"] if is_plain else f"{form['class']}: {form['what']}")
    found.add_note(form["trace"])
    return found
