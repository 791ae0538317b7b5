"""The columns of the next generation of tokens, from what was surveyed and what is committed.

Guarantee: documents stand in the order of their records, blocks in the order of their first document; both depend on
the data and on the blocks that are there, not on who tokenised them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.errors import CacheDamagedError
from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.preflight import provenance
from latentcache.pipeline.token_known import Known
from latentcache.pipeline.token_settings import TokenSettings, options_json
from latentcache.pipeline.token_survey import TokenSurvey, refused_rows, token_refusal_json
from latentcache.sources.sample import Refusal
from latentcache.store.columns import StringColumn
from latentcache.store.documents import Documents, take_spans
from latentcache.store.generation import pack_memo
from latentcache.store.token_accounts import fingerprint, token_accounts
from latentcache.store.token_generation import Blocks, Sources, TokenGeneration
from latentcache.token_recipe import TokenRecipe

_LIBRARIES = ("transformers", "tokenizers", "tiktoken", "numpy", "pyarrow", "lmdb")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDraft:
    """A generation that is not written yet."""

    documents: Documents
    control: NDArray[np.uint32]
    blocks: Blocks
    sources: Sources
    shards: tuple[str, ...]
    refused: tuple[Refusal, ...]
    notes: tuple[Refusal, ...]


def assemble_tokens(work: TokenSurvey, known: Known, refused: Mapping[bytes, Refusal]) -> TokenDraft:
    """Put the columns together.

    Args:
        work: All records.
        known: All documents that are committed.
        refused: Records that the tokenizer refused, by content hash; those of the survey are added.

    Raises:
        CacheDamagedError: A record is neither committed nor refused. None is ever left out in silence.
    """
    found = known.find(work.content)
    usable = np.flatnonzero(found >= 0)
    again = refused_rows(work, refused)
    if len(usable) + len(again) != len(found):
        raise CacheDamagedError(
            f"{len(found) - len(usable) - len(again)} documents that were committed cannot be read",
            fix="run the same command again; if it stays so, check the disk",
        )
    chosen = found[usable]
    needed, first = np.unique(known.documents.block[chosen], return_index=True)
    needed = needed[np.argsort(first)]
    number = np.full(len(known.blocks), -1, dtype=np.int32)
    number[needed] = np.arange(len(needed), dtype=np.int32)
    ends, spans = take_spans(known.documents.span_ends, known.documents.spans, chosen)
    names = tuple(source.name for source in work.sources)
    documents = Documents(
        content=work.content[usable],
        block=number[known.documents.block[chosen]],
        start=known.documents.start[chosen],
        length=known.documents.length[chosen],
        span_ends=ends,
        spans=spans,
        source=work.source[usable],
        line=work.line[usable],
        sources=names,
    )
    blocks, shards = _blocks(known, needed)
    contents = b"".join(source.content for source in work.sources)
    readings = b"".join(source.reading for source in work.sources)
    stats = [pack_memo(source.stat) for source in work.sources]
    sources = Sources(
        names=StringColumn.of(names),
        content=np.frombuffer(contents, dtype=np.uint8).reshape(-1, HASH_BYTES),
        stat=np.array(stats, dtype=np.uint64).reshape(-1, 6),
        reading=np.frombuffer(readings, dtype=np.uint8).reshape(-1, HASH_BYTES),
    )
    place = {name: position for position, name in enumerate(names)}
    everything = sorted(
        (*work.refused, *refused_rows(work, refused)), key=lambda one: (place.get(one.name, -1), one.name, one.line)
    )
    return TokenDraft(
        documents=documents,
        control=known.documents.control[chosen],
        blocks=blocks,
        sources=sources,
        shards=shards,
        refused=tuple(everything),
        notes=work.notes,
    )


def _blocks(known: Known, needed: NDArray[Any]) -> tuple[Blocks, tuple[str, ...]]:
    """The blocks that are needed, in their order, and the names of their shards."""
    places = [known.blocks[position] for position in needed.tolist()]
    shards = sorted({place.shard for place in places})
    number = {name: position for position, name in enumerate(shards)}
    keys, hashes = (b"".join(parts) for parts in ([p.key for p in places], [p.facts.pixel_hash for p in places]))
    blocks = Blocks(
        key=np.frombuffer(keys, dtype=np.uint8).reshape(-1, 32),
        shard=np.array([number[place.shard] for place in places], dtype=np.int32),
        offset=np.array([place.offset for place in places], dtype=np.uint64),
        tokens=np.array([place.header.true_length for place in places], dtype=np.uint32),
        ids_hash=np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES),
    )
    return blocks, tuple(shards)


def says_the_same(draft: TokenDraft, recipe: TokenRecipe, old: TokenGeneration, terms: Mapping[str, Any]) -> bool:
    """Whether a generation says already what the draft would say.

    Args:
        draft: What would be published.
        recipe: What it was made by.
        old: The current generation.
        terms: What else its manifest has to say.
    """
    if not old.complete or old.recipe.as_json() != recipe.as_json() or old.shards != draft.shards:
        return False
    if any(old.manifest.get(name) != value for name, value in terms.items()):
        return False
    lists = ([token_refusal_json(one) for one in items] for items in (draft.refused, draft.notes))
    if [list(old.refused), list(old.notes)] != list(lists) or draft.documents.sources != old.documents.sources:
        return False
    pairs: list[tuple[Any, Any]] = [(draft.control, old.control), (draft.sources.content, old.sources.content)]
    names = (name for name in Documents.__dataclass_fields__ if name != "sources")
    pairs += [(getattr(draft.documents, name), getattr(old.documents, name)) for name in names]
    pairs += [(getattr(draft.blocks, name), getattr(old.blocks, name)) for name in Blocks.__dataclass_fields__]
    return all(np.array_equal(mine, theirs) for mine, theirs in pairs)


def manifest_facts(
    draft: TokenDraft, description: TokeniserDescription, settings: TokenSettings, listing: Mapping[str, Any]
) -> dict[str, Any]:
    """What the manifest says beside the columns.

    Args:
        draft: What is published.
        description: What tokenised it.
        settings: Of the build, nothing unsaid.
        listing: The files of DATA, as ``token_survey`` lists them.
    """
    return {
        "source": source_facts(settings) | {"listing": dict(listing)},
        "fingerprint": fingerprint(description.recipe.recipe_id, draft.documents),
        "tokens": token_accounts(draft.documents, draft.control, len(draft.sources)),
        "provenance": provenance_facts(description, settings),
        "allow_failed": settings.allow_failed,
    }


def source_facts(settings: TokenSettings) -> dict[str, Any]:
    """Where DATA lies, and how it is read."""
    data, cache = settings.data.resolve(), settings.cache.resolve()
    return {"root": str(data), "relative": os.path.relpath(data, cache), "options": options_json(settings)}


def provenance_facts(description: TokeniserDescription, settings: TokenSettings) -> dict[str, Any]:
    """Who tokenised, with which libraries."""
    template = settings.chat_template
    made = provenance("", _LIBRARIES) | {
        "tokenizer": settings.tokenizer,
        "chat_template": None if template is None else str(template.resolve()),
        "parts": dict(description.parts),
        "fast": description.fast,
        "notes": list(description.notes),
    }
    return {name: value for name, value in made.items() if name != "model"}
