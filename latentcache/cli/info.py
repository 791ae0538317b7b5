"""``latentcache info``: what a cache holds, finished or not."""

from __future__ import annotations

import base64
import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from latentcache.cli import console, flags
from latentcache.cli.console import counted, human_bytes, kept, out, table

if TYPE_CHECKING:
    from latentcache.store.generation import Generation


def info(
    cache: Annotated[Path, typer.Argument(metavar="CACHE", help="A cache.", readable=False)],
    entries: Annotated[bool, typer.Option("--entries", help="List every entry; reads every payload.")] = False,
    as_json: flags.Json = False,
) -> int:
    """What a cache holds."""
    from latentcache.store.inventory import current_or_none, stored_entries
    from latentcache.store.layout import CacheLayout

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
        "bytes": _bytes_on_disk(cache),
        **(_facts(generation) if generation else {}),
    }
    if entries:
        names = _names_by_key(generation) if generation else {}
        payload["entries"] = [_entry(item, names.get(item.key, [])) for item in stored]
    if as_json:
        console.emit("info", payload, exit_code=0)
    else:
        _show(payload, entries=entries)
    return 0


def _samples(building: Path, generation: Generation | None) -> int:
    """Usable and refused samples of the last build, or of the one that has not ended."""
    from latentcache.store.layout import read_json

    if generation is not None:
        return len(generation.samples.names) + len(generation.refused)
    return int(read_json(building).get("samples", 0)) if building.exists() else 0


def _bytes_on_disk(cache: Path) -> int:
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
        "provenance": generation.manifest["provenance"],
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


def _show(payload: dict[str, Any], *, entries: bool) -> None:
    """The same for people."""
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to go on"
    out(f"{payload['cache']}  generation {payload['generation'] or 'none yet'}, {state}")
    size = human_bytes(payload["bytes"])
    held = f"{counted(counts['samples'], 'sample')}, {counted(counts['entries'], 'entry', 'entries')}"
    out(f"{held}, {counts['quarantined']} quarantined, {size}")
    if "recipe" in payload:
        _show_recipe(payload)
    for entry in payload.get("entries", ()) if entries else ():
        shape = "x".join(map(str, entry["shape"]))
        mark = entry["checksum"] or "DAMAGED"
        out(f"{entry['key']}  {entry['dtype']} {shape}  {mark}  {' '.join(entry['paths'])}")


def _show_recipe(payload: dict[str, Any]) -> None:
    encoder, pixels = payload["recipe"]["encoder"], payload["recipe"]["pixels"]
    out(f"recipe {payload['recipe_id'][:8]}, made {payload['created']} from {payload['source']['root']}")
    shape = f"{encoder['channels']} channels, f{encoder['factor']}"
    kind = f"{encoder['storage_dtype']}{kept(encoder['posterior'])}"
    out(f"  encoder  {encoder['family']} {encoder['fingerprint'][:8]}, {shape}, {kind}")
    out(f"  model    {payload['provenance']['model']}{'  (demo: not for training)' if payload['demo'] else ''}")
    mirrored = ", each picture mirrored as well" if payload["recipe"]["geometry"].get("flip") else ""
    out(f"  pixels   {pixels['resample']}, icc {pixels['icc']}, alpha on {pixels['alpha']}{mirrored}")
    rows = [("bucket", "entries"), *((f"{b['height']}x{b['width']}", b["entries"]) for b in payload["buckets"])]
    for line in table(rows):
        out(f"  {line}")
