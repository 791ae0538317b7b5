"""``latentcache info`` of a token cache: documents, tokens, lengths, and how many rows common views would have."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, reports
from latentcache.cli.console import counted, human_bytes, item, out
from latentcache.cli.token_build import FIELD, show_accounts
from latentcache.cli.token_flags import holds_tokens
from latentcache.cli.token_rows import planned_rows, row_facts, show_rows
from latentcache.errors import LatentcacheError, UsageError

if TYPE_CHECKING:
    from latentcache.store.token_generation import TokenGeneration


def info(cache: Path, *, entries: bool, quarantine: bool, as_json: bool) -> int:
    """What a token cache holds, finished or not."""
    from latentcache.cli.info import bytes_on_disk, show_quarantine
    from latentcache.errors import CacheNotFoundError
    from latentcache.store.inventory import stored_entries
    from latentcache.store.layout import CacheLayout
    from latentcache.store.token_generation import load_tokens

    layout = CacheLayout(cache)
    generation: TokenGeneration | None = None
    try:
        generation = load_tokens(cache)
    except CacheNotFoundError as error:
        if error.slug != "cache-unfinished":
            raise
    stored = list(stored_entries(cache, payloads=entries))
    marker = _marker(layout.building)
    samples = len(generation.documents) + len(generation.refused) if generation else int(marker.get("samples", 0))
    payload: dict[str, Any] = {
        "kind": "tokens",
        "share": generation.share if generation else _share(marker),
        "cache": str(cache),
        "complete": generation is not None and generation.complete and not layout.building.exists(),
        "generation": generation.number if generation else 0,
        "counts": {
            "samples": samples,
            "documents": len(generation.documents) if generation else 0,
            "entries": len(stored),
            "quarantined": len(generation.refused) if generation else 0,
        },
        "bytes": bytes_on_disk(cache),
        "entries_lost": _lost(generation, stored) if generation else 0,
        **(_facts(generation) | {"plans": planned_rows(cache, generation)} if generation else _begun(marker)),
    }
    if quarantine:
        payload |= _quarantine(cache, generation)
    if entries:
        payload["entries"] = [_entry(one, generation) for one in stored]
    if as_json:
        console.emit("info", payload, exit_code=0)
        return 0
    _show(payload)
    if quarantine:
        show_quarantine(payload)
    for entry in payload.get("entries", ()):
        mark, shape = entry["checksum"] or "DAMAGED", "x".join(map(str, entry["shape"]))
        held = f"{entry['documents']} documents, {entry['tokens']} tokens"
        out(f"{entry['key']}  {entry['dtype']} {shape}  {mark}  {held}")
    return 0


def refuse_plan(paths: Sequence[Path]) -> None:
    """Refuse to plan epochs of tokens: their rows are those of a view, which knows its own steps.

    Raises:
        UsageError: One of the paths is a token cache.
    """
    for path in paths:
        if path.is_dir() and holds_tokens(path):
            raise UsageError(
                f"{path} holds tokens: their steps are those of a view",
                where=str(path),
                why="how many rows there are depends on their length and on whether they are packed",
                fix=f"latentcache info {shlex.quote(str(path))}: it counts the rows of common lengths",
            )


def _marker(building: Path) -> dict[str, Any]:
    from latentcache.store.durable import read_json

    try:
        return read_json(building) if building.exists() else {}
    except LatentcacheError:
        return {}


def _share(marker: Mapping[str, Any]) -> str:
    """Of a first build that has not ended; all records are no share."""
    said = str(marker.get("share", ""))
    return "" if said.endswith("/1") else said


def _begun(marker: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe of a first build that has not ended, where its marker says it."""
    from latentcache.token_recipe import TokenRecipe

    try:
        recipe = TokenRecipe.from_json(marker["recipe"])
        return {"recipe_id": recipe.recipe_id.hex(), "recipe": recipe.as_json(), "tokenizer": marker["tokenizer"]}
    except (LatentcacheError, KeyError):
        return {}


