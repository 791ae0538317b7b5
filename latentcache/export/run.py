"""Export a cache of documents: check the settings, open the cache, write the folder.

Each format takes its own settings; a setting that a format does not take is rejected, never ignored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import UsageError
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.loader.cache import Cache
    from latentcache.loader.rows import Rows

#: Format -> the settings that it takes.
FORMATS: Mapping[str, tuple[str, ...]] = {
    "hf-disk": ("pad", "pack", "chunk", "for", "overflow", "padding-side", "validation"),
    "megatron": ("validation",),
    "datatrove": ("validation",),
    "mds": ("pad", "chunk", "overflow", "validation"),
}
#: Layouts of rows, as ``cache.rows()`` names them.
LAYOUTS = ("pad", "pack", "chunk")
Advanced = Callable[[int, int], None]


class ExportSettings(Value):
    """One export; None: not given."""

    cache: Path
    out: Path
    """The folder to create."""
    format: str = "hf-disk"
    pad: int | None = None
    """Tokens per row, one document each."""
    pack: int | None = None
    """Tokens per row, several documents each."""
    chunk: int | None = None
    """Tokens per row, cut from joined documents."""
    trainer: str | None = None
    overflow: str | None = None
    padding_side: str | None = None
    validation: float = 0.0
    """Fraction of the documents for validation."""

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"--to={self.format}: unknown format", fix=f"--to {'|'.join(FORMATS)}")
        takes = FORMATS[self.format]
        for flag, value in self.flags().items():
            if value is not None and flag not in takes:
                why = "it holds whole documents" if "pad" not in takes else f"its flags: --{', --'.join(takes)}"
                raise UsageError(
                    f"--{flag}: not available with --to {self.format}", why=why, fix=f"leave --{flag} out"
                )
        layouts = [name for name in LAYOUTS if getattr(self, name) is not None]
        if "pad" in takes and len(layouts) != 1:
            problem = (
                f"--{layouts[1]}: give one layout" if layouts else f"--to={self.format}: needs the length of rows"
            )
            raise UsageError(problem, fix=" or ".join(f"--{name} N" for name in LAYOUTS if name in takes))
        if self.padding_side is not None and self.layout != "pad":
            raise UsageError(
                f"--padding-side={self.padding_side}: rows of --{self.layout} have no padding", fix="leave it out"
            )
        if self.overflow is not None and self.layout == "chunk":
            raise UsageError(f"--overflow={self.overflow}: --chunk cuts documents anyway", fix="leave it out")
        if self.format == "hf-disk" and find_spec("pyarrow") is None:
            fix = "python -m pip install 'latentcache[hf]'"
            raise UsageError("--to=hf-disk: needs pyarrow", why="it is not installed", fix=fix, slug="extra-missing")

    def flags(self) -> dict[str, Any]:
        """Flag -> value."""
        own = {"for": self.trainer, "overflow": self.overflow, "padding-side": self.padding_side}
        return {name: getattr(self, name) for name in LAYOUTS} | own

    @property
    def layout(self) -> str:
        """The layout of the rows; empty for whole documents."""
        return next((name for name in LAYOUTS if getattr(self, name) is not None), "")

    @property
    def length(self) -> int:
        """Tokens per row."""
        return int(getattr(self, self.layout)) if self.layout else 0


def export_cache(settings: ExportSettings, on_progress: Advanced = lambda done, total: None) -> dict[str, Any]:
    """Write the folder; returns what the format decides of the JSON output.

    Args:
        settings: The export.
        on_progress: Called with rows or documents done and in total.

    Raises:
        UsageError: The folder exists, or the cache does not fit the format.
        StoreError: The cache cannot be read, or the folder not be written.
    """
    from latentcache.loader.cache import open_cache

    if settings.format == "hf-disk":
        _hf_settings(settings, {})  # checked before the cache is opened
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of parts: the command reports them itself
        cache = open_cache(settings.cache)
    parts = {"train": cache}
    if settings.validation:
        parts = dict(zip(("train", "validation"), cache.split(settings.validation), strict=True))
    facts = _facts(cache, settings)
    write = _hf_disk if settings.format == "hf-disk" else _mds if settings.format == "mds" else _documents
    return {"part": cache.snapshots[0].part, **write(settings, parts, facts, on_progress)}


def _hf_settings(settings: ExportSettings, facts: Mapping[str, Any]) -> Any:
    from latentcache.export.hf_disk import HfDiskSettings, check_length

    check_length(settings.length)
    left = settings.padding_side == "left"
    trainer = settings.trainer or "plain"
    return HfDiskSettings(out=settings.out, trainer=trainer, layout=settings.layout, left_padded=left, facts=facts)


def _hf_disk(
    settings: ExportSettings, parts: Mapping[str, Cache], facts: Mapping[str, Any], on_progress: Advanced
) -> dict[str, Any]:
    from latentcache.export.hf_disk import export_hf_disk

    side = settings.padding_side or "right"
    more = {"padding_side": side} if settings.layout == "pad" else {}
    splits = {name: _rows(part, settings, **more) for name, part in parts.items()}
    about = _about(splits, settings)
    facts = {**facts, **about, "overflow": settings.overflow, "padding_side": side}
    rows = export_hf_disk(splits, _hf_settings(settings, facts), on_progress)
    efficiency = {name: part.packing_efficiency for name, part in splits.items()}
    return {"for": settings.trainer or "plain", "rows": rows, "packing_efficiency": efficiency, **about}


def _mds(
    settings: ExportSettings, parts: Mapping[str, Cache], facts: Mapping[str, Any], on_progress: Advanced
) -> dict[str, Any]:
    from latentcache.export.documents import reject_masked
    from latentcache.export.mds import DTYPES, export_mds

    for part in parts.values():
        reject_masked(part.documents(), "mds")
    # A collator would pad a short row at the end, and would need a padding token.
    more = {"last_chunk": "drop"} if settings.layout == "chunk" else {}
    splits = {name: _rows(part, settings, **more) for name, part in parts.items()}
    about = _about(splits, settings)
    dtype = parts["train"].documents().dtype.name
    facts = {**facts, **about, "overflow": settings.overflow}
    return {"rows": export_mds(splits, settings.out, dtype, facts, on_progress), "dtype": DTYPES[dtype], **about}


def _documents(
    settings: ExportSettings, parts: Mapping[str, Cache], facts: Mapping[str, Any], on_progress: Advanced
) -> dict[str, Any]:
    from latentcache.export.datatrove import DATATROVE
    from latentcache.export.documents import counts, export_documents
    from latentcache.export.megatron import MEGATRON

    form = {"megatron": MEGATRON, "datatrove": DATATROVE}[settings.format]
    documents = {name: part.documents() for name, part in parts.items()}
    return counts(export_documents(documents, form, settings.out, facts, on_progress))


def _rows(cache: Cache, settings: ExportSettings, **more: Any) -> Rows:
    wanted: dict[str, Any] = {settings.layout: settings.length, **more}
    return cache.rows(**wanted) if settings.overflow is None else cache.rows(**wanted, overflow=settings.overflow)  # type: ignore[arg-type]


def _about(splits: Mapping[str, Rows], settings: ExportSettings) -> dict[str, Any]:
    """Facts about rows, for metadata and JSON output."""
    return {
        "layout": settings.layout,
        "length": settings.length,
        "tokens": {name: rows.tokens for name, rows in splits.items()},
        "tokens_dropped": {name: dict(rows.tokens_dropped) for name, rows in splits.items()},
    }


def _facts(cache: Cache, settings: ExportSettings) -> dict[str, Any]:
    """Metadata of the cache."""
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
