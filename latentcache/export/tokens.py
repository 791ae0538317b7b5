"""Export whole documents as raw ids, and rows of tokens for trainers. Cost: one batch or one MDS shard in memory.

Megatron core and datatrove read whole documents: one file of ids per split. Such a file has no labels, so documents
with tokens without loss are rejected.

Megatron: NVIDIA/Megatron-LM, ``megatron/core/datasets/indexed_dataset.py`` at ``00caa53`` and in the wheel of
megatron-core 0.16.1: beside the ``.bin`` of ids an ``.idx``: the magic and a zero, version 1, a code for the type,
the number of sequences and the number of document indices; then a length (int32) and a byte offset (int64) for each
sequence, and (int64) the sequence that each document begins with, with the number of all of them at the end. Here
each sequence is a document.

datatrove (nanotron reads it too): huggingface/datatrove 0.10.1, ``pipeline/tokens/tokenizer.py``
(``TokenizedFile``) and ``utils/dataset.py``: ``.ds`` holds ids of 2 or 4 bytes, ``.ds.index`` the end of each
document in tokens (uint64), ``.ds.metadata`` three lines: name of the tokenizer and bytes of an id, tokens, tokens as
text. Its readers take the bytes of an id as an argument and ignore that file, so the export prints the number.
``.ds.loss`` is not written: no reader opens it.

MDS: llm-foundry's ``StreamingTextDataset`` (0.22.0, ``data/text_data.py``) truncates long samples silently. So a
sample is a row, not a document. A row is written without padding, in the column ``tokens``, as an array like that of
llm-foundry's own converter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import PlanError, UsageError
from latentcache.export.run import Advanced, Export
from latentcache.export.shards import SHARD_BYTES, Columns, array, sample
from latentcache.loader.documents import Documents
from latentcache.store.atomic_io import make_folder

if TYPE_CHECKING:
    from latentcache.export.folder import Folder
    from latentcache.export.settings import ExportSettings

#: Rows in memory at once.
BATCH_ROWS = 256
Batch = tuple[NDArray[Any], NDArray[np.int64]]
"""Documents: their ids, and the end of each in these."""
#: Tokens in memory at once, if no document is longer.
BATCH_TOKENS = 1 << 22
#: Of Megatron: magic, version, code of the type, sequences, document indices: 34 bytes, nothing between them.
_HEADER = struct.Struct("<9sQBQQ")
#: Megatron codes of the types of ids. There is none for uint32, and no tokenizer has 2^31 ids.
_CODES = {"uint16": 8, "int32": 4}
COLUMN = "tokens"
#: Type in the cache -> in the shards. For wide ids that of llm-foundry's converter: torch does little with uint32.
DTYPES = {"uint16": "uint16", "uint32": "int32"}


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
        layout: dict[str, Any] = {settings.layout: settings.length}
        if settings.overflow is not None:
            layout["overflow"] = settings.overflow
        if settings.format == "mds" and settings.layout == "chunk":
            layout["last_chunk"] = "drop"  # a collator would pad a short row, and would need a padding token
        rows = {name: part.rows(**layout) for name, part in parts.items()} if settings.layout else {}
        self._splits: Mapping[str, Any] = rows or documents
        self.noun = "rows" if rows else "documents"
        self._documents = self.cache.documents()
        self.fields = [self._documents.field]

    def __len__(self) -> int:
        return sum(map(len, self._splits.values()))

    @property
    def bytes(self) -> int:
        """See ``Export``."""
        settings = self.settings
        itemsize = self._documents.dtype.itemsize
        if settings.layout:
            columns = 3 if settings.format == "hf-disk" else 1
            return len(self) * settings.length * 4 * columns
        return int(sum(split.lengths.sum() for split in self._splits.values())) * itemsize

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``Export``."""
        settings, about, more = self.settings, dict[str, Any](), dict[str, Any]()
        root = folder.root
        dtype = self._documents.dtype.name
        field = self.snapshot.fields[self._documents.field]
        metadata = {
            **self.facts,
            "documents": len(self._documents),
            "field": self._documents.field,
            "recipe_id": field.recipe_id.hex(),
            "recipe": dict(field.recipe_json),
            "tokenizer": str(field.provenance.get("tokenizer", "")),
            "validation": settings.validation,
        }
        if settings.layout:
            metadata["overflow"] = settings.overflow
            about = {
                "layout": settings.layout,
                "length": settings.length,
                "tokens": {name: rows.tokens for name, rows in self._splits.items()},
                "tokens_dropped": {name: dict(rows.tokens_dropped) for name, rows in self._splits.items()},
                "rows": {name: len(rows) for name, rows in self._splits.items()},
            }
        write: Callable[[str, Iterator[Any]], Any]
        if not settings.layout:
            write = partial(FILES[settings.format], root, dtype=dtype, tokenizer=metadata["tokenizer"])
        elif settings.format == "mds":
            about["dtype"] = DTYPES[dtype]
            write = partial(write_mds, root, dtype=DTYPES[dtype])
        else:
            from latentcache.export.hf_disk import COLUMNS, write_hf_disk, write_split_names

            trainer = settings.trainer or "plain"
            columns = COLUMNS[trainer][settings.layout]
            fingerprint = metadata["fingerprint"]
            write = partial(write_hf_disk, root, columns=columns, fingerprint=fingerprint)
            write_split_names(root, list(self._splits))
            metadata["trainer"] = trainer
            efficiency = {name: rows.packing_efficiency for name, rows in self._splits.items()}
            more = {"for": trainer, "packing_efficiency": efficiency}
        written = write_splits(self._splits, write, on_progress)
        about |= counts(written) if not settings.layout else {}
        folder.add_all()
        return metadata | about, {"format": settings.format, "part": metadata["part"], **more, **about}


