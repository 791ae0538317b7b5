"""Settings of an export. A setting that the format does not take is rejected."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields as attributes
from importlib.util import find_spec
from pathlib import Path

from latentcache.errors import UsageError
from latentcache.fields.settings import checked, setting
from latentcache.plan.numbers import real
from latentcache.value import Value

#: Settings of every format of images.
_OF_IMAGES = ("as", "copy", "data", "draw", "fields", "force")
#: Settings of every format of whole samples; ``mds`` is one unless rows are asked for.
_OF_SAMPLES = ("force",)
#: Format -> the settings that it takes.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "hf-disk": ("pad", "pack", "chunk", "for", "overflow", "validation"),
    "megatron": ("validation",),
    "datatrove": ("validation",),
    "mds": ("pad", "chunk", "overflow", "validation"),
    "safetensors": _OF_SAMPLES,
    "webdataset": _OF_SAMPLES,
    "kohya": (*_OF_IMAGES, "architecture", "beside", "release", "trainer-config"),
    "onetrainer": (*_OF_IMAGES, "trainer-config"),
    "simpletuner": (*_OF_IMAGES, "trainer-config"),
    "musubi": (*_OF_IMAGES, "architecture", "trainer-config"),
    "ai-toolkit": (*_OF_IMAGES, "architecture", "trainer-config"),
}
#: Formats of images; the others are formats of tokens.
IMAGE_FORMATS = ("kohya", "onetrainer", "simpletuner", "musubi", "ai-toolkit")
#: Layouts of rows, as ``cache.rows()`` names them.
LAYOUTS = ("pad", "pack", "chunk")
#: Absolute paths, on any machine.
_ABSOLUTE = re.compile(r"/|[A-Za-z]:[\\/]|\\\\")


class ExportSettings(Value):
    """One export; None: not given."""

    cache: Path
    out: Path
    """The folder to create."""
    format: str = setting(
        "hf-disk (load_from_disk; needs pyarrow), megatron, datatrove or mds (llm-foundry); for images kohya"
        " (sd-scripts, lora-scripts), onetrainer, simpletuner, musubi or ai-toolkit; for all fields safetensors,"
        " webdataset or mds. [default: hf-disk]",
        flag="--to",
        metavar="FORMAT",
        default="hf-disk",
    )
    pad: int | None = setting("Make rows with N tokens and one document each.", metavar="N", min=1)
    pack: int | None = setting("Make rows with N tokens and several documents each.", metavar="N", min=1)
    chunk: int | None = setting("Make rows with N tokens cut from joined documents.", metavar="N", min=1)
    trainer: str | None = setting(
        "Trainer for hf-disk rows: plain, llama-factory, trl, unsloth or axolotl. [default: plain]",
        flag="--for",
        metavar="TRAINER",
    )
    overflow: str | None = setting(
        "Policy for documents longer than a row: error, drop, truncate_right, truncate_left or split.",
        metavar="POLICY",
    )
    validation: float = setting("Fraction for validation. [default: 0]", metavar="FRACTION", default=0.0)
    fields: str | None = setting(
        "For images: latents, text or all. [default: latents]", choices=("latents", "text", "all")
    )
    release: str | None = setting(
        "Release of kohya's trainer: stable, plain, suffixed or lora-scripts, or its folder.",
        metavar="RELEASE",
    )
    architecture: str | None = setting("Model that you train, where latents fit several.", metavar="NAME")
    draw: int | None = setting("Draw latents once, by this seed [default: the mean]", metavar="SEED", min=0)
    trainer_config: Path | None = setting(
        "The trainer's settings file: its sizes and flips are checked.", metavar="FILE"
    )
    data: Path | None = setting("The images, if they moved. [default: as recorded]", metavar="DATA")
    as_path: str | None = setting("Path at which the trainer sees OUT.", flag="--as", metavar="PATH")
    copy: bool = setting("Copy images. [default: link them]", default=False)
    beside: bool = setting("Write beside the images: OUT is their folder.", default=False)
    force: bool = setting("Export a demo cache, too.", default=False)

    def __post_init__(self) -> None:
        checked(ExportSettings, {setting.name: getattr(self, setting.name) for setting in attributes(self)})
        real("validation", self.validation, 0, 0.99, fix="give a fraction such as 0.1")
        if self.format not in FORMATS:
            raise UsageError("unknown format", argument="format", value=self.format, fix=f"--to {'|'.join(FORMATS)}")
        takes = _OF_SAMPLES if self.is_of_samples else FORMATS[self.format]
        layouts = [name for name in LAYOUTS if getattr(self, name) is not None]
        for flag in self._flags_set():
            if flag not in takes:
                why = f"its flags: --{', --'.join(takes)}"
                rows = ", or ask for rows with --pad N or --chunk N" if flag in FORMATS[self.format] else ""
                problem = f"--{flag}: not available with --to {self.format}"
                raise UsageError(problem, why=why, fix=f"leave --{flag} out{rows}")
        if "pad" in takes and len(layouts) != 1:
            problem = (
                f"--{layouts[1]}: give one layout" if layouts else f"--to={self.format}: needs the length of rows"
            )
            raise UsageError(problem, fix=" or ".join(f"--{name} N" for name in LAYOUTS if name in takes))
        if self.as_path is not None and not _ABSOLUTE.match(self.as_path):
            why = "the trainer finds files by it from any folder, and ~ is another folder there"
            raise UsageError(f"--as={self.as_path}: not an absolute path", why=why, fix="--as /workspace/out")
        if self.overflow is not None and self.layout == "chunk":
            raise UsageError(f"--overflow={self.overflow}: --chunk cuts documents anyway", fix="leave it out")
        if self.format == "hf-disk":
            if find_spec("pyarrow") is None:
                why, fix = "it is not installed", "python -m pip install 'latentcache[hf]'"
                raise UsageError("--to=hf-disk: needs pyarrow", why=why, fix=fix, slug="extra-missing")
            from latentcache.export.hf_disk import check

            check(self.trainer or "plain", self.layout, self.length)

    def _flags_set(self) -> list[str]:
        """Options of formats that were given, without ``--``."""
        options = [
            option
            for option in attributes(self)
            if option.metadata and option.name != "format" and getattr(self, option.name) != option.default
        ]
        return [option.metadata.get("flag", option.name.replace("_", "-")).lstrip("-") for option in options]

    @property
    def is_of_samples(self) -> bool:
        """True if the files hold whole samples: all fields of images, or whole documents."""
        return FORMATS[self.format] == _OF_SAMPLES or (self.format == "mds" and not self.layout)

    @property
    def layout(self) -> str:
        """The layout of the rows; empty for whole documents."""
        return next((name for name in LAYOUTS if getattr(self, name) is not None), "")

    @property
    def length(self) -> int:
        """Tokens of a row; 0 for whole documents."""
        return int(getattr(self, self.layout)) if self.layout else 0
