"""``latentcache info``, ``show`` and ``report``: the contents of a cache, of one sample, and a page of both."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from latentcache.cli import flags
from latentcache.cli.console import Result, as_shown, repeats_lines, table_lines
from latentcache.cli.flags import argument, option
from latentcache.errors import UsageError, count_of
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


def report(
    cache: flags.CacheOrUrl,
    other: Path | None = argument("[OTHER]", "A second cache, or CACHE/snapshots/N.", default=None),
    *,
    out: Path = option(Path("report.html"), "--out -o FILE", "The page. [default: report.html]"),
    batch_size: int = option(4, "--batch-size N", "Samples per batch, for the bucket map. [default: 4]", min=1),
    images: int = option(100, "--images N", "Samples shown as images, worst first. [default: 100]", min=1),
    no_images: bool = option(False, "--no-images", "Show no images, for a page to share."),
    decode: int = option(0, "--decode N", "Decode N latents with the model, which is loaded.", min=0),
    no_verify: bool = option(False, "--no-verify", "Skip the quick check."),
    pack: flags.Pack = None,
    pad: flags.Pad = None,
    chunk: flags.Chunk = None,
    overflow: flags.Overflow = None,
    open_page: bool = option(False, "--open", "Open the page in a browser."),
    field: flags.Kinds = None,
) -> Result:
    """Write a page that shows a cache: images, crops, captions, tokens, findings. With OTHER: the changes to it.

    Examples:
        latentcache report images.latentcache -o report.html
        latentcache report images.latentcache -o report.html --no-images
        latentcache report old.latentcache new.latentcache -o changes.html
    """
    from latentcache.report.figures import compare_facts
    from latentcache.report.page import cache_of, render, report_facts, snapshot_at

    lengths = {name: value for name, value in (("pack", pack), ("pad", pad), ("chunk", chunk)) if value is not None}
    if len(lengths) > 1 or (overflow is not None and not lengths):
        fix = f"latentcache report {shlex.quote(str(cache))} --pack 4096"
        raise UsageError("--pack, --pad, --chunk: give one of them", fix=fix)
    if cache_of(cache) != cache and other is None:
        whole = shlex.quote(str(cache_of(cache)))
        raise UsageError(
            f"{cache}: a snapshot is shown beside another one only",
            fix=f"latentcache report {whole}; or latentcache report {shlex.quote(str(cache))} {whole}",
        )
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out={out}: not a place for a file", fix="give a file name, such as --out report.html")
    layout = {**lengths, **({} if overflow is None else {"overflow": overflow})}
    facts = report_facts(
        cache_of(cache),
        batch_size=batch_size,
        images=0 if no_images or other is not None else images,
        decode=decode,
        verify=not no_verify and other is None,
        layout=layout,
    )
    if other is not None:
        facts["compare"] = compare_facts(snapshot_at(cache), snapshot_at(other))
    page = as_shown(render(facts))
    out.write_text(page, "utf-8", "xmlcharrefreplace")
    if open_page:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
    payload = {"out": str(out), "bytes": out.stat().st_size, "facts": _facts_alone(facts)}
    return Result(payload, _page_lines(out, facts))


def _facts_alone(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a page without its images."""
    from latentcache.verify.findings import shown_text

    kept = dict(facts)
    if facts["sheet"]:
        cards = [card | {"original": "", "stored": []} for card in facts["sheet"]["cards"]]
        kept["sheet"] = {**facts["sheet"], "cards": cards}
    values: dict[str, Any] = json.loads(shown_text(json.dumps(kept, ensure_ascii=False)))
    return values


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
        items = count_of(shared["items"], "items")
        saved = human_bytes(shared["bytes"])
        yield f"  shared    {items} of equal inputs, {saved} saved"
    if trimmed:
        yield f"  trimmed   padding is not stored, {human_bytes(trimmed)} saved"
    if numbers := field.get("numbers"):
        yield "  " + ", ".join(f"{label.replace('_', ' ')} {number:,}" for label, number in numbers.items())
    if (lengths := field.get("lengths")) and field["items"]:
        mean = lengths["total"] / field["items"]
        yield f"  length {lengths['shortest']} to {lengths['longest']}, mean {mean:.0f}, total {lengths['total']:,}"


def _page_lines(out: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    for part in facts["missing"]:
        yield f"{part['part']} cannot be shown: {part['why']}"
    if about := facts["cache"]:
        yield f"{count_of(about['counts']['samples'], 'samples')} in {', '.join(about['fields'])}"
    if (checked := facts.get("verify")) is not None:
        counts = ", ".join(f"{number} {name}" for name, number in checked["counts"].items())
        yield f"quick check: {counts}"
    for field in facts.get("audit") or ():
        kinds = ("constant", "copies", "damaged")
        counts = ", ".join(f"{field[f'{kind}_count']} {kind}" for kind in kinds if field[f"{kind}_count"])
        if field["unusual"]:
            spread = f"values spread by {field['overall']:.2f} after scaling, models expect about 1"
            counts = f"{counts}, {spread}" if counts else spread
        yield f"audit of {field['field']}: {counts or 'nothing unusual'}"
    yield f"{out}: {human_bytes(out.stat().st_size)}, open it in a browser"
