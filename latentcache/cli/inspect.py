"""``latentcache inspect``: what was recognized in DATA and why, and what a build would do with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, findings
from latentcache.cli.flags import argument
from latentcache.cli.progress import about, captions_text, field_lines, planned_entries
from latentcache.errors import LatentcacheError, count_of

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.sources.scan import Listing
    from latentcache.verify.findings import Finding

HELP = """Show what is recognized in DATA and why, and what build would do. Nothing is encoded or written.

Exit status: 0 fine, 1 inputs are rejected (or noticed and not used, with --strict), 2 build would reject DATA.
"""
#: ``Record.form`` of a conversation.
_CHAT = 1
#: Records whose roles are counted.
_ROLES_OF = 200


def inspect(
    data: Path = argument("DATA", "A folder of images, a table of images, or records."),
    *,
    out_folder: flags.Out = None,
    requested: flags.Requested,
    source: flags.Source,
    allow_failed: flags.AllowFailed = None,
    strict: flags.Strict = False,
) -> Result:
    """Show what is recognized in DATA and why, and what build would do."""
    from latentcache.pipeline.build import plan_build
    from latentcache.pipeline.report import quarantined
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.plan.numbers import tolerated

    given = {"source": source, **requested.build}
    settings = BuildSettings(data=data, out=out_folder, allow_failed=allow_failed, **given)
    plan: BuildPlan | None = None
    error: LatentcacheError | None = None
    try:
        plan = plan_build(settings)
        assert plan.listing is not None  # of every build
        listing = plan.listing
    except LatentcacheError as failure:
        error, listing = failure, _scanned(settings, failure)
    rejected, notes = (plan.rejected, plan.notes) if plan else (listing.rejected, listing.notes)
    payload = {"data": str(data), **_contents(listing)}
    found = findings(rejected, notes)
    payload["items"] = [one.as_json() for one in found]
    payload["counts"] |= {"quarantined": quarantined(rejected), "notes": sum(note.count for note in notes)}
    payload |= about(plan) if plan else {"plan": None}
    allowed = tolerated(plan.allow_failed, plan.samples) if plan else 0
    exit_code = int(payload["counts"]["quarantined"] > allowed or (strict and bool(notes)))
    lines = (f"{label:10} {text}" for label, text in _lines(payload, found, plan))
    return Result(payload, lines, exit_code=exit_code, error=error)


def _scanned(settings: Any, failure: LatentcacheError) -> Listing:
    """DATA as it is listed, for a build that would fail; raises the failure if DATA cannot be listed."""
    from latentcache.pipeline.existing import kind_of
    from latentcache.sources.scan import scan

    try:
        inputs = [name for field in settings.fields for name in kind_of(field).inputs]
        return scan(settings.data, settings.source, inputs=inputs)
    except LatentcacheError:
        raise failure from None


def _contents(listing: Listing) -> dict[str, Any]:
    """Describe DATA by its listing, as JSON values."""
    import numpy as np

    from latentcache.fields.clips import CLIP
    from latentcache.pipeline.report import quarantined
    from latentcache.verify.findings import path_json

    samples, found = listing.samples, dict[str, Any](data_kind=listing.data_kind)
    counts = {"samples": len(samples) + quarantined(listing.rejected), "no_caption": listing.no_caption}
    layout, images = listing.layout, listing.images
    if layout is not None and images is not None:
        sets = [
            {**one.as_json(), "samples": count} for one, count in zip(layout.sets, images.set_samples, strict=False)
        ]
        found["layout"] = {"word": layout.word, "why": layout.why, "sets": sets}
        found["captions"] = dict(images.captions)
        found |= {"first_without_caption": images.first_without, "several_captions": images.several}
        inputs = {name: one for name, one in samples.inputs.items() if name not in ("image", "caption")}
        found["further"] = {name: int((one.file >= 0).sum()) for name, one in inputs.items()}
    sizes = samples.columns.get("original_size")
    if sizes is not None:
        area = np.asarray(sizes).astype(np.int64).prod(axis=1)
        read = np.flatnonzero(area)
        found["sizes"] = {"read": len(read)}
        for name, choose in (("smallest", np.argmin), ("largest", np.argmax)) if len(read) else ():
            row = int(read[choose(area[read])])
            height, width = map(int, sizes[row])
            found["sizes"][name] = {"height": height, "width": width, **path_json(samples.names[row])}
    clips = samples.columns.get(CLIP)
    if clips is not None and clips.any():
        frames = clips[clips[:, 0] > 0, 0]
        found["clips"] = {"samples": len(frames), "shortest": int(frames.min()), "longest": int(frames.max())}
    if listing.data_kind == "records":
        found["records"] = _records(listing)
    # Contents are known as far as files were hashed.
    content = np.ascontiguousarray(samples.first_input.content)
    known = np.flatnonzero(content.any(axis=1))
    _, first = np.unique(content[known].view("V16").reshape(-1), return_index=True)
    again = known[np.setdiff1d(np.arange(len(known)), first)]
    found["duplicates"] = {"known": len(again), "first": samples.names[int(again[0])] if len(again) else ""}
    return {**found, "counts": counts}


def _records(listing: Listing) -> dict[str, Any]:
    """Forms, lengths, files and roles of records; roles of the first ones only."""
    import numpy as np

    from latentcache.verify.findings import path_json

    samples = listing.samples
    chat = int(np.count_nonzero(np.asarray(samples.columns["form"]) == _CHAT))
    files = np.bincount(np.asarray(samples.inputs["record"].file), minlength=len(samples.files))
    some = [int(one) for one in np.flatnonzero(files)[:SHOWN]]
    found: dict[str, Any] = {"conversations": chat, "texts": len(samples) - chat}
    found["files"] = [{**path_json(samples.files.names[one]), "records": int(files[one])} for one in some]
    characters = np.asarray(samples.columns["characters"])
    if len(characters):
        found["characters"] = {"shortest": int(characters.min()), "longest": int(characters.max())}
    roles, fields = Counter[str](), Counter[str]()
    looked = np.arange(min(len(samples), _ROLES_OF))
    for _, inputs in listing.job_inputs(looked, ("record",), strict=False):
        record = {} if inputs["record"] is None else inputs["record"].as_json()
        fields.update(name for name in record if name not in ("source", "line"))
        roles.update(role for role, *_ in record.get("messages") or ())
    return found | {"roles": dict(roles), "fields": dict(fields), "looked_at": len(looked)}


# text


def _lines(payload: Mapping[str, Any], found: Sequence[Finding], plan: BuildPlan | None) -> Iterator[tuple[str, str]]:
    """(label, text) of what was recognized, of findings by cause, and of the build."""
    yield from _recognized(payload)
    causes = Counter[tuple[str, str]]()
    first: dict[tuple[str, str], str] = {}
    for one in found:
        cause = one.category, one.reason
        causes[cause] += one.count
        first.setdefault(cause, one.path + (f": {one.found}" if one.found else ""))
    for (category, reason), count in causes.most_common():
        yield category, f"{count} {reason}, the first is {first[category, reason]}"
    if not causes:
        yield "notes", "every file is used as given"
    yield from chain.from_iterable(map(field_lines, plan.fields.values() if plan else ()))
    yield "build", planned_entries(plan) if plan else "would reject DATA:"


def _recognized(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    counts, layout = payload["counts"], payload.get("layout")
    read = f", layout {layout['word']}: {layout['why']}" if layout else ""
    yield "data", f"{payload['data']}: {count_of(counts['samples'], 'samples')} of {payload['data_kind']}{read}"
    sets = layout["sets"] if layout else []
    for one in sets[:SHOWN] if len(sets) > 1 or (sets and sets[0]["repeats"] > 1) else ():
        words = [f"{one['name']}: {count_of(one['samples'], 'samples')}"]
        words += [f"{one['repeats']} repeats"] if one["repeats"] != 1 else []
        words += [f'class words "{one["class_words"]}"'] if one.get("class_words") else []
        words += ["regularization"] if one.get("is_reg") else []
        yield "set", ", ".join([*words, f"split {one['split']}"] if one.get("split") else words)
    if len(sets) > SHOWN:
        yield "", f"and {len(sets) - SHOWN} more sets (all of them with --json)"
    if "captions" in payload:
        several = payload["several_captions"]
        yield "captions", captions_text(payload["captions"], payload["first_without_caption"], several)
    if records := payload.get("records"):
        kinds = [count_of(records[name], name) for name in ("conversations", "texts") if records[name]]
        ends = records.get("characters")
        lengths = f", {ends['shortest']} to {ends['longest']} characters" if ends else ""
        yield "records", f"{' and '.join(kinds) or 'none'}{lengths}"
        yield "files", ", ".join(f"{one['path']} {one['records']}" for one in records["files"])
        if records["roles"]:
            roles = ", ".join(f"{role} {count}" for role, count in records["roles"].items())
            yield "roles", f"{roles} (in the first {count_of(records['looked_at'], 'records')})"
    if payload.get("sizes", {}).get("read"):
        ends = (payload["sizes"][name] for name in ("smallest", "largest"))
        low, high = (f"{one['height']}x{one['width']} ({one['path']})" for one in ends)
        yield "sizes", f"smallest {low}, largest {high} (height x width)"
    if clips := payload.get("clips"):
        yield "videos", f"{clips['samples']}, of {clips['shortest']} to {count_of(clips['longest'], 'frames')}"
    yield from ((name, count_of(count, "samples")) for name, count in payload.get("further", {}).items())
    if payload["duplicates"]["known"]:
        equal = count_of(payload["duplicates"]["known"], "samples have the content of another one")
        yield "duplicates", f"{equal}, the first is {payload['duplicates']['first']}"
