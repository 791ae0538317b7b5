"""Settings of a build, as plain values. Importing this module loads neither Pillow nor an encoder.

Every value is checked when it is made, so a contradiction is an error before a folder is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError
from latentcache.fields.registry import checked, settings_of
from latentcache.pipeline.devices import devices_for
from latentcache.plan.numbers import tolerated
from latentcache.sources.options import SourceOptions
from latentcache.sources.part import Part

#: Images with more pixels are rejected before a pixel is decoded: 178 of 10^6 cost 8 s and 2 GB.
MAX_PIXELS = 100_000_000
_POSITIVE, _NOT_NEGATIVE = {"min": 1, "metavar": "N"}, {"min": 0, "metavar": "N"}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """One build. None always means "not given": the current snapshot decides, then the default.

    Raises:
        UsageError: A value has another type, or is out of range.
    """

    data: Path
    """A folder or a file; text is taken as a path, here and below."""
    out: Path | None = None
    """The cache folder [default: ``DATA.latentcache`` beside the data]."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Field name -> its settings, such as ``{"model": "stub"}``. Fields of the current snapshot that are not named
    stay."""
    related: bool = False
    """Build also the fields that a named one brings with it: a pipeline has text encoders beside its VAE."""
    source: SourceOptions | None = None
    """Options of reading DATA: a mapping such as ``{"layout": "folder", "repeats": False}``."""
    part: str | None = None
    """``i/n``: one of n parts of the samples, counted from 0; ``0/1`` is all of them."""
    device: str = "auto"
    """``auto`` is every CUDA device, else the CPU; several are separated by commas or given as ``cpu*2``."""
    workers: int | None = field(default=None, metadata=_NOT_NEGATIVE)
    """Worker processes of fields that run on the CPU; 0 runs in this process."""
    batch_size: int | None = field(default=None, metadata=_POSITIVE)
    """Items per encoder call, at most. Halved for a group when the device runs out of memory."""
    decode_threads: int | None = field(default=None, metadata=_POSITIVE)
    """Decode threads of a worker."""
    host_memory: int | None = field(default=None, metadata=_POSITIVE)
    """Bytes for inputs in work, of all workers together."""
    commit_every: int | None = field(default=None, metadata=_POSITIVE)
    """Entries per commit, at most; a commit comes at 16 MiB or 2 s anyway."""
    events: Path | None = None
    """File that gets one line per durable commit."""
    stream: bool = False
    """Let readers follow: a pending snapshot is published and shards are sealed while the build runs."""
    stream_seed: int = field(default=0, metadata=_NOT_NEGATIVE)
    """Seed of the loader whose first epoch a streaming build follows."""
    stream_batch: int = field(default=1, metadata=_POSITIVE)
    """Samples per step of that loader, of all ranks together."""
    allow_failed: str | None = None
    """Rejected samples tolerated before exit status 1: a number, or a percentage (``2%``). The cache keeps it."""
    strict: bool = False
    """Reject DATA of which anything is noticed and not used, before anything is encoded."""
    retry_failed: bool = False
    """Read inputs again that an earlier build rejected."""
    max_pixels: int = field(default=MAX_PIXELS, metadata=_POSITIVE)

    def __repr__(self) -> str:
        """The values that differ from their defaults."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        shown = {one.name: given[one.name] for one in fields(self) if given[one.name] not in (one.default, {})}
        shown |= {name: str(value) for name, value in shown.items() if isinstance(value, Path)}
        shown |= {} if self.source is None else {"source": self.source.as_json()}
        return f"BuildSettings({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def __post_init__(self) -> None:
        made = checked(BuildSettings, {one.name: getattr(self, one.name) for one in fields(self)})
        made["fields"] = {name: settings_of(name, given) for name, given in made["fields"].items()}
        for name, value in made.items():
            object.__setattr__(self, name, value)
        devices_for(self.device, needs_torch=False)  # for the errors
        tolerated(self.allow_failed or "0", 0)
        if self.part is not None:
            Part.parse(self.part)

    @property
    def cache(self) -> Path:
        """The cache folder."""
        return self.out or beside(self.data)


def beside(data: Path) -> Path:
    """The cache folder of DATA, if none is given."""
    whole = data.resolve()
    if not whole.name:
        raise UsageError(f"{data} is the root of all folders", fix="give the folder with your images or records")
    return whole.with_name(whole.name + ".latentcache")