def write_splits(
    splits: Mapping[str, Any],
    write: Callable[[str, Iterator[Any]], Any],
    on_progress: Advanced = lambda done, total: None,
) -> dict[str, Any]:
    """Call ``write`` with the name and the batches of each split; returns its results by split."""
    done = 0
    total = sum(map(len, splits.values()))

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


class Ids(NamedTuple):
    """The ids of one split, as they were written."""

    dtype: np.dtype[Any]
    ends: NDArray[np.int64]
    """(D,) end of each document, in tokens from the beginning of the file."""
    last_id: int | None
    """The last id of every document; None if they differ."""


def write_megatron(folder: Path, split: str, batches: Iterable[Batch], *, dtype: str, tokenizer: str = "") -> Ids:
    """Write ``.bin`` and ``.idx``."""
    ids = _write_ids(folder / f"{split}.bin", "int32" if dtype == "uint32" else dtype, batches)
    (folder / f"{split}.idx").write_bytes(megatron_index(ids))
    return ids


def megatron_index(ids: Ids) -> bytes:
    """The bytes of ``.idx``."""
    lengths = np.diff(ids.ends, prepend=0)
    begins = (ids.ends - lengths) * ids.dtype.itemsize
    columns = lengths.astype("<i4"), begins.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
    head = _HEADER.pack(b"MMIDIDX\x00\x00", 1, _CODES[ids.dtype.name], len(lengths), len(lengths) + 1)
    return b"".join([head, *(column.tobytes() for column in columns)])


def write_datatrove(folder: Path, split: str, batches: Iterable[Batch], *, dtype: str, tokenizer: str = "") -> Ids:
    """Write ``.ds``, ``.ds.index`` and ``.ds.metadata``; the first line of the last one has one ``|``."""
    path = folder / split / "00000_tokens.ds"
    ids = _write_ids(path, dtype, batches)
    path.with_name(f"{path.name}.index").write_bytes(ids.ends.astype("<u8").tobytes())
    name = " ".join(tokenizer.replace("|", " ").split()) or "Unknown Tokenizer"
    tokens = int(ids.ends[-1])
    words = f"{name}|{ids.dtype.itemsize}\n{tokens}\n{tokens / 1e9:.3g} GT"
    path.with_name(f"{path.name}.metadata").write_text(words, "utf-8")
    return ids


