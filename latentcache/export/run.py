"""Export a cache of documents: check the settings, open the cache, write the folder.

Each format takes its own settings; a setting that a format does not take is rejected, never ignored. A format is a
writer of one split, which gets batches of rows or of documents in their order. Cost: one batch in memory.

Guarantee: a folder of that name is whole, with the metadata beside its files, or does not exist. Existing files and
folders are never touched, and of two exports to one name one is rejected. A killed export leaves a folder
``OUT.partial-...``.
"""

from __future__ import annotations

import shlex
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields as attributes
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import LatentcacheError, PlanError, UsageError
from latentcache.fields.settings import checked, setting
from latentcache.plan.numbers import real
from latentcache.store.atomic_io import as_store_error, make_folder, read_json, sync_file, sync_folder, write_json
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.loader.cache import Cache

#: Settings of every format of images.
_OF_IMAGES = ("as", "copy", "data", "draw", "fields", "force")
#: Format -> the settings that it takes.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "hf-disk": ("pad", "pack", "chunk", "for", "overflow", "padding-side", "validation"),
    "megatron": ("validation",),
    "datatrove": ("validation",),
    "mds": ("pad", "chunk", "overflow", "validation"),
    "kohya": (*_OF_IMAGES, "architecture", "beside", "release", "trainer-config"),
    "onetrainer": (*_OF_IMAGES, "release", "trainer-config"),
    "simpletuner": (*_OF_IMAGES, "trainer-config"),
}
#: Formats of images; the others are formats of tokens.
IMAGE_FORMATS = ("kohya", "onetrainer", "simpletuner")
#: Layouts of rows, as ``cache.rows()`` names them.
LAYOUTS = ("pad", "pack", "chunk")
#: The file of metadata in an exported folder, and the version of its keys.
METADATA, SCHEMA = "latentcache.json", 3
#: Rows in memory at once.
BATCH_ROWS = 256
Advanced = Callable[[int, int], None]


class ExportSettings(Value):
    """One export; None: not given."""

    cache: Path
    out: Path
    """The folder to create."""
    format: str = setting(
        "hf-disk (load_from_disk; needs pyarrow), megatron, datatrove or mds (llm-foundry); of images: kohya"
        " (sd-scripts, lora-scripts), onetrainer or simpletuner. [default: hf-disk]",
        flag="--to",
        metavar="FORMAT",
        default="hf-disk",
    )
    pad: int | None = setting("Rows of N tokens with one document each.", metavar="N", min=1)
    pack: int | None = setting("Rows of N tokens with several documents each.", metavar="N", min=1)
    chunk: int | None = setting("Rows of N tokens cut from joined documents.", metavar="N", min=1)
    trainer: str | None = setting(
        "Trainer of hf-disk rows: plain, llama-factory, trl, unsloth or axolotl. [default: plain]",
        flag="--for",
        metavar="TRAINER",
    )
    overflow: str | None = setting(
        "Policy for documents longer than a row: error, drop, truncate_right, truncate_left or split.",
        metavar="POLICY",
    )
    validation: float = setting(
        "Fraction of the documents for validation. [default: 0]", metavar="FRACTION", default=0.0
    )
    fields: str | None = setting(
        "Of images: latents, text or all. [default: latents]", choices=("latents", "text", "all")
    )
    release: str | None = setting(
        "Release of the trainer (kohya: stable, plain, suffixed or lora-scripts), or its folder.",
        metavar="RELEASE",
    )
    architecture: str | None = setting("Model that you train, where latents fit several.", metavar="NAME")
    draw: int | None = setting("Draw latents once, by this seed [default: the mean]", metavar="SEED", min=0)
    trainer_config: Path | None = setting(
        "The trainer's settings file: its sizes and flips are checked.", metavar="FILE"
    )
    data: Path | None = setting("The images, if they moved. [default: as recorded]", metavar="DATA")
    as_path: str | None = setting("Path of OUT as the trainer sees it.", flag="--as", metavar="PATH")
    copy: bool = setting("Copy images. [default: link them]", default=False)
    beside: bool = setting("Write beside the images: OUT is their folder.", default=False)
    force: bool = setting("Export a demo cache, too.", default=False)

    def __post_init__(self) -> None:
        checked(ExportSettings, {one.name: getattr(self, one.name) for one in attributes(self)})
        real("validation", self.validation, 0, 0.99, fix="give a fraction such as 0.1")
        if self.format not in FORMATS:
            raise UsageError("unknown format", argument="format", value=self.format, fix=f"--to {'|'.join(FORMATS)}")
        takes, layouts = FORMATS[self.format], [name for name in LAYOUTS if getattr(self, name) is not None]
        for flag in self._given():
            if flag not in takes:
                why = "it holds whole documents" if "pad" not in takes else f"its flags: --{', --'.join(takes)}"
                raise UsageError(
                    f"--{flag}: not available with --to {self.format}", why=why, fix=f"leave --{flag} out"
                )
        if "pad" in takes and len(layouts) != 1:
            what = f"--{layouts[1]}: give one layout" if layouts else f"--to={self.format}: needs the length of rows"
            raise UsageError(what, fix=" or ".join(f"--{name} N" for name in LAYOUTS if name in takes))
        if self.overflow is not None and self.layout == "chunk":
            raise UsageError(f"--overflow={self.overflow}: --chunk cuts documents anyway", fix="leave it out")
        if self.format == "hf-disk":
            if find_spec("pyarrow") is None:
                why, fix = "it is not installed", "python -m pip install 'latentcache[hf]'"
                raise UsageError("--to=hf-disk: needs pyarrow", why=why, fix=fix, slug="extra-missing")
            from latentcache.export.hf_disk import check

            check(self.trainer or "plain", self.layout, self.length)

    def _given(self) -> list[str]:
        """Options of formats that were given, without ``--``."""
        settings = [one for one in attributes(self) if one.metadata and one.name != "format"]
        flags = {one.name: one.metadata.get("flag", one.name.replace("_", "-")).lstrip("-") for one in settings}
        return [flags[one.name] for one in settings if getattr(self, one.name) != one.default]

    @property
    def layout(self) -> str:
        """The layout of the rows; empty for whole documents."""
        return next((name for name in LAYOUTS if getattr(self, name) is not None), "")

    @property
    def length(self) -> int:
        """Tokens of a row; 0 for whole documents."""
        return int(getattr(self, self.layout)) if self.layout else 0


