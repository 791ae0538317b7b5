"""Export documents and rows of tokens: each format is a writer of one split, which gets batches in their order.

Cost: one batch in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from latentcache.errors import PlanError, UsageError
from latentcache.export.mds import DTYPES, write_mds
from latentcache.export.run import Advanced, Export
from latentcache.export.tokens.documents import FILES, counts, document_batches, reject_masked

if TYPE_CHECKING:
    from latentcache.export.folder import Folder
    from latentcache.export.settings import ExportSettings

#: Rows in memory at once.
BATCH_ROWS = 256


class TokenExport(Export):
    """One export of tokens. See :class:`~latentcache.export.run.Export`."""

    resumes = False

    def __init__(self, settings: ExportSettings) -> None:
        super().__init__(settings)
        if all(field.spec.collate != "pack" for field in self.snapshot.fields.values()):
            raise UsageError(
                f"CACHE={settings.cache}: holds no tokens",
                why="training scripts read images with open_cache()",
                fix="export a cache of `latentcache build DATA --tokenizer PATH`",
            )
        parts = {"train": self.cache}
        if settings.validation:
            parts = dict(zip(("train", "validation"), self.cache.split(settings.validation), strict=True))
        documents = {name: part.documents() for name, part in parts.items()}
        for part in documents.values() if settings.format != "hf-disk" else ():
            reject_masked(part, settings.format)
        rows = {name: part.rows(**self._layout()) for name, part in parts.items()} if settings.layout else {}
        self._splits: Mapping[str, Any] = rows or documents
        self.noun = "rows" if rows else "documents"
        self._documents = self.cache.documents()
        self.fields = [self._documents.field]

    def __len__(self) -> int:
        return sum(map(len, self._splits.values()))

    @property
    def bytes(self) -> int:
        """See ``Export``."""
        settings, itemsize = self.settings, self._documents.dtype.itemsize
        if settings.layout:
            columns = 3 if settings.format == "hf-disk" else 1
            return len(self) * settings.length * 4 * columns
        return int(sum(split.lengths.sum() for split in self._splits.values())) * itemsize

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``Export``."""
        settings, metadata, about, more = self.settings, self._metadata(), dict[str, Any](), dict[str, Any]()
        root, dtype = folder.root, self._documents.dtype.name
        if settings.layout:
            metadata["overflow"] = settings.overflow
            about = {
                "layout": settings.layout,
                "length": settings.length,
                "tokens": {name: rows.tokens for name, rows in self._splits.items()},
                "tokens_dropped": {name: dict(rows.tokens_dropped) for name, rows in self._splits.items()},
                "rows": {name: len(rows) for name, rows in self._splits.items()},
            }
        if not settings.layout:
            write, tokenizer = FILES[settings.format], metadata["tokenizer"]
            about = counts(self._written(lambda name, part: write(root, name, dtype, part, tokenizer), on_progress))
        elif settings.format == "mds":
            about["dtype"] = DTYPES[dtype]
            self._written(lambda name, part: write_mds(root / name, DTYPES[dtype], part), on_progress)
        else:
            from latentcache.export.tokens.hf_disk import COLUMNS, write_hf_disk, write_split_names

            trainer, fingerprint = settings.trainer or "plain", metadata["fingerprint"]
            columns = COLUMNS[trainer][settings.layout]
            self._written(lambda name, part: write_hf_disk(root / name, columns, fingerprint, part), on_progress)
            write_split_names(root, list(self._splits))
            metadata["trainer"] = trainer
            efficiency = {name: rows.packing_efficiency for name, rows in self._splits.items()}
            more = {"for": trainer, "packing_efficiency": efficiency}
        folder.add_all()
        return metadata | about, {"format": settings.format, "part": metadata["part"], **more, **about}

    def _written(self, write: Callable[[str, Iterator[Any]], Any], on_progress: Advanced) -> dict[str, Any]:
        return write_splits(self._splits, write, on_progress)

    def _layout(self) -> dict[str, Any]:
        """Arguments of ``cache.rows``."""
        settings = self.settings
        wanted: dict[str, Any] = {settings.layout: settings.length}
        if settings.overflow is not None:
            wanted["overflow"] = settings.overflow
        if settings.format == "mds" and settings.layout == "chunk":
            wanted["last_chunk"] = "drop"  # a collator would pad a short row, and would need a padding token
        return wanted

    def _metadata(self) -> dict[str, Any]:
        field = self.snapshot.fields[self._documents.field]
        return {
            **self.facts,
            "documents": len(self._documents),
            "field": self._documents.field,
            "recipe_id": field.recipe_id.hex(),
            "recipe": dict(field.recipe_json),
            "tokenizer": str(field.provenance.get("tokenizer", "")),
            "validation": self.settings.validation,
        }


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
        if not len(split):
            raise PlanError(f"no document is in {name}", fix="give another --validation, or more data")
        yield from ((len(batch[1]), batch) for batch in document_batches(split))
        return
    for start in range(0, len(split), BATCH_ROWS):
        wanted = list(range(start, min(start + BATCH_ROWS, len(split))))
        yield len(wanted), split.batch(wanted)
