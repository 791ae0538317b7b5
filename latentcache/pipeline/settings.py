"""Settings of a build, as plain values. Importing this module loads neither Pillow nor an encoder.

Every value is checked when it is made, so a contradiction is an error before a folder is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import UsageError, python_words
from latentcache.pipeline.devices import devices_for
from latentcache.plan.numbers import tolerated
from latentcache.sources.part import Part

if TYPE_CHECKING:
    from latentcache.sources.scan import SourceOptions

#: Images with more pixels are rejected before a pixel is decoded: 178 of 10^6 cost 8 s and 2 GB.
MAX_PIXELS = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildSettings:
    """One build. None always means "not given": the current snapshot decides, then the default.

    Raises:
        UsageError: A value is out of range.
    """

    data: Path
    """A folder or a file; text is taken as a path, here and below."""
    out: Path | None = None
    """The cache folder [default: ``DATA.latentcache`` beside the data]."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Field name -> settings dataclass of its kind, or a mapping such as ``{"model": "stub"}``. Fields of the current
    snapshot that are not named stay."""
    related: bool = False
    """Build also the fields that a named one brings with it: a pipeline has text encoders beside its VAE."""
    source: SourceOptions | None = None
    """Options of reading DATA."""
    part: str | None = None
    """``i/n``: one of n parts of the samples, counted from 0; ``0/1`` is all of them."""
    device: str = "auto"
    """``auto`` is every CUDA device, else the CPU; several are separated by commas or given as ``cpu*2``."""
    workers: int | None = None
    """Worker processes of fields that run on the CPU; 0 runs in this process."""
    batch_size: int | None = None
    """Items per encoder call, at most. Halved for a group when the device runs out of memory."""
    decode_threads: int | None = None
    """Decode threads of a worker."""
    host_memory: int | None = None
    """Bytes for inputs in work, of all workers together."""
    commit_every: int | None = None
    """Entries per commit, at most; a commit comes at 16 MiB or 2 s anyway."""
    events: Path | None = None
    """File that gets one line per durable commit."""
    stream: bool = False
    """Let readers follow: a pending snapshot is published and shards are sealed while the build runs."""
    stream_seed: int = 0
    """Seed of the loader whose first epoch a streaming build follows."""
    stream_batch: int = 1
    """Samples per step of that loader, of all ranks together."""
    allow_failed: str | None = None
    """Rejected samples tolerated before exit status 1: a number, or a percentage (``2%``). The cache keeps it."""
    strict: bool = False
    """Reject DATA of which anything is noticed and not used, before anything is encoded."""
    retry_failed: bool = False
    """Read inputs again that an earlier build rejected."""
    dry_run: bool = False
    max_pixels: int = MAX_PIXELS

    def __repr__(self) -> str:
        """The values that differ from their defaults."""
        given = {one.name: getattr(self, one.name) for one in fields(self)}
        said = {one.name: given[one.name] for one in fields(self) if given[one.name] not in (one.default, {})}
        said |= {name: str(value) for name, value in said.items() if isinstance(value, Path)}
        return f"BuildSettings({', '.join(f'{name}={value!r}' for name, value in said.items())})"

    @python_words()
    def __post_init__(self) -> None:
        for name in ("data", "out", "events"):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, Path(getattr(self, name)))
        devices_for(self.device, needs_torch=False)  # for the errors
        tolerated(self.allow_failed or "0", 0)
        names = ("batch_size", "decode_threads", "host_memory", "max_pixels", "commit_every", "stream_batch")
        at_least(1, **{name: getattr(self, name) for name in names})
        at_least(0, workers=self.workers)
        if self.part is not None:
            Part.parse(self.part)
        object.__setattr__(self, "fields", {name: _settings_of(name, said) for name, said in self.fields.items()})

    @property
    def cache(self) -> Path:
        """The cache folder."""
        return self.out or beside(self.data)


def _settings_of(name: str, values: Any) -> Any:
    """Settings of a field as its kind's dataclass."""
    if not isinstance(values, Mapping):
        return values
    from latentcache.fields.registry import field_kind

    kind = field_kind(name)
    known = {one.name for one in fields(kind.settings)} if kind else set(values)
    unknown = sorted(set(values) - known)
    if unknown:
        raise UsageError(
            f"fields={{{name!r}: ...}}: unknown setting {unknown[0]!r}", fix=f"one of {', '.join(sorted(known))}"
        )
    return kind.settings(**values) if kind else values


def beside(data: Path) -> Path:
    """The cache folder of DATA, if none is given."""
    whole = data.resolve()
    return whole.with_name(whole.name + ".latentcache")


def at_least(least: int, **given: int | None) -> None:
    """Check numbers against their smallest value; None passes."""
    for name, value in given.items():
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option}={value}: must be {least} or more", fix=f"leave {option} out, or give {least} or more"
            )
