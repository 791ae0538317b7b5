"""Who makes which entry: the one list of keys that are committed or taken, asked by all decode threads.

Guarantee: a key is given to one sample only, however many workers ask, so no two encode the same entry; what a dead
worker had taken is free again. The build holds the list; workers ask over their channel (about 0.1 ms a picture).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.channel import Channel, Message
from latentcache.pipeline.forms import as_located
from latentcache.pipeline.headers import refused
from latentcache.store.catalog import Located
from latentcache.store.generation import pack_memo


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A sample whose bytes were read."""

    index: int
    content: bytes
    memo: StatMemo
    size: Size


class Ledger(Protocol):
    """What decode threads ask before they decode, and after."""

    def take(self, seen: Seen, keys: Sequence[bytes]) -> list[bytes]:
        """Those of the keys that this sample has to make.

        Raises:
            UnusableSampleError: A file with these bytes is known to kill whoever decodes it.
        """

    def twin(self, pixel_hash: bytes, bucket: Size) -> Located | None:
        """A committed entry made from the very same pixels, or None."""


class Claims:
    """Which keys need no work: committed ones, and those that another picture of this run already claimed."""

    def __init__(self, committed: Callable[[bytes], bool]) -> None:
        self._committed = committed
        self._claimed: set[bytes] = set()
        self._lock = threading.Lock()

    def take(self, key: bytes) -> bool:
        """Claim a key; False when nobody needs to make it any more."""
        if self._committed(key):
            return False
        with self._lock:
            if key in self._claimed:
                return False
            self._claimed.add(key)
            return True

    def release(self, keys: Iterable[bytes]) -> None:
        """Let others claim these."""
        with self._lock:
            self._claimed.difference_update(keys)


class OwnLedger:
    """The list itself, for decode threads of the same process.

    Args:
        claims: Keys that need no work.
        twins: Finds a committed entry with equal pixels.
    """

    def __init__(self, claims: Claims, twins: Callable[[bytes, Size], Located | None]) -> None:
        self._claims, self._twins = claims, twins

    def take(self, seen: Seen, keys: Sequence[bytes]) -> list[bytes]:
        """As in :class:`Ledger`."""
        return [key for key in keys if self._claims.take(key)]

    def twin(self, pixel_hash: bytes, bucket: Size) -> Located | None:
        """As in :class:`Ledger`."""
        return self._twins(pixel_hash, bucket)


class RemoteLedger:
    """Asks the build, from any thread; after :meth:`close` there is nothing to do for anybody.

    Args:
        channel: To the build.
        any_twins: Whether the cache holds anything that could be a twin.
    """

    def __init__(self, channel: Channel, *, any_twins: bool) -> None:
        self._channel, self._any_twins = channel, any_twins
        self._answers: dict[int, Message] = {}
        self._waiting: set[int] = set()
        self._number = 0
        self._closed = False
        self._changed = threading.Condition()

    def take(self, seen: Seen, keys: Sequence[bytes]) -> list[bytes]:
        """As in :class:`Ledger`."""
        answer = self._ask(
            "take",
            index=seen.index,
            content=seen.content.hex(),
            memo=pack_memo(seen.memo),
            size=[seen.size.height, seen.size.width],
            keys=[key.hex() for key in keys],
        )
        if answer.get("refused"):
            cause, detail = answer["refused"]
            raise refused(cause, detail)
        return [keys[position] for position in answer.get("wanted", ())]

    def twin(self, pixel_hash: bytes, bucket: Size) -> Located | None:
        """As in :class:`Ledger`."""
        if not self._any_twins:
            return None
        found = self._ask("twin", pixels=pixel_hash.hex(), bucket=[bucket.height, bucket.width]).get("twin")
        return None if found is None else as_located(found)

    def answered(self, message: Message) -> None:
        """An answer has come."""
        with self._changed:
            if message["to"] in self._waiting:
                self._answers[message["to"]] = message
                self._changed.notify_all()

    def close(self) -> None:
        """No answer will come any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _ask(self, kind: str, **facts: Any) -> Message:
        with self._changed:
            self._number += 1
            number = self._number
            self._waiting.add(number)
        self._channel.send(kind, ask=number, **facts)
        with self._changed:
            self._changed.wait_for(lambda: self._closed or number in self._answers)
            self._waiting.discard(number)
            return self._answers.pop(number, {})