def _facts(generation: TokenGeneration) -> dict[str, Any]:
    import numpy as np

    manifest = generation.manifest
    names = generation.documents.sources
    by_source = manifest["tokens"]["tokens_by_source"]
    counts = np.bincount(generation.documents.source, minlength=len(names)).tolist()
    return {
        "created": manifest["created"],
        "source": manifest["source"],
        "sources": [
            {"name": name, "documents": documents, "tokens": tokens}
            for name, documents, tokens in zip(names, counts, by_source, strict=True)
        ],
        "recipe_id": generation.recipe.recipe_id.hex(),
        "recipe": generation.recipe.as_json(),
        "tokenizer": manifest["provenance"]["tokenizer"],
        "provenance": manifest["provenance"],
        "allow_failed": generation.allow_failed,
        "fingerprint": generation.fingerprint,
        "tokens": manifest["tokens"],
        "rows": row_facts(generation.documents),
    }


def _lost(generation: TokenGeneration, stored: Sequence[Any]) -> int:
    """Blocks that the generation needs and that are in no shard that can be read."""
    return len({key.tobytes() for key in generation.blocks.key}.difference(one.key for one in stored))


def _quarantine(cache: Path, generation: TokenGeneration | None) -> dict[str, Any]:
    """What was refused, by cause, and the command that looks again once it is mended."""
    refused = generation.refused if generation else ()
    items = []
    for one in refused:
        path = f"{one['name']}:{one['line']}" if one.get("line") else str(one["name"])
        detail, hint = str(one.get("detail", "")), str(one.get("hint", "")) or "look at the record"
        field = str(one.get("field", ""))
        items.append(item("quarantined", str(one["cause"]), path, field=field, found=detail, hint=hint))
    build = f"latentcache build {shlex.quote(generation.source_root)}" if generation else "latentcache build DATA"
    fix = f"{build} --out {shlex.quote(str(cache))}" if refused else ""
    return {"causes": reports.causes(items), "items": items, "fix": fix}


def _entry(stored: Any, generation: TokenGeneration | None) -> dict[str, Any]:
    import numpy as np

    from latentcache.store.inventory import digest

    names: list[str] = []
    if generation is not None:
        found = [row for row, key in enumerate(generation.blocks.key) if key.tobytes() == stored.key]
        documents = np.flatnonzero(generation.documents.block == found[0]).tolist() if found else []
        names = [generation.documents.where(number) for number in documents]
    return {
        "key": stored.key.hex(),
        "field": FIELD,
        "shape": list(stored.header.shape),
        "dtype": stored.header.dtype,
        "checksum": digest(stored.header) if stored.intact else None,
        "documents": stored.header.original_size.height,
        "tokens": stored.header.true_length,
        "paths": names,
    }


def _show(payload: dict[str, Any]) -> None:
    """The same for people."""
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to go on"
    out(f"{payload['cache']}  tokens, generation {payload['generation'] or 'none yet'}, {state}")
    held = f"{counted(counts['samples'], 'record')}, {counted(counts['entries'], 'block')}"
    out(f"{held}, {counts['quarantined']} quarantined, {human_bytes(payload['bytes'])}")
    if payload["share"]:
        out(f"share {payload['share']} of the records: the whole is made by a build with --take-from for each share")
    if payload["entries_lost"]:
        lost = counted(payload["entries_lost"], "block")
        out(f"{lost} of it cannot be found: `latentcache verify {shlex.quote(payload['cache'])}` says why")
    if "recipe" in payload:
        recipe = payload["recipe"]
        about = f", made {payload['created']} from {payload['source']['root']}" if "created" in payload else ""
        out(f"recipe {payload['recipe_id'][:8]}{about}")
        template = f", chat template {recipe['chat_template'][:8]}" if recipe["chat_template"] else ""
        out(f"  tokenizer  {payload['tokenizer']} ({recipe['tokenizer'][:8]}{template}), loss on {recipe['loss']}")
    if "tokens" in payload:
        show_accounts(payload["tokens"], split_control=payload["recipe"]["split_control"])
        show_rows(payload)
