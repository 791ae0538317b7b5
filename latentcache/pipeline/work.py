"""What flows through a build: planned pictures in, decoded pictures on, finished or refused ones out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from latentcache.encoders.protocol import Pixels
from latentcache.errors import UnusableSampleError
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.speed import StageClock
from latentcache.sources.reading import hint_for
from latentcache.sources.sample import Refusal, Sample
from latentcache.store.catalog import Located


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One sample as the plan sees it, before its bytes are read."""

    index: int
    """Position in the scan's samples."""
    sample: Sample
    size: Size
    """Pixels after EXIF orientation, from the header or from the last build."""
    placements: tuple[Placement, ...]
    """One per resolution, distinct buckets only."""
    content: bytes = b""
    """Content hash where the stat memo proves it; else empty."""
    expected: bytes = b""
    """Content hash of the last build, where the stat is equal but too young to prove it: for counting only."""
    memo: StatMemo | None = None
    """The memo that proved it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """One picture in one bucket: what its entry says beside the latents."""

    key: bytes
    pixel_hash: bytes
    placement: Placement
    original_size: Size
    content: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece(Cut):
    """One picture in one bucket, waiting to be encoded."""

    name: str
    pixels: Pixels
    """(H, W, 3) RGB."""
    index: int = -1
    """Of the sample in its scan."""
    twin: Located | None = None
    """A committed entry made from the very same pixels: its latents hold for this file too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """A sample whose bytes were read: what it is, and the pieces of it that no cache holds yet."""

    index: int
    content: bytes
    memo: StatMemo
    size: Size
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A sample that cannot be used."""

    index: int
    refusal: Refusal


@dataclass(slots=True, kw_only=True)
class RunResult:
    """What a run found and made."""

    looked: dict[int, Looked] = field(default_factory=dict)
    """By sample index; pieces dropped."""
    failed: list[Failed] = field(default_factory=list)
    unencodable: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    """Content hash -> cause and detail, for pictures that decode and cannot be encoded."""
    encoded: set[bytes] = field(default_factory=set)
    """Keys computed and committed by this run."""
    noise: dict[str, Any] = field(default_factory=dict)
    """What the encoders showed of themselves, of all devices."""
    clock: StageClock = field(default_factory=lambda: StageClock(loops=0))
    """Of all workers."""
    written_bytes: int = 0
    """Headers and payloads committed."""


@dataclass(slots=True)
class Progress:
    """Where a build stands. Counts of entries unless a name says otherwise."""

    total: int = 0
    """Samples the run has to look at."""
    looked: int = 0
    """Samples looked at so far."""
    waiting: int = 0
    """Those of them that are decoded and not yet encoded."""
    encoded: int = 0
    cached: int = 0
    quarantined: int = 0
    committed: int = 0
    """Those of the encoded and cached entries that are durable."""
    payload_bytes: int = 0
    """Bytes of latents committed."""

    @property
    def done(self) -> int:
        """Samples that are finished. A slow encoder is far behind the decoders, so it sets the time left."""
        return self.looked - self.waiting


def refused_by(sample: Sample, error: UnusableSampleError, **found: Any) -> Refusal:
    """The refusal that an error asks for. A file that was listed a moment ago and is not there has vanished."""
    if error.slug == "not-found":
        return refuse(sample, "vanished", error.what, **found)
    return refuse(sample, error.slug, error.what, hint=error.fix, **found)


def refuse(sample: Sample, cause: str, detail: str = "", **found: Any) -> Refusal:
    """A refusal of one sample with the hint that belongs to its cause."""
    hint = found.pop("hint", "") or hint_for(cause)
    return Refusal(name=sample.name, cause=cause, detail=detail, hint=hint, **found)
