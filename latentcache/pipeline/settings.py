"""Settings of a build, as plain values. Importing this module loads neither Pillow nor an encoder.

Every value is checked when it is made, so a contradiction is an error before a folder is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from latentcache.errors import UsageError
from latentcache.fields.registry import settings_of
from latentcache.fields.settings import Settings, checked, setting
from latentcache.pipeline.workers.resources import devices_for
from latentcache.plan.numbers import duration, tolerated
from latentcache.sources.options import Part, SourceOptions

#: Images with more pixels are rejected before a pixel is decoded: 178 of 10^6 cost 8 s and 2 GB.
MAX_PIXELS = 100_000_000


class BuildSettings(Settings):
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
    part: str | None = setting(
        "Build only part I, from 0 to N-1, on one machine. Join parts with latentcache merge.", metavar="I/N"
    )
    device: str = setting(
        "auto, cpu, cuda, cuda:0,cuda:1 or cpu*2: one worker per device. [default: auto: all CUDA devices, else cpu]",
        metavar="DEVICE",
        default="auto",
    )
    engine: str = setting(
        "Run workers on this machine, or on a Ray cluster. [default: local]",
        choices=("local", "ray"),
        default="local",
    )
    address: str | None = setting(
        "The Ray cluster's head node. [default: RAY_ADDRESS, else this machine's cluster]", metavar="HOST:PORT"
    )
    workers: int | None = setting(
        "Tokenizer worker processes, 0 runs in the main process; with --engine ray all workers of the cluster. "
        "[default: by the amount of work]",
        metavar="N",
        min=0,
    )
    batch_size: int | None = setting("Items per encoder call. [default: a budget of pixels]", metavar="N", min=1)
    decode_threads: int | None = setting("Decode threads per worker. [default: by cores]", metavar="N", min=1)
    host_memory: int | None = setting(
        "Memory for inputs in work, for all workers together. [default: a quarter of RAM, at most 4 GiB]",
        metavar="BYTES",
        min=1,
    )
    max_pixels: int = setting("Reject larger images. [default: 100000000]", metavar="N", min=1, default=MAX_PIXELS)
    scratch: Path | None = setting(
        "With --out URL: the folder for shards until they are uploaded. [default: ~/.cache/latentcache]",
        metavar="PATH",
    )
    publish_every: float | None = setting(
        "Publish a snapshot every TIME (10m, 90s, 1h), so that you can train during the build.",
        metavar="TIME",
        min=1,
        parse=duration,
    )
    commit_every: int | None = setting("Entries per commit at most. [default: 16 MiB or 2 s]", metavar="N", min=1)
    events: Path | None = setting("Append a JSON line to FILE after each commit.", metavar="FILE")
    allow_failed: str | None = setting(
        "Exit with 0 if at most N files (or X %) are rejected. [default: as the cache; a new cache: 0]",
        metavar="N|X%",
    )
    retry_failed: bool = setting("Read rejected inputs again.", default=False)
    strict: bool = setting("Make notes errors: reject DATA if anything is not used.", default=False)

    def __post_init__(self) -> None:
        values = checked(BuildSettings, {option.name: getattr(self, option.name) for option in fields(self)})
        values["fields"] = {
            name: settings_of(name, field_settings) for name, field_settings in values["fields"].items()
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if self.engine == "local":
            devices_for(self.device, needs_torch=False)  # for the errors
            if self.address is not None:
                raise UsageError(
                    "only with a Ray cluster",
                    argument="address",
                    value=self.address,
                    fix="--engine=ray",
                )
        elif self.device not in ("auto", "cpu", "cuda"):
            fix = "give auto, cuda or cpu"
            raise UsageError("Ray assigns the devices", argument="device", value=self.device, fix=fix)
        elif self.workers == 0:
            raise UsageError("Ray needs workers", argument="workers", value=0, fix="give 1 or more, or leave it out")
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
