"""``latentcache info``: what a cache holds, finished or not."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags, reports, token_flags, token_info
from latentcache.cli.console import counted, human_bytes, item, kept, out, table
from latentcache.errors import LatentcacheError

if TYPE_CHECKING:
    from latentcache.store.generation import Generation


def info(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache.", readable=False)],
    entries: Annotated[bool, typer.Option("--entries", help="List every entry; reads every payload.")] = False,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="Causes of what was refused, with examples and hints.")
    ] = False,
    as_json: flags.Json = False,
) -> int:
    """What a cache holds."""
    from latentcache.store.inventory import current_or_none, stored_entries
    from latentcache.store.layout import CacheLayout

    if token_flags.holds_tokens(cache):
        return token_info.info(cache, entries=entries, quarantine=quarantine, as_json=as_json)
    layout = CacheLayout(cache)
    generation = current_or_none(cache)
    stored = list(stored_entries(cache, payloads=entries))
    payload: dict[str, Any] = {
        "cache": str(cache),
        "complete": generation is not None and generation.complete and not layout.building.exists(),
        "generation": generation.number if generation else 0,
        "counts": {
            "samples": _samples(layout.building, generation),
            "entries": len(stored),
            "quarantined": len(generation.refused) if generation else 0,
        },
        "bytes": bytes_on_disk(cache),
        "entries_lost": _lost(generation, stored) if generation else 0,
        **(_facts(generation) if generation else _begun(layout.building)),
    }
    if quarantine:
        payload |= _quarantine(cache, generation)
    if entries:
        names = _names_by_key(generation) if generation else {}
        payload["entries"] = [_entry(one, names.get(one.key, [])) for one in stored]
    if as_json:
        console.emit("info", payload, exit_code=0)
    else:
        _show(payload, entries=entries, quarantine=quarantine)
    return 0


def _quarantine(cache: Path, generation: Generation | None) -> dict[str, Any]:
    """What was refused, by cause, and the command that looks again once it is mended."""
    refused = generation.refused if generation else ()
    items = [
        item("quarantined", str(one["cause"]), str(one["name"]), found=str(one.get("detail", "")), hint=_hint(one))
        for one in refused
    ]
    build = f"latentcache build {shlex.quote(generation.source_root)}" if generation else "latentcache build DATA"
    fix = f"{build} --out {shlex.quote(str(cache))}" if refused else ""
    return {"causes": reports.causes(items), "items": items, "fix": fix}


def _hint(refusal: Mapping[str, Any]) -> str:
    from latentcache.sources.causes import hint_for

    return str(refusal.get("hint", "")) or hint_for(str(refusal["cause"]))


def _lost(generation: Generation, stored: Sequence[Any]) -> int:
    """Entries that the generation needs and that are in no shard that can be read."""
    flat, width = generation.rows.key.tobytes(), generation.rows.key.shape[1]
    needed = {flat[start : start + width] for start in range(0, len(flat), width)}
    return len(needed.difference(one.key for one in stored))


def _samples(building: Path, generation: Generation | None) -> int:
    """Usable and refused samples of the last build, or of the one that has not ended."""
    from latentcache.store.durable import read_json

    if generation is not None:
        return len(generation.samples.names) + len(generation.refused)
    return int(read_json(building).get("samples", 0)) if building.exists() else 0


def _begun(building: Path) -> dict[str, Any]:
    """The recipe of a first build that has not ended, where its marker says it."""
    from latentcache.recipe import Recipe
    from latentcache.store.durable import read_json

    try:
        marker = read_json(building)
        recipe = Recipe.from_json(marker["recipe"])
        return {"recipe_id": recipe.recipe_id.hex(), "recipe": recipe.as_json(), "model": str(marker["model"])}
    except (LatentcacheError, KeyError):
        return {}


def bytes_on_disk(cache: Path) -> int:
    """Space that the cache takes; files that a running build renames meanwhile count once or not at all."""
    total = 0
    for folder, _, names in os.walk(cache):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(folder, name).lstat().st_blocks * 512  # POSIX counts in blocks of 512 bytes
    return total


def _facts(generation: Generation) -> dict[str, Any]:
    import numpy as np

    counts = np.bincount(generation.rows.bucket, minlength=len(generation.buckets)).tolist()
    sizes = zip(generation.buckets, counts, strict=True)
    return {
        "created": generation.manifest["created"],
        "demo": generation.demo,
        "source": generation.manifest["source"],
        "recipe_id": generation.recipe.recipe_id.hex(),
        "recipe": generation.recipe.as_json(),
        "model": str(generation.manifest["provenance"]["model"]),
        "provenance": generation.manifest["provenance"],
        "allow_failed": generation.allow_failed,
        "buckets": [{"height": s.height, "width": s.width, "entries": n} for s, n in sizes],
    }


def _names_by_key(generation: Generation) -> dict[bytes, list[str]]:
    names: dict[bytes, list[str]] = {}
    all_names = list(generation.samples.names)
    for key, sample in zip(generation.rows.key, generation.rows.sample.tolist(), strict=True):
        names.setdefault(key.tobytes(), []).append(all_names[sample])
    return names


def _entry(stored: Any, names: list[str]) -> dict[str, Any]:
    from latentcache.store.inventory import digest

    return {
        "key": stored.key.hex(),
        "field": "latents",
        "shape": list(stored.header.shape),
        "dtype": stored.header.dtype,
        "checksum": digest(stored.header) if stored.intact else None,
        "paths": names,
        "paths_b64": [base64.b64encode(os.fsencode(name)).decode("ascii") for name in names],
    }


def _show(payload: dict[str, Any], *, entries: bool, quarantine: bool) -> None:
    """The same for people."""
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to go on"
    out(f"{payload['cache']}  generation {payload['generation'] or 'none yet'}, {state}")
    size = human_bytes(payload["bytes"])
    held = f"{counted(counts['samples'], 'sample')}, {counted(counts['entries'], 'entry', 'entries')}"
    out(f"{held}, {counts['quarantined']} quarantined, {size}")
    if payload["entries_lost"]:
        lost = counted(payload["entries_lost"], "entry", "entries")
        out(f"{lost} of it cannot be found: `latentcache verify {shlex.quote(payload['cache'])}` says why")
    if "recipe" in payload:
        _show_recipe(payload)
    if quarantine:
        show_quarantine(payload)
    for entry in payload.get("entries", ()) if entries else ():
        shape = "x".join(map(str, entry["shape"]))
        mark = entry["checksum"] or "DAMAGED"
        out(f"{entry['key']}  {entry['dtype']} {shape}  {mark}  {' '.join(entry['paths'])}")


def show_quarantine(payload: dict[str, Any]) -> None:
    """Causes, examples and what mends them."""
    for cause in payload["causes"]:
        out(f"{cause['count']} {cause['reason']}: {cause['hint']}")
        for example in cause["examples"]:
            field, found = (example.get(name, "") for name in ("field", "found"))
            out(f"  {example['path']}{' ' + field if field else ''}{': ' + found if found else ''}")
        if cause["count"] > len(cause["examples"]):
            out(f"  and {cause['count'] - len(cause['examples'])} more (all of them with --json)")
    if payload["fix"]:
        out("a refused file is tried again when it, the recipe or the decoders change, or with --retry-failed")
        out(f"fix: {payload['fix']}")
    else:
        out("nothing is quarantined")


def _show_recipe(payload: dict[str, Any]) -> None:
    encoder, pixels = payload["recipe"]["encoder"], payload["recipe"]["pixels"]
    about = f", made {payload['created']} from {payload['source']['root']}" if "created" in payload else ""
    out(f"recipe {payload['recipe_id'][:8]}{about}")
    shape = f"{encoder['channels']} channels, f{encoder['factor']}"
    kind = f"{encoder['storage_dtype']}{kept(encoder['posterior'])}"
    out(f"  encoder  {encoder['family']} {encoder['fingerprint'][:8]}, {shape}, {kind}")
    out(f"  model    {payload['model']}{'  (demo: not for training)' if payload.get('demo') else ''}")
    mirrored = ", each picture mirrored as well" if payload["recipe"]["geometry"].get("flip") else ""
    out(f"  pixels   {pixels['resample']}, icc {pixels['icc']}, alpha on {pixels['alpha']}{mirrored}")
    if "buckets" in payload:
        rows = [("bucket", "entries"), *((f"{b['height']}x{b['width']}", b["entries"]) for b in payload["buckets"])]
        for line in table(rows):
            out(f"  {line}")