def export_cache(settings: ExportSettings, on_progress: Advanced = lambda done, total: None) -> dict[str, Any]:
    """Write the folder; returns what the format decides of the JSON output.

    ``on_progress`` is called with rows or documents done and in total.

    Raises:
        UsageError: The folder exists, or the cache does not fit the format.
        StoreError: The cache cannot be read, or the folder not be written.
    """
    from latentcache.export.documents import FILES, counts, reject_masked
    from latentcache.loader.cache import open_cache

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of parts: the command reports them itself
        cache = open_cache(settings.cache)
    if all(field.spec.collate != "pack" for field in cache.snapshots[0].fields.values()):
        what, why = f"CACHE={settings.cache}: holds no tokens", "training scripts read images with open_cache()"
        raise UsageError(what, why=why, fix="export a cache of `latentcache build DATA --tokenizer PATH`")
    parts = {"train": cache}
    if settings.validation:
        parts = dict(zip(("train", "validation"), cache.split(settings.validation), strict=True))
    metadata, dtype = _metadata(cache, settings), cache.documents().dtype.name
    documents = {name: part.documents() for name, part in parts.items()}
    for one in documents.values() if settings.format != "hf-disk" else ():
        reject_masked(one, settings.format)
    rows, about, more = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    if settings.layout:
        rows = {name: _rows(part, settings) for name, part in parts.items()}
        about = {
            "layout": settings.layout,
            "length": settings.length,
            "tokens": {name: one.tokens for name, one in rows.items()},
            "tokens_dropped": {name: dict(one.tokens_dropped) for name, one in rows.items()},
            "rows": {name: len(one) for name, one in rows.items()},
        }
        metadata["overflow"] = settings.overflow
    with atomic_folder(settings.out) as folder:
        if not rows:
            write, tokenizer = FILES[settings.format], metadata["tokenizer"]
            written = write_splits(
                documents, lambda name, batches: write(folder, name, dtype, batches, tokenizer), on_progress
            )
            about = counts(written)
        elif settings.format == "mds":
            from latentcache.export.mds import DTYPES, write_mds

            about["dtype"] = DTYPES[dtype]
            write_splits(rows, lambda name, batches: write_mds(folder / name, DTYPES[dtype], batches), on_progress)
        else:
            from latentcache.export.hf_disk import COLUMNS, write_hf_disk, write_split_names

            trainer, fingerprint = settings.trainer or "plain", metadata["fingerprint"]
            columns = COLUMNS[trainer][settings.layout]
            write_splits(
                rows, lambda name, batches: write_hf_disk(folder / name, columns, fingerprint, batches), on_progress
            )
            write_split_names(folder, list(rows))
            metadata["trainer"] = trainer
            efficiency = {name: one.packing_efficiency for name, one in rows.items()}
            more = {"for": trainer, "packing_efficiency": efficiency}
        seal(folder, metadata | about)
    return {"part": metadata["part"], **more, **about}


