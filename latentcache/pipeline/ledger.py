"""Who makes which entry: the one list of keys and of pixels that are there or taken, asked by all decode threads.

Guarantee: a key is given to one sample only, however many workers ask, so no two encode the same entry, and no two
encode the same pixels; what a dead worker had taken is free again. The build holds the lists; workers ask over their
channel, before they decode a picture and after it (about 0.1 ms each).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.channel import Channel, Message
from latentcache.pipeline.forms import as_located
from latentcache.pipeline.headers import refused
from latentcache.store.catalog import Located
from latentcache.store.generation import pack_memo

Fate = Located | Literal["encode", "wait"]
"""What becomes of a decoded piece: it takes over the latents of a committed entry with the very same pixels, it is
encoded, or it waits for another one of this run that has its pixels, and the build will copy that one's latents."""


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

    def fates(self, index: int, pixels: Sequence[bytes]) -> Sequence[Fate]:
        """What becomes of the pieces of a sample, by the hashes of their pixels in the order of the keys it took."""


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


class RemoteLedger:
    """Asks the build, from any thread; after :meth:`close` there is nothing to do for anybody.

    Args:
        channel: To the build.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
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

    def fates(self, index: int, pixels: Sequence[bytes]) -> list[Fate]:
        """As in :class:`Ledger`."""
        answer = self._ask("decoded", index=index, pixels=[found.hex() for found in pixels])
        fates = answer.get("fates", ["wait"] * len(pixels))
        return [as_located(fate) if isinstance(fate, dict) else fate for fate in fates]

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
