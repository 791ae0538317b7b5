"""``latentcache info`` and ``show``: the contents of a cache, finished or not, and of one sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from latentcache.cli import flags
from latentcache.cli.console import Result, repeats_lines, table_lines
from latentcache.cli.flags import argument, option
from latentcache.errors import count_of
from latentcache.plan.numbers import human_bytes


def info(
    cache: flags.CacheOrUrl,
    *,
    entries: bool = option(False, "--entries", "List every entry; reads every payload."),
    field: flags.Kinds = None,
) -> Result:
    """Show what a cache contains.

    Examples:
        latentcache info images.latentcache
        latentcache info images.latentcache --entries
        latentcache info images.latentcache --json
    """
    from latentcache.report.cache import describe_cache

    payload = describe_cache(cache, entries=entries)
    return Result(payload, _lines(payload))


def show(
    cache: flags.CacheOrUrl,
    name: str = argument("NAME", "The sample: a file below DATA, FILE:LINE for a record, or its number from 0."),
    *,
    field: flags.Kinds = None,
) -> Result:
    """Show one sample of a cache: size, crop, caption, values, decoded tokens with loss.

    Examples:
        latentcache show images.latentcache cats/one.png
        latentcache show images.latentcache 0
        latentcache show chats.latentcache 0 --json
    """
    from latentcache.report.sample import find_sample, sample_lines, sample_of
    from latentcache.store.snapshot import open_leased

    snapshot = open_leased(cache)
    facts = sample_of(snapshot, find_sample(snapshot, name)).facts
    is_damaged = any("shape" not in item for values in facts["fields"].values() for item in values["items"])
    return Result({"cache": str(cache), "sample": facts}, sample_lines(facts), exit_code=int(is_damaged))


# text


def _lines(payload: Mapping[str, Any]) -> Iterator[str]:
    counts = payload["counts"]
    state = "complete" if payload["complete"] else "not complete: run the same `latentcache build` again to continue"
    state = f"a build is running: {payload['builder']}" if payload["builder"] else state
    yield f"{payload['cache']}  snapshot {payload['snapshot'] or 'none yet'}, {state}"
    held = f"{count_of(counts['samples'], 'samples')}, {count_of(counts['entries'], 'entries')}"
    yield f"{held}, {counts['quarantined']} rejected, {human_bytes(payload['bytes'])}"
    if payload["part"]:
        yield f"part {payload['part']} of DATA: join all parts with `latentcache merge PART... --out CACHE`"
    if payload.get("left_out"):
        yield f"pulled without {', '.join(payload['left_out'])}"
    if "created" in payload:
        source, without = payload["source"], payload["no_caption"]
        yield f"made {payload['created']} from {source.get('data') or source.get('root', '')}"
        if without["count"] == sum(entry["samples"] for entry in payload["repeats"]) > 0:
            yield "captions: none"
        elif without["count"]:
            yield f"captions: {count_of(without['count'], 'samples')} without one, the first is {without['first']}"
        yield from repeats_lines(payload["repeats"])
        yield from (f"note: {note['reason']}: {note['found']}" for note in payload["notes"])
    for name, field in payload["fields"].items():
        yield from _field_lines(name, field, demo=bool(payload.get("demo")))
        if groups := [(group["label"], group["items"]) for group in field.get("groups", ()) if group["label"]]:
            yield from table_lines([("bucket", "items"), *groups], indent="  ")
    for entry in payload.get("entries", ()):
        shape = "x".join(map(str, entry["shape"]))
        about = f"{entry['field']} {entry['dtype']} {shape}  {entry['checksum'] or 'DAMAGED'}"
        yield f"{entry['key']}  {about}  {' '.join(entry['paths'])}"


def _field_lines(name: str, field: Mapping[str, Any], *, demo: bool) -> Iterator[str]:
    recipe = f" (recipe {field['recipe_id'][:8]})" if "recipe_id" in field else ""
    size = f": {count_of(field['items'], 'items')}, {human_bytes(field['bytes'])}" if "items" in field else ""
    state = "" if field["installed"] else ", kind not installed"
    yield f"{name}{recipe}{size}{state}{'  (demo: not for training)' if demo else ''}"
    for label, text in field.get("about", {}).items():
        yield f"  {label:9} {text}"
    if field.get("built"):
        yield f"  last run  {field['built']}"
    shared, trimmed = field.get("shared", {"items": 0}), field.get("trimmed_bytes", 0)
    if shared["items"]:
        items, saved = count_of(shared["items"], "items"), human_bytes(shared["bytes"])
        yield f"  shared    {items} of equal inputs, {saved} saved"
    if trimmed:
        yield f"  trimmed   padding is not stored, {human_bytes(trimmed)} saved"
    if numbers := field.get("numbers"):
        yield "  " + ", ".join(f"{label.replace('_', ' ')} {number:,}" for label, number in numbers.items())
    if (lengths := field.get("lengths")) and field["items"]:
        mean = lengths["total"] / field["items"]
        yield f"  length {lengths['shortest']} to {lengths['longest']}, mean {mean:.0f}, total {lengths['total']:,}"