def write_splits(
    splits: Mapping[str, Any],
    write: Callable[[str, Iterator[Any]], Any],
    on_progress: Advanced = lambda done, total: None,
) -> dict[str, Any]:
    """Write each split by ``write``, which gets its name and batches of its rows or documents; results by split."""
    done, total = 0, sum(map(len, splits.values()))

    def advancing(name: str) -> Iterator[Any]:
        nonlocal done
        for count, batch in _batches(name, splits[name]):
            yield batch
            done += count
            on_progress(done, total)

    return {name: write(name, advancing(name)) for name in splits}


def _batches(name: str, split: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of rows or documents of each batch, and the batch."""
    if hasattr(split, "gather"):
        from latentcache.export.documents import document_batches

        if not len(split):
            raise PlanError(f"no document is in {name}", fix="give another --validation, or more data")
        yield from ((len(batch[1]), batch) for batch in document_batches(split))
        return
    for start in range(0, len(split), BATCH_ROWS):
        wanted = list(range(start, min(start + BATCH_ROWS, len(split))))
        yield len(wanted), split.batch(wanted)


def _rows(cache: Cache, settings: ExportSettings) -> Any:
    wanted: dict[str, Any] = {settings.layout: settings.length}
    if settings.overflow is not None:
        wanted["overflow"] = settings.overflow
    if settings.format == "mds" and settings.layout == "chunk":
        wanted["last_chunk"] = "drop"  # a collator would pad a short row, and would need a padding token
    return cache.rows(**wanted)


def _metadata(cache: Cache, settings: ExportSettings) -> dict[str, Any]:
    documents, snapshot = cache.documents(), cache.snapshots[0]
    rows = snapshot.fields[documents.field]
    return {
        "format": settings.format,
        "cache": str(settings.cache.resolve()),
        "snapshot": snapshot.number,
        "documents": len(documents),
        "part": snapshot.part,
        "fingerprint": snapshot.fingerprint,
        "field": documents.field,
        "recipe_id": rows.recipe_id.hex(),
        "recipe": dict(rows.recipe_json),
        "tokenizer": str(rows.provenance.get("tokenizer", "")),
        "validation": settings.validation,
    }


@contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """A folder to write into; it gets the name ``out``, which must be free, if the block ends without an error."""
    _require_free(out)
    out = out.resolve()  # a link to an empty folder stays a link, and "." has a name
    try:
        make_folder(out.parent)
        with tempfile.TemporaryDirectory(
            prefix=f"{out.name}.partial-", dir=out.parent, ignore_cleanup_errors=True
        ) as partial:
            Path(partial).chmod(0o755)
            yield Path(partial)
            _require_free(out)
            Path(partial).rename(out)  # fails on a folder that got files meanwhile
        sync_folder(out.parent)
    except OSError as error:
        _require_free(out)
        raise as_store_error(error, out) from error


def _require_free(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        fix = f"rm -r {shlex.quote(str(out))}, or " if _is_export(out) else ""
        raise UsageError(f"{out} exists", where=str(out), fix=f"{fix}give another folder")


def _is_export(out: Path) -> bool:
    """True if every file in a folder is one that an export wrote there."""
    try:
        written = {METADATA, *read_json(out / METADATA)["bytes"]}
    except (LatentcacheError, OSError, KeyError, TypeError):
        return False
    return all(path.relative_to(out).as_posix() in written for path in out.rglob("*") if not path.is_dir())


def seal(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Make every file of the folder durable, and write the metadata, with the ``bytes`` of each file, beside them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for file in files:
        sync_file(file)
    for parent in {file.parent for file in files}:
        sync_folder(parent)
    sizes = {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}
    write_json(folder / METADATA, {"schema": SCHEMA, **metadata, "bytes": sizes})
