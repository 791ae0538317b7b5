"""The workers of a build, one for each device: gives out units, listens, and replaces workers that die or hang.

Decides who gets what next and what a death means. Guarantee: every sample ends done or refused with a cause,
whichever workers die; a sample that kills its workers is found and refused; a device that fails is tried again, three
times at most; after a stop request each worker commits its batch in hand, unless that takes too long. The build
itself computes nothing here, so it hears signals at once.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from latentcache.errors import DeviceError, DeviceMemoryError, WorkerError
from latentcache.pipeline.board import ENCODING, Doing
from latentcache.pipeline.books import Books
from latentcache.pipeline.channel import Message
from latentcache.pipeline.devices import Device
from latentcache.pipeline.forms import as_error, planned_form
from latentcache.pipeline.interrupt import PATIENCE_S, StopSignal
from latentcache.pipeline.launch import Hand, Launched, Place
from latentcache.pipeline.speed import StageClock
from latentcache.pipeline.units import Unit, UnitQueue
from latentcache.pipeline.watch import Watch
from latentcache.pipeline.work import Planned

#: How often the build looks around, in seconds.
_TICK_S = 0.1
#: Workers that may be lost in a row on one device, to the device or without anything to blame it on.
_RESTARTS = 3
#: Pictures that kill their workers, in one build; with more of them something else is wrong.
_MAX_CONVICTED = 100


class Staff(Protocol):
    """Where workers come from, and what is left of them."""

    def hire(self, device: Device, *, again: bool) -> tuple[Launched, Message, str]:
        """A worker that was started, the job it is to be told, and the name of its shard."""

    def left_by(self, shard: str) -> Sequence[bytes]:
        """Seal what a dead worker has committed; gives its keys."""


class Pool:
    """Runs one plan.

    Args:
        devices: One worker for each.
        staff: Starts them.
        books: Told of everything.
        low_water: A worker with fewer samples to look at gets the next unit, unless it has so many and a unit more
            that are not encoded: what a device cannot keep up with is for another one.
        deadline: Seconds that a picture may take.
        decode_threads: Of each worker.
    """

    def __init__(
        self,
        *,
        devices: Sequence[Device],
        staff: Staff,
        books: Books,
        stop: StopSignal,
        low_water: int,
        deadline: float,
        decode_threads: int,
        advanced: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._places = [Place(device=device) for device in devices]
        self._staff, self._books, self._stop = staff, books, stop
        self._low_water, self._deadline, self._decode_threads = low_water, deadline, decode_threads
        self._advanced, self._warn = advanced, warn
        self._queue, self._unit = UnitQueue(()), 0
        self._selector = selectors.DefaultSelector()
        self._convicted = 0
        self._looked_at = time.monotonic()
        self.noise: list[Message] = []
        """What each encoder showed of itself when it was opened."""
        self.clock = StageClock(loops=0)
        """Of the workers that ended in order."""

    def __call__(self, units: Sequence[Unit]) -> None:
        """Do it all, or as much as there is time for before a stop request.

        Raises:
            StoreError: The disk is full or fails; what was committed stays.
            EncoderError: The model cannot be used.
            DeviceError: No device is left that works.
            WorkerError: Workers keep dying, and no picture is to blame.
        """
        self._queue, self._unit = UnitQueue(units), max((len(unit.items) for unit in units), default=0)
        try:
            while (self._queue or self._hands()) and not self._stop.requested:
                self._hire()
                self._hand_out()
                self._listen()
                self._look()
                self._advanced()
        finally:
            self._end_all()
            self._selector.close()

    def _hands(self) -> list[tuple[Place, Hand]]:
        return [(place, place.hand) for place in self._places if place.hand is not None]

    def _hire(self) -> None:
        """A worker for each free device, while there are units for them."""
        waiting = len(self._queue) - sum(not hand.holding.samples and not hand.ending for _, hand in self._hands())
        for place in self._places:
            if place.hand is None and not place.retired and waiting > 0:
                waiting -= 1
                place.hand = self._hired(place)

    def _hired(self, place: Place) -> Hand:
        launched, job, shard = self._staff.hire(place.device, again=place.hired > 0)
        place.hired += 1
        launched.line.send("start", **job)
        self._selector.register(launched.line, selectors.EVENT_READ, place)
        return Hand(
            launched=launched,
            shard=shard,
            board=launched.watched(self._decode_threads),
            watch=Watch(self._deadline, on_cpu=place.device.name == "cpu"),
        )

    def _hand_out(self) -> None:
        """Units for whoever runs low; the end for all when there is nothing left that could come back."""
        hands = [hand for _, hand in self._hands() if not hand.ending]
        for hand in hands:
            idle = not hand.holding.unmade
            if idle:
                hand.suspect = None
            while hand.suspect is None and self._runs_low(hand):
                unit = self._queue.next(idle=not hand.holding.unmade)
                if unit is None:
                    break
                hand.suspect = unit if unit.suspect else None
                self._books.give(hand.holding, unit)
                hand.launched.line.send("unit", items=[planned_form(item) for item in unit.items])
        if not self._queue and not any(hand.holding.unmade for _, hand in self._hands()):
            for hand in hands:
                hand.ending = True
                hand.launched.line.send("no-more")

    def _runs_low(self, hand: Hand) -> bool:
        """Whether a worker gets the next unit: its decoders are nearly through, and its device keeps up."""
        holding = hand.holding
        return holding.untaken < self._low_water and holding.unmade < self._low_water + self._unit

    def _listen(self) -> None:
        """Hear everybody who has something to say."""
        for key, _ in self._selector.select(_TICK_S):
            place: Place = key.data
            if place.hand is None:
                continue
            for message in place.hand.launched.line.arrived():
                self._hear(place, place.hand, message)
            if place.hand.launched.line.ended:
                self._gone(place, place.hand)
        for _, hand in self._hands():
            hand.launched.line.flush()

    def _hear(self, place: Place, hand: Hand, message: Message) -> None:
        kind = message["kind"]
        if kind == "opened":
            hand.opened = True
            self.noise.append(message["noise"])
        elif kind == "warned":
            self._warn(message["words"] + self._on(place))
        elif kind == "error":
            hand.error = as_error(message)
        elif kind == "ended":
            hand.said_end = True
            clock = StageClock.from_json(message["clock"])
            if clock.pictures:
                self.clock.add(clock)
        elif kind != "found":
            answer = self._books.hear(hand.holding, message)
            if answer is not None:
                hand.launched.line.send("answer", to=message["ask"], **answer)
            if kind == "committed":
                place.lost = place.unexplained = 0

    def _look(self) -> None:
        """Give up workers that do not move."""
        now = time.monotonic()
        elapsed, self._looked_at = now - self._looked_at, now
        for _, hand in self._hands():
            hand.look(elapsed)

    def _gone(self, place: Place, hand: Hand) -> None:
        """A worker has ended: in order, with an error, or by a signal."""
        begun = hand.was_doing()
        number, words = self._part(place, hand)
        self._books.found(hand.holding, self._staff.left_by(hand.shard))
        left = self._books.take_back(hand.holding)
        if hand.error is not None:
            self._failed(place, hand, hand.error, left)
        elif not hand.said_end:
            self._died(
                place,
                hand,
                begun,
                left,
                words=hand.stuck or words,
                killed=number == signal.SIGKILL and not hand.stuck,
            )

    def _failed(self, place: Place, hand: Hand, error: BaseException, left: list[Planned]) -> None:
        """An error of a worker is the build's, but for a device that has worked before.

        Raises:
            BaseException: The error.
        """
        fatal = not isinstance(error, DeviceError) or isinstance(error, DeviceMemoryError) or hand.board is None
        place.lost += 1
        if fatal or (not hand.opened and place.hired == 1):
            raise error
        self._queue.give_back(left)
        if place.lost <= _RESTARTS:
            self._warn(f"{_short(error)}; starting again on {place.device.label}")
            return
        place.retired = True
        if all(other.retired for other in self._places):
            raise error
        self._warn(f"{_short(error)}; {place.device.label} is not used any more")

    def _died(
        self, place: Place, hand: Hand, begun: list[Doing], left: list[Planned], *, words: str, killed: bool
    ) -> None:
        """A worker died without a word; whatever it was about is suspected.

        Raises:
            WorkerError: That happens again and again.
        """
        stages = {item: step.stage for step in begun for item in step.items}
        convicted = self._queue.blame(hand.suspect, stages, left, killed=killed)
        for planned in convicted:
            encoding = stages[planned.index] == ENCODING
            detail = f"a worker process {words} whenever it {'encoded' if encoding else 'decoded'} it"
            self._books.convict(planned, "encoder-crash" if encoding else "decoder-crash", detail)
        self._convicted += len(convicted)
        place.unexplained = 0 if any(item.index in stages for item in left) else place.unexplained + 1
        if place.unexplained > _RESTARTS or self._convicted > _MAX_CONVICTED:
            blamed = f"{self._convicted} pictures were found that do so" if convicted else "no picture is to blame"
            raise WorkerError(
                "worker processes keep dying", where=place.device.label, why=f"the last one {words}; {blamed}"
            )
        if left and hand.suspect is None:
            self._warn(f"a worker process {words}{self._on(place)}; its pictures are given out again")

    def _end_all(self) -> None:
        """Have every worker commit its batch in hand; who takes too long is left to himself."""
        for _, hand in self._hands():
            hand.launched.line.send("stop")
        until = time.monotonic() + PATIENCE_S
        while self._hands() and time.monotonic() < until:
            for key, _ in self._selector.select(_TICK_S):
                place: Place = key.data
                if place.hand is not None:
                    self._last_words(place, place.hand)
        for place, hand in self._hands():
            hand.launched.kill()
            self._last_words(place, hand)
            self._part(place, hand)

    def _last_words(self, place: Place, hand: Hand) -> None:
        """Hear of the last commits; nothing else matters now, and no error replaces the one that ends the run."""
        for message in hand.launched.line.arrived():
            if message["kind"] not in ("opened", "warned", "error", "ended", "found"):
                answer = self._books.hear(hand.holding, message)
                if answer is not None:
                    hand.launched.line.send("answer", to=message["ask"], **answer)
        if hand.launched.line.ended:
            self._part(place, hand)

    def _part(self, place: Place, hand: Hand) -> tuple[int, str]:
        """Have no more to do with a worker; gives how it ended."""
        if place.hand is None:
            return 0, ""
        place.hand = None
        self._selector.unregister(hand.launched.line)
        hand.launched.line.close()
        return hand.launched.ended()

    def _on(self, place: Place) -> str:
        return f" on {place.device.label}" if len(self._places) > 1 else ""


def _short(error: BaseException) -> str:
    """What happened and why, without advice."""
    return ": ".join(part for part in (getattr(error, "what", str(error)), getattr(error, "why", "")) if part)
