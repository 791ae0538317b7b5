"""What became of each sample: the build's side of what its workers say.

Decides who makes which entry and what is still to be done when a worker is gone. Guarantee: a sample is done when all
that was taken for it is committed or refused, and not before; the event file is written here alone, after the commit;
what a dead worker had taken and not committed is given back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import UnusableSampleError
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.pipeline.announcing import Announcer
from latentcache.pipeline.channel import Message
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.forms import as_refusal, located_form
from latentcache.pipeline.ledger import Claims, Fate
from latentcache.pipeline.twins import Twins
from latentcache.pipeline.units import Unit
from latentcache.pipeline.work import Failed, Looked, Planned, Progress, RunResult, refuse
from latentcache.recipe import Recipe
from latentcache.sources.reading import read_source
from latentcache.store.catalog import Catalog, Located
from latentcache.store.entry import NewEntry
from latentcache.store.generation import unpack_memo


@dataclass(slots=True, kw_only=True)
class _Sample:
    """One sample in the hands of a worker."""

    planned: Planned
    content: bytes = b""
    taken: bool = False
    wanted: tuple[bytes, ...] = ()
    """Keys taken for it, in the order in which its worker has them."""
    counted: bool = False
    """Whether it is among the samples that were looked at."""
    pieces: int = 0
    """Decoded and not encoded yet."""
    unmade: set[bytes] = field(default_factory=set)
    """Keys taken for it that are neither encoded, copied nor refused."""
    uncommitted: set[bytes] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class Holding:
    """Everything that one worker has in hand."""

    samples: dict[int, _Sample] = field(default_factory=dict)
    by_key: dict[bytes, int] = field(default_factory=dict)
    encoded: set[bytes] = field(default_factory=set)
    """Keys that it computed and did not commit yet."""
    untaken: int = 0
    """Samples that it has not looked at."""
    unmade: int = 0
    """Samples of which something is still to be encoded."""
    commits: int = 0


class Books:
    """Of one run.

    Args:
        root: The data folder.
        recipe: Whose entries are made.
        catalog: What was committed before.
        events: Told of each commit.
        progress: Kept up to date.
        followers: Told what samples turned out to be.
    """

    def __init__(
        self,
        *,
        root: Path,
        recipe: Recipe,
        catalog: Catalog,
        events: EventLog,
        progress: Progress,
        followers: Announcer | None = None,
    ) -> None:
        self._followers = followers or Announcer()
        self.result, self.progress = RunResult(), progress
        self._root, self._recipe, self._catalog, self._events = root, recipe, catalog, events
        self._committed: set[bytes] = set()
        self.twins = Twins()
        self._claims = Claims(lambda key: key in self._committed or key in catalog)
        self._doomed: dict[bytes, tuple[str, str]] = {}
        self._unencoded = 0
        self._each = len(recipe.geometry.tables()) * recipe.variants
        self._hears: dict[str, Callable[[Holding, Message], Message | None]] = {
            "take": self._take,
            "decoded": self._decoded,
            "failed": self._failed,
            "copied": self._copied,
            "encoded": self._encoded,
            "refused": self._refused,
            "committed": self._said_committed,
        }

    def give(self, holding: Holding, unit: Unit) -> None:
        """A worker gets a unit."""
        for planned in unit.items:
            holding.samples[planned.index] = _Sample(planned=planned)
        holding.untaken += len(unit.items)
        holding.unmade += len(unit.items)

    def hear(self, holding: Holding, message: Message) -> Message | None:
        """Note what a worker says; gives the answer where it asked something."""
        return self._hears[message["kind"]](holding, message)

    def found(self, holding: Holding, keys: Iterable[bytes]) -> None:
        """A dead worker has committed these; it may have had no time to say so."""
        unsaid = [key for key in keys if key not in self._committed]
        if unsaid:
            holding.encoded.update(key for key in unsaid if key in holding.by_key)
            self._commit(holding, unsaid, 0)

    def take_back(self, holding: Holding) -> list[Planned]:
        """A worker is gone: everything it held that is not done, in the order of the plan; it is nobody's now."""
        left = sorted(holding.samples)
        for index in left:
            self._forget(holding, index)
        return [holding.samples.pop(index).planned for index in left]

    def convict(self, planned: Planned, cause: str, detail: str) -> None:
        """A sample kills whoever works on it: it is refused, and so is every other with the same bytes."""
        try:
            data, memo = read_source(self._root / planned.sample.name)
        except UnusableSampleError:
            refusal = refuse(planned.sample, cause, detail)
        else:
            content = content_hash(data)
            self._doomed[content] = cause, detail
            refusal = refuse(planned.sample, cause, detail, stat=memo, content=content)
        self._followers.refused(planned.index)
        self.result.failed.append(Failed(index=planned.index, refusal=refusal))
        self.progress.looked += 1
        self.progress.quarantined += 1

    def let_go(self, todo: Iterable[Planned]) -> list[Planned]:
        """Samples that waited for pixels which were not encoded, to be given out again when all workers are gone."""
        keys = self.twins.let_go(self._committed)
        self._claims.release(keys)
        again = set(keys.values()) & self.result.looked.keys()
        self.progress.looked -= len(again)
        return [planned for planned in todo if planned.index in again]

    def copied(self, entries: Sequence[NewEntry]) -> None:
        """Copies were committed by the build itself."""
        self.progress.cached += len(entries)
        self._commit(Holding(), [entry.key for entry in entries], sum(len(entry.value) for entry in entries))

    def _take(self, holding: Holding, message: Message) -> Message:
        sample, content = holding.samples[message["index"]], bytes.fromhex(message["content"])
        if content in self._doomed:
            return {"refused": self._doomed[content]}
        keys = [bytes.fromhex(key) for key in message["keys"]]
        wanted = [position for position, key in enumerate(keys) if self._claims.take(key)]
        sample.content, sample.taken = content, True
        self._followers.looked(message["index"], content)
        sample.wanted = tuple(keys[position] for position in wanted)
        sample.unmade = set(sample.wanted)
        sample.uncommitted = set(sample.unmade)
        index: int = message["index"]
        for key in sample.unmade:
            holding.by_key[key] = index
        holding.untaken -= 1
        self.result.looked[message["index"]] = Looked(
            index=message["index"], content=content, memo=unpack_memo(message["memo"]), size=Size(*message["size"])
        )
        if not wanted:
            holding.unmade -= 1
            self._count(sample)
            self._done(holding, message["index"])
        return {"wanted": wanted}

    def _decoded(self, holding: Holding, message: Message) -> Message:
        index, sample = message["index"], holding.samples[message["index"]]
        pixels = map(bytes.fromhex, message["pixels"])
        fates = [self._fate(key, hashed, index) for key, hashed in zip(sample.wanted, pixels, strict=True)]
        for key, fate in zip(sample.wanted, fates, strict=True):
            if fate == "wait":
                sample.unmade.discard(key)
                sample.uncommitted.discard(key)
                del holding.by_key[key]
        sample.pieces = len(sample.unmade)
        self._wait(sample.pieces)
        self._count(sample)
        if not sample.unmade:
            holding.unmade -= 1
            self._done(holding, index)
        return {"fates": [located_form(fate) if isinstance(fate, Located) else fate for fate in fates]}

    def _fate(self, key: bytes, pixel_hash: bytes, index: int) -> Fate:
        """What becomes of a picture in its bucket."""
        found = self._catalog.with_pixels(pixel_hash, EntryKey.unpack(key).bucket, self._recipe.key_part)
        if found is not None:
            return found
        return "encode" if self.twins.is_first(key, pixel_hash, index) else "wait"

    def _failed(self, holding: Holding, message: Message) -> None:
        index = message["index"]
        self._forget(holding, index)
        del holding.samples[index]
        self._followers.refused(index)
        self.result.failed.append(Failed(index=index, refusal=as_refusal(message["refusal"])))
        self.progress.looked += 1
        self.progress.quarantined += 1

    def _copied(self, holding: Holding, message: Message) -> None:
        self.progress.cached += 1
        self._made(holding, bytes.fromhex(message["key"]))

    def _encoded(self, holding: Holding, message: Message) -> None:
        keys = [bytes.fromhex(key) for key in message["keys"]]
        holding.encoded.update(keys)
        self.progress.encoded += len(keys)
        for key in keys:
            self._made(holding, key)

    def _refused(self, holding: Holding, message: Message) -> None:
        key = bytes.fromhex(message["key"])
        sample = holding.samples[message["index"]]
        self.result.unencodable[sample.content] = message["cause"], message["detail"]
        self._followers.refused(message["index"])
        self.progress.quarantined += 1
        sample.uncommitted.discard(key)
        holding.by_key.pop(key, None)
        self._made(holding, key, message["index"])

    def _said_committed(self, holding: Holding, message: Message) -> None:
        self._commit(holding, [bytes.fromhex(key) for key in message["keys"]], message["bytes"])

    def _made(self, holding: Holding, key: bytes, index: int | None = None) -> None:
        """A piece of a sample needs no encoder any more."""
        index = holding.by_key[key] if index is None else index
        sample = holding.samples[index]
        sample.unmade.discard(key)
        sample.pieces -= 1
        self._wait(-1)
        if not sample.unmade:
            holding.unmade -= 1
            self._done(holding, index)

    def _commit(self, holding: Holding, keys: list[bytes], size: int) -> None:
        self._committed.update(keys)
        self.progress.committed += len(keys)
        self.progress.payload_bytes += size
        self.result.encoded.update(holding.encoded.intersection(keys))
        holding.encoded.difference_update(keys)
        holding.commits += 1
        for key in keys:
            index = holding.by_key.pop(key, None)
            if index is not None:
                holding.samples[index].uncommitted.discard(key)
                self._done(holding, index)
        self._events.commit(keys)

    def _done(self, holding: Holding, index: int) -> None:
        sample = holding.samples[index]
        if not sample.unmade and not sample.uncommitted:
            del holding.samples[index]

    def _forget(self, holding: Holding, index: int) -> None:
        """Undo what was noted of a sample that somebody else will look at, or nobody."""
        sample = holding.samples[index]
        self.result.looked.pop(index, None)
        self._claims.release(sample.uncommitted)
        for key in sample.uncommitted:
            holding.by_key.pop(key, None)
        holding.untaken -= not sample.taken
        holding.unmade -= bool(sample.unmade) or not sample.taken
        self._wait(-sample.pieces)
        self.progress.looked -= sample.counted

    def _count(self, sample: _Sample) -> None:
        sample.counted = True
        self.progress.looked += 1

    def _wait(self, pieces: int) -> None:
        """Note pieces that wait to be encoded, or no longer do; a sample has one per resolution and variant."""
        self._unencoded += pieces
        self.progress.waiting = -(-self._unencoded // self._each)
