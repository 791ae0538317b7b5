"""``latentcache inspect``: what was recognized in DATA and why, and what a build would do with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import console, flags
from latentcache.cli.console import SHOWN, counted, out, rejected_item
from latentcache.cli.contents import captions_text, data_contents, set_text
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import about, planned_entries
from latentcache.errors import LatentcacheError, count_of

if TYPE_CHECKING:
    from latentcache.fields.table import Rejected
    from latentcache.pipeline.report import BuildPlan
    from latentcache.sources.scan import Listing

HELP = """Show what is recognized in DATA and why, and what build would do. Nothing is encoded or written.

Exit status: 0 fine, 1 inputs are rejected (or noticed and not used, with --strict), 2 build would refuse DATA.
"""


def inspect(
    data: Path = argument("DATA", "A folder of images, a table of images, or records."),
    *,
    out_folder: Path | None = option(None, "--out -o CACHE", "The cache folder. [default: DATA.latentcache]"),
    requested: flags.Requested,
    source: flags.Source,
    allow_failed: flags.AllowFailed = None,
    strict: flags.Strict = False,
    as_json: flags.Json = False,
) -> int:
    """Show what is recognized in DATA and why, and what build would do."""
    from latentcache.pipeline.build import plan_build
    from latentcache.pipeline.report import quarantined
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.plan.numbers import tolerated

    asked = {"fields": requested.fields, "related": not requested.exact, "source": source}
    settings = BuildSettings(data=data, out=out_folder, allow_failed=allow_failed, **asked)
    plan: BuildPlan | None = None
    error: LatentcacheError | None = None
    try:
        plan = plan_build(settings)
        assert plan.listing is not None  # of every build
        listing, samples = plan.listing, plan.samples_table or plan.listing.samples
    except LatentcacheError as failure:
        error, listing = failure, _scanned(settings, failure)
        samples = listing.samples
    rejected = plan.rejected if plan else listing.rejected
    notes = plan.notes if plan else listing.notes
    payload = {"data": str(data), **data_contents(listing, samples), **_items(rejected, notes)}
    payload["counts"] |= {"quarantined": quarantined(rejected), "notes": sum(note.count for note in notes)}
    payload |= about(plan) if plan else {"plan": None}
    if not as_json:
        _show(payload, plan)
    if error is not None:
        console.fail("inspect", error, as_json=as_json, payload=payload)
        return error.exit_code
    allowed = tolerated(plan.allow_failed, plan.samples) if plan else 0
    exit_code = int(payload["counts"]["quarantined"] > allowed or (strict and bool(notes)))
    if as_json:
        console.emit("inspect", payload, exit_code=exit_code)
    return exit_code


def _scanned(settings: Any, failure: LatentcacheError) -> Listing:
    """DATA as it is listed, for a build that would fail; raises the failure if DATA cannot be listed."""
    from latentcache.sources.scan import scan

    try:
        return scan(settings.data, settings.source)
    except LatentcacheError:
        raise failure from None


def _items(rejected: Sequence[Rejected], notes: Sequence[Rejected]) -> dict[str, Any]:
    items = [rejected_item("quarantined", one) for one in rejected] + [rejected_item("note", one) for one in notes]
    return {"items": items, "causes": console.causes(items)}


# text


def _show(payload: Mapping[str, Any], plan: BuildPlan | None) -> None:
    for label, text in _lines(payload):
        out(f"{label:10} {text}")
    for cause in payload["causes"]:
        out(f"{cause['category']:10} {_cause(cause)}")
    if not payload["causes"]:
        out(f"{'notes':10} every file is used as given")
    if plan is None:
        out("build      would refuse DATA:")
        return
    for field in plan.fields.values():
        groups = ", ".join(f"{label} ({count})" for label, count in field.groups[:SHOWN] if label)
        buckets = f", buckets {groups}" if groups else ""
        out(f"{field.name:10} {field.label}, recipe {field.recipe.recipe_id.hex()[:8]}{buckets}")
    out(f"{'build':10} {planned_entries(plan)}")


def _lines(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of what was recognized."""
    counts = payload["counts"]
    layout = payload.get("layout")
    read = f", layout {layout['word']}: {layout['why']}" if layout else ""
    yield "data", f"{payload['data']}: {counted(counts['samples'], 'sample')} of {payload['data_kind']}{read}"
    sets = layout["sets"] if layout else []
    for one in sets[:SHOWN] if len(sets) > 1 or (sets and sets[0]["repeats"] > 1) else ():
        yield "set", set_text(one)
    if len(sets) > SHOWN:
        yield "", f"and {len(sets) - SHOWN} more sets (all of them with --json)"
    if "captions" in payload:
        yield (
            "captions",
            captions_text(payload["captions"], payload["first_without_caption"], payload["several_captions"]),
        )
    if "records" in payload:
        yield from _record_lines(payload["records"])
    if payload.get("sizes", {}).get("read"):
        ends = (payload["sizes"][name] for name in ("smallest", "largest"))
        low, high = (f"{one['height']}x{one['width']} ({one['path']})" for one in ends)
        yield "sizes", f"smallest {low}, largest {high} (height x width)"
    if "clips" in payload:
        clips = payload["clips"]
        yield "videos", f"{clips['samples']}, of {clips['shortest']} to {counted(clips['longest'], 'frame')}"
    aside = {"masks": "masks", "controls": "control images", "outside": "images outside all sets"}
    told = [count_of(counts[name], words) for name, words in aside.items() if counts.get(name)]
    if told:
        yield "aside", f"{', '.join(told)} (no samples)"
    if payload["duplicates"]["known"]:
        found = payload["duplicates"]
        equal = count_of(found["known"], "samples have the content of another one")
        yield "duplicates", f"{equal}, the first is {found['first']}"


def _record_lines(records: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = [counted(records[name], name[:-1]) for name in ("conversations", "texts") if records[name]]
    ends = records.get("characters")
    lengths = f", {ends['shortest']} to {ends['longest']} characters" if ends else ""
    yield "records", f"{' and '.join(kinds) or 'none'}{lengths}"
    yield "files", ", ".join(f"{one['path']} {one['records']}" for one in records["files"])
    if records["roles"]:
        roles = ", ".join(f"{role} {count}" for role, count in records["roles"].items())
        yield "roles", f"{roles} (in the first {counted(records['looked_at'], 'record')})"


def _cause(cause: Mapping[str, Any]) -> str:
    first: Mapping[str, Any] = next(iter(cause["examples"]), {})
    found = f": {first['found']}" if first.get("found") else ""
    return f"{cause['count']} {cause['reason']}, the first is {first.get('path', '')}{found}"