def _write_ids(path: Path, dtype: str, batches: Iterable[Batch]) -> Ids:
    make_folder(path.parent)
    stored = np.dtype(dtype)
    lengths = [np.empty(0, np.int64)]
    last = set[int]()
    with path.open("wb") as sink:
        for ids, ends in batches:
            lengths.append(np.diff(ends, prepend=0))
            last |= set(np.unique(ids[ends - 1]).tolist()) if len(last) < 2 else set()
            sink.write(ids.astype(stored.newbyteorder("<")).data.cast("B"))
    return Ids(stored, np.cumsum(np.concatenate(lengths)), last.pop() if len(last) == 1 else None)


FILES = {"megatron": write_megatron, "datatrove": write_datatrove}


def counts(written: Mapping[str, Ids]) -> dict[str, Any]:
    """Documents and tokens by split, and the type and last id of all splits."""
    last = {ids.last_id for ids in written.values()}
    return {
        "splits": {name: len(ids.ends) for name, ids in written.items()},
        "tokens": {name: int(ids.ends[-1]) for name, ids in written.items()},
        "dtype": next(ids.dtype.name for ids in written.values()),
        "last_id": last.pop() if len(last) == 1 else None,
    }


def reject_masked(documents: Documents, name: str) -> None:
    """Reject documents with tokens without loss, because the format ``name`` has no labels."""
    ends = np.concatenate(([0], documents.span_ends)).astype(np.int64)
    sums = np.concatenate(([0], np.cumsum(documents.spans[:, 1], dtype=np.int64)))
    masked = np.flatnonzero(np.diff(sums[ends]) != documents.lengths)
    if len(masked):
        raise UsageError(
            f"{name} has no labels, and {len(masked)} of {len(documents)} documents have tokens without loss",
            where=documents.where(int(masked[0])),
            why="a trainer would learn all tokens, those of questions too",
            fix="--to hf-disk, which has labels; or build a cache with --loss all",
        )


def document_batches(documents: Documents) -> Iterator[Batch]:
    """Yield documents that fit into memory together."""
    lengths = np.asarray(documents.lengths, dtype=np.int64)
    start = 0
    all_ends = np.cumsum(lengths)
    while start < len(all_ends):
        before = int(all_ends[start - 1]) if start else 0
        stop = max(int(np.searchsorted(all_ends, before + BATCH_TOKENS, side="right")), start + 1)
        ends = all_ends[start:stop] - before
        ids = np.empty(int(ends[-1]), dtype=documents.dtype)
        documents.gather(np.arange(start, stop), ids, ends - lengths[start:stop])
        yield ids, ends
        start = stop


def write_mds(root: Path, split: str, batches: Iterable[Mapping[str, Any]], *, dtype: str) -> None:
    """Write the shards of one split: (B, L) rows without their padding, which is on the right; all have loss."""
    folder = root / split
    make_folder(folder)
    columns = Columns({COLUMN: f"ndarray:{dtype}"})
    shards = list[tuple[str, int, int]]()
    for samples in _shards(_samples(dtype, batches), columns.bytes):
        path = folder / f"shard.{len(shards):05d}.mds"
        columns.write_shard(path, samples)
        shards.append((path.name, len(samples), path.stat().st_size))
    (folder / "index.json").write_bytes(columns.index(shards))


def _samples(dtype: str, batches: Iterable[Mapping[str, Any]]) -> Iterator[bytes]:
    for batch in batches:
        lengths = (np.asarray(batch["attention_mask"]) != 0).sum(axis=1)
        for ids, length in zip(np.asarray(batch["input_ids"]), lengths.tolist(), strict=True):
            yield sample([array(ids[:length].astype(np.dtype(dtype).newbyteorder("<")))])


def _shards(samples: Iterable[bytes], beside: int) -> Iterator[list[bytes]]:
    """Yield samples that share a shard, with 4 bytes each and ``beside`` for all."""
    shard = list[bytes]()
    size = beside
    for row in samples:
        if shard and size + 4 + len(row) > SHARD_BYTES:
            yield shard
            shard = []
            size = beside
        shard.append(row)
        size += 4 + len(row)
    if shard:
        yield shard
