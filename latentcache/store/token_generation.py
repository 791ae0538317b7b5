"""A generation of kind tokens: documents as columns, the blocks they lie in, and the files they came from.

Decides what a reader of tokens sees. It is written and switched to as a generation of pictures is, by the same
function; its format version is 3, so that a release that knows no tokens refuses it. Guarantee: columns that
contradict each other are refused when it is opened, before an id is read. Cost: 48 bytes a document, 8 a run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheFormatError
from latentcache.identity.stat import StatMemo
from latentcache.store.blocks import check_spans
from latentcache.store.columns import (
    MAX_OFFSET,
    StringColumn,
    check_limits,
    check_shapes,
    check_strings,
    checked_bytes,
    load_columns,
)
from latentcache.store.documents import Documents
from latentcache.store.generation import (
    Generation,
    Rows,
    Waiting,
    load_generation,
    unpack_memo,
)
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import TOKENS, TOKENS_VERSION, Told
from latentcache.store.publication import checked_shards, contradictions, find_manifest, put_generation
from latentcache.token_recipe import TokenRecipe

_DOCUMENT_SHAPES: Mapping[str, tuple[str, int]] = {
    "content": ("|u1", 16),
    "block": ("<i4", 0),
    "start": ("<u4", 0),
    "length": ("<u4", 0),
    "span_ends": ("<i8", 0),
    "source": ("<i4", 0),
    "line": ("<u4", 0),
    "control": ("<u4", 0),
}
_DOCUMENT_NAMES = tuple(name for name in (*_DOCUMENT_SHAPES, "spans") if name != "control")
_BLOCK_SHAPES: Mapping[str, tuple[str, int]] = {
    "key": ("|u1", 32),
    "shard": ("<i4", 0),
    "offset": ("<u8", 0),
    "tokens": ("<u4", 0),
    "ids_hash": ("|u1", 16),
}
_SOURCE_SHAPES: Mapping[str, tuple[str, int]] = {
    "sources_ends": ("<u8", 0),
    "source_content": ("|u1", 16),
    "source_stat": ("<u8", 6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The blocks that hold the documents. B blocks, in the order of the first document in each."""

    key: NDArray[np.uint8]
    """(B, 32) entry keys."""
    shard: NDArray[np.int32]
    """(B,) position in the manifest's list of shards."""
    offset: NDArray[np.uint64]
    """(B,) byte offset of the block's header in the shard's ``data.mdb``."""
    tokens: NDArray[np.uint32]
    """(B,) ids in the block, those of documents that nobody needs any more too."""
    ids_hash: NDArray[np.uint8]
    """(B, 16) xxh3-128 of the ids."""

    def __len__(self) -> int:
        return len(self.shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files that documents came from. F files, in the order in which they were read."""

    names: StringColumn
    """Relative to the folder of DATA."""
    content: NDArray[np.uint8]
    """(F, 16) content hashes of the whole files."""
    stat: NDArray[np.uint64]
    """(F, 6) stat memos."""
    reading: NDArray[np.uint8] | None = None
    """(F, 16) hashes of how each was read; None where the build did not say."""

    def __len__(self) -> int:
        return len(self.names)

    def memo(self, index: int) -> StatMemo:
        """The stat memo of one file."""
        return unpack_memo(self.stat[index].tolist())


class Arriving(Protocol):
    """What knows the documents that have arrived."""

    def some(self, rows: NDArray[np.integer]) -> Documents:
        """Some documents that are there, with their runs, as columns of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGeneration(Told):
    """One finished build of tokens, or one that is under way and followed."""

    number: int
    recipe: TokenRecipe
    documents: Documents
    control: NDArray[np.uint32]
    """(D,) control strings that stand in the record of each document as text."""
    blocks: Blocks
    sources: Sources
    shards: Sequence[str]
    refused: tuple[Mapping[str, Any], ...]
    """Quarantined records: name of the file, line, cause, detail, hint."""
    notes: tuple[Mapping[str, Any], ...]
    manifest: Mapping[str, Any]
    pins: tuple[object, ...] = field(default=(), compare=False, repr=False)
    """What keeps its files from being collected while this object is in use."""
    arrivals: Waiting | None = field(default=None, compare=False, repr=False)
    """What waits for documents, where the build is still under way; None for a finished one."""
    expected: Arriving | None = field(default=None, compare=False, repr=False)
    """What is known of documents that have arrived, beside ``arrivals``."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits of what its views are made of: recipe, documents in their order, lengths and runs."""
        return str(self.manifest["fingerprint"])

    @property
    def rows(self) -> Rows:
        """The blocks as rows of entries, for what moves entries whatever they hold: salvage, compaction, removal."""
        count = len(self.blocks)
        return Rows(
            key=self.blocks.key,
            shard=self.blocks.shard,
            offset=self.blocks.offset,
            bucket=np.zeros(count, dtype=np.int32),
            sample=np.arange(count, dtype=np.int32),
            crop=np.zeros((count, 2), dtype=np.uint32),
            resize=np.ones((count, 2), dtype=np.uint32),
            pixel_hash=self.blocks.ids_hash,
        )


AnyGeneration = Generation | TokenGeneration


def publish_tokens(
    layout: CacheLayout,
    *,
    recipe: TokenRecipe,
    documents: Documents,
    control: NDArray[np.uint32],
    blocks: Blocks,
    sources: Sources,
    shards: Sequence[str],
    refused: Sequence[Mapping[str, Any]],
    notes: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
    complete: bool = True,
) -> int:
    """Write the next generation and switch ``CURRENT`` to it. Returns its number.

    Args:
        layout: The cache, whose builder lock the caller holds.
        recipe: What the documents were made by.
        documents: In the order of their sources.
        control: (D,) control strings that stand in each record as text.
        blocks: What ``documents.block`` points into.
        sources: What ``documents.source`` points into.
        shards: The shard names that ``blocks.shard`` points into.
        refused: Quarantined records.
        notes: What is neither used nor refused.
        facts: More for the manifest: ``source``, ``provenance``, ``fingerprint``, ``tokens``.
        complete: Whether every usable record has its document.

    Raises:
        DiskFullError: No space; the old generation stays.
        CacheReadOnlyError: The cache cannot be written.
    """
    counts = {"samples": len(documents), "blocks": len(blocks), "quarantined": len(refused)}
    return put_generation(
        layout,
        version=TOKENS_VERSION,
        about={
            "kind": TOKENS,
            "recipe": recipe.as_json(),
            "recipe_id": recipe.recipe_id.hex(),
            "shards": list(shards),
            "counts": counts,
        },
        columns=_arrays(documents, blocks, sources) | {"control": control},
        lists={"refused": list(refused), "notes": list(notes)},
        facts=facts,
        complete=complete,
    )


def load_tokens(cache: Path, number: int | None = None) -> TokenGeneration:
    """Open a generation of a token cache, the current one unless a number is given.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it yet.
        CacheFormatError: Written by a newer version, or a cache of pictures.
        CacheDamagedError: A manifest or a column is not what was written.
    """
    number, manifest, folder = find_manifest(cache, number)
    if manifest.get("kind") != TOKENS:
        raise CacheFormatError(
            "this cache holds pictures, not tokens",
            where=str(cache),
            why="a cache holds one kind of entries, and they are opened in different ways",
            fix="open it with latentcache.open_cache(path), or give tokens another folder with --out",
            slug="cache-kind",
        )
    with contradictions(folder):
        return _assemble(number, manifest, folder)


def load_any(
    cache: Path, number: int | None = None, *, pictures: Callable[[Path, int | None], Generation] = load_generation
) -> AnyGeneration:
    """Open a generation of either kind, by ``pictures`` one of those. Errors as :func:`load_tokens` but the kind."""
    _, manifest, _ = find_manifest(cache, number)
    return load_tokens(cache, number) if manifest.get("kind") == TOKENS else pictures(cache, number)


def _assemble(number: int, manifest: Mapping[str, Any], folder: Path) -> TokenGeneration:
    shards = checked_shards(number, manifest)
    columns = load_columns(folder, manifest["columns"])
    _check(columns, len(shards))
    lists = json.loads(checked_bytes(folder / "refused.json", manifest["lists"]["checksum"]))
    names = StringColumn(columns["sources_bytes"], columns["sources_ends"])
    return TokenGeneration(
        number=number,
        recipe=TokenRecipe.from_json(manifest["recipe"]),
        documents=Documents(sources=tuple(names), **{name: columns[name] for name in _DOCUMENT_NAMES}),
        control=columns["control"],
        blocks=Blocks(**{name: columns[name] for name in Blocks.__dataclass_fields__}),
        sources=Sources(
            names=names,
            content=columns["source_content"],
            stat=columns["source_stat"],
            reading=columns.get("source_reading"),
        ),
        shards=shards,
        refused=tuple(lists["refused"]),
        notes=tuple(lists["notes"]),
        manifest=manifest,
    )


def _check(columns: Mapping[str, NDArray[Any]], num_shards: int) -> None:
    """Refuse columns of another type or shape, and positions that point nowhere.

    Raises:
        ValueError: With the column's name.
        KeyError: A column is not there.
    """
    num_blocks, num_sources = len(columns["shard"]), len(columns["sources_ends"])
    check_shapes(columns, _DOCUMENT_SHAPES, len(columns["length"]))
    check_shapes(columns, {"spans": ("<u4", 2)}, len(columns["spans"]))
    check_shapes(columns, _BLOCK_SHAPES, num_blocks)
    check_shapes(columns, _SOURCE_SHAPES, num_sources)
    if "source_reading" in columns:
        check_shapes(columns, {"source_reading": ("|u1", 16)}, num_sources)
    check_strings(columns, "sources")
    check_limits(columns, {"shard": num_shards, "offset": MAX_OFFSET, "block": num_blocks, "source": num_sources})
    ends = columns["start"].astype(np.int64) + columns["length"]
    if not columns["length"].all() or (ends > columns["tokens"][columns["block"]]).any():
        raise ValueError("a document is empty, or leaves its block")
    check_spans(columns["length"], columns["span_ends"], columns["spans"])


def _arrays(documents: Documents, blocks: Blocks, sources: Sources) -> dict[str, NDArray[Any]]:
    arrays: dict[str, NDArray[Any]] = {name: getattr(documents, name) for name in _DOCUMENT_NAMES}
    arrays |= {name: getattr(blocks, name) for name in Blocks.__dataclass_fields__}
    arrays |= {"sources_bytes": sources.names.data, "sources_ends": sources.names.ends}
    if sources.reading is not None:
        arrays["source_reading"] = sources.reading
    return arrays | {"source_content": sources.content, "source_stat": sources.stat}
