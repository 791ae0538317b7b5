"""Messages between a build and its workers, and the form in which values travel.

A frame is two lengths (u32 each, little endian), a JSON head and a raw body. Guarantee: a message arrives whole or
not at all; the worker's end may be used from any thread and never raises; the build's end never waits, so a worker
that was stopped cannot stop the build. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import PurePath
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from latentcache import errors
from latentcache.errors import CacheLockedError, InterruptedBuildError, LatentcacheError
from latentcache.fields.protocol import Job, Output

_LENGTHS = struct.Struct("<II")
_CHUNK_BYTES = 1 << 18
_PARTS = ("what", "where", "why", "fix", "slug")
_PLAIN, _LISTS = frozenset({str, int, float, bool, type(None)}), frozenset({list, tuple, set, frozenset})
#: Values of a job that are JSON as they are.
_PLAIN_PARTS = ("sample", "name", "inputs", "facts", "cost", "tie")
Form = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Message:
    """One frame."""

    kind: str
    head: Form
    body: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.head[name]


def _frame(kind: str, head: Form, body: bytes) -> bytes:
    packed = json.dumps({"kind": kind, **head}, separators=(",", ":")).encode("ascii")
    return _LENGTHS.pack(len(packed), len(body)) + packed + body


class _Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete now."""
        self._bytes += data
        found, start = [], 0
        while len(self._bytes) - start >= _LENGTHS.size:
            head_bytes, body_bytes = _LENGTHS.unpack_from(self._bytes, start)
            middle = start + _LENGTHS.size + head_bytes
            if len(self._bytes) < middle + body_bytes:
                break
            head = json.loads(self._bytes[start + _LENGTHS.size : middle])
            found.append(Message(head.pop("kind"), head, bytes(self._bytes[middle : middle + body_bytes])))
            start = middle + body_bytes
        del self._bytes[:start]
        return found


class Channel:
    """The worker's end: any thread sends, one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._sending = threading.Lock()
        self._frames = _Frames()
        self._arrived: list[Message] = []

    def send(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message; nothing happens if the build is gone."""
        frame = _frame(kind, head, body)
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(frame)

    def receive(self) -> Message | None:
        """Wait for the next message; None if the other end is gone."""
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
        """Close the connection; a thread that waits in :meth:`receive` is woken."""
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
        """True if the worker's end is gone and everything it sent was received."""

    def fileno(self) -> int:
        """For ``selectors``."""
        return self._socket.fileno()

    def send(self, kind: str, body: bytes = b"", /, **head: Any) -> None:
        """Send a message now, or as soon as there is room for it."""
        self._unsent += _frame(kind, head, body)
        self.flush()

    def flush(self) -> None:
        """Send bytes that had no room before."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent[:_CHUNK_BYTES])]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # the worker is gone; its last messages are still to be received

    def arrived(self) -> list[Message]:
        """All messages that are complete by now."""
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
        """Close the connection."""
        self._socket.close()


def channel_pair() -> tuple[Line, socket.socket]:
    """The build's end, and the socket of the worker's end, which no other process inherits."""
    mine, theirs = socket.socketpair()
    return Line(mine), theirs


def to_json(value: Any) -> Any:
    """A value as JSON: a dataclass is a list of its values, bytes are hex, arrays and tuples lists, paths text."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _LISTS:
        return [to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if is_dataclass(kind):
        return [getattr(value, name) if plain else to_json(getattr(value, name)) for name, plain, _ in _fields(kind)]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, PurePath):
        return str(value)
    raise TypeError(f"{kind.__name__} has no JSON form")


def from_json(kind: type[_T], data: Sequence[Any]) -> _T:
    """Inverse of :func:`to_json` for a dataclass; values typed ``Any`` stay as JSON has them.

    Raises:
        TypeError, ValueError: The data is not of this class.
    """
    pairs = zip(_fields(kind), data, strict=True)  # type: ignore[arg-type]
    return kind(**{name: one if read is None else read(one) for (name, _, read), one in pairs})


@cache
def _fields(kind: type) -> tuple[tuple[str, bool, Callable[[Any], Any] | None], ...]:
    """Name of each field, whether its value is JSON already, and how it is read (None: as it is)."""
    hints = get_type_hints(kind)
    return tuple((field.name, hints[field.name] is str, _reader(hints[field.name])) for field in fields(kind))


def _reader(hint: Any) -> Callable[[Any], Any] | None:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is bytes:
        return bytes.fromhex
    if origin is tuple:
        each = _reader(inner[0])  # tuples of one type, of any length
        return tuple if each is None else lambda value: tuple(map(each, value))
    if origin in (Union, UnionType):
        some = _reader(next(one for one in inner if one is not type(None)))
        return None if some is None else lambda value: None if value is None else some(value)
    if isinstance(hint, type) and is_dataclass(hint):
        return partial(from_json, hint)
    return hint if isinstance(hint, type) and issubclass(hint, PurePath) else None


def jobs_form(jobs: Mapping[int, Job]) -> Form:
    """Jobs by number as JSON, in columns. What outputs are compared with stays here: builds have no such outputs."""
    listed = list(jobs.values())
    return {
        "number": list(jobs),
        "content": [job.content.hex() for job in listed],
        "outputs": [[(output.item, output.group, output.variant) for output in job.outputs] for job in listed],
        **{name: [getattr(job, name) for job in listed] for name in _PLAIN_PARTS},
    }


def jobs_of(form: Form) -> dict[int, Job]:
    """Inverse of :func:`jobs_form`."""
    content = map(bytes.fromhex, form["content"])
    outputs = (
        tuple(Output(item=item, group=group, variant=variant) for item, group, variant in some)
        for some in form["outputs"]
    )
    plain = zip(*(form[name] for name in _PLAIN_PARTS), strict=True)
    return {
        number: Job(content=one, outputs=some, **dict(zip(_PLAIN_PARTS, parts, strict=True)))
        for number, one, some, parts in zip(form["number"], content, outputs, plain, strict=True)
    }


def error_form(error: BaseException) -> Form:
    """Any error as JSON."""
    name = type(error).__name__
    if isinstance(error, LatentcacheError):
        return {"class": name, "exit_code": error.exit_code, **error.as_json()}
    if isinstance(error, MemoryError):
        return {"class": "MemoryError", "what": str(error)}
    if isinstance(error, OSError):
        what = error.strerror or str(error)
        return {"class": "OSError", "errno": error.errno, "what": what, "file": error.filename}
    trace = "".join(traceback.format_exception(error))
    return {"class": "bug", "what": f"{name}: {error}" if name != "RuntimeError" else str(error), "trace": trace}


def as_error(form: Form) -> BaseException:
    """Inverse of :func:`error_form`: class, words and exit status are kept; a bug is a RuntimeError with a trace."""
    known = getattr(errors, form["class"], None)
    if isinstance(known, type) and issubclass(known, LatentcacheError):
        more: Form = {}
        if known is CacheLockedError:
            more = {"holder": form.get("holder", {})}
        elif known is InterruptedBuildError:
            more = {"signal_number": form["exit_code"] - 128}
        error: LatentcacheError = known(**{part: form[part] for part in _PARTS}, **more)
        error.exit_code = form["exit_code"]
        return error
    if form["class"] == "MemoryError":
        return MemoryError(form["what"])
    if form["class"] == "OSError":
        return OSError(form["errno"], form["what"], form["file"])
    found = RuntimeError(form["what"])
    found.add_note(form["trace"])
    return found
