"""``latentcache inspect``: what is understood of DATA, the plan of a build, and the checks of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, finding_lines, findings
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import about, captions_text, field_lines, planned_entries
from latentcache.errors import LatentcacheError, UsageError, count_of

if TYPE_CHECKING:
    from latentcache.pipeline.publish import BuildPlan
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.pipeline.workers.local import LocalEngine
    from latentcache.report.inspection import Check
    from latentcache.sources.scan import Listing
    from latentcache.verify.findings import Finding


def inspect(
    data: Path | None = argument("[DATA]", "A folder with images, a table with images, or records.", None),
    *,
    machine: bool = option(False, "--machine", "Check this machine only, without DATA."),
    out_folder: flags.Out = None,
    requested: flags.Requested,
    source: flags.Source,
    run: flags.Run,
) -> Result:
    """Show how DATA is understood, what build would do, and if this machine can.

    Three samples are shown with their captions, splits, buckets and masks. Nothing is written. Exit status: 0 fine,
    1 inputs are rejected (or noticed and not used, with --strict), 2 build would reject DATA, 3 the machine cannot
    build.

    Examples:
        latentcache inspect images/ --model ./sdxl
        latentcache inspect chats.jsonl --tokenizer ./llama
        latentcache inspect --machine
    """
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.pipeline.workers.local import LocalEngine
    from latentcache.report.inspection import machine_checks

    device = run.get("device", "auto")
    strict = run.pop("strict", False)
    if (data is None) != machine:
        problem = "DATA: not with --machine" if machine else "DATA is missing"
        raise UsageError(problem, fix="latentcache inspect DATA, or latentcache inspect --machine")
    with LocalEngine(device) as engine:
        if data is None:
            checks = [*machine_checks(device, engine.ask, out_folder or Path.cwd(), lambda more: "")]
            payload: dict[str, Any] = {"data": None, "checks": checks}
            lines = (*chain.from_iterable(map(_check_lines, checks)), _verdict(checks))
            return Result(payload, lines, exit_code=_status(checks))
        settings = BuildSettings(data=data, out=out_folder, source=source, **run, **requested.build)
        planned = _plan(settings, engine)

        def rebuild(more: str) -> str:
            return flags.build_command(data, out_folder, requested, device, more)

        checks = [*machine_checks(device, engine.ask, settings.cache, rebuild), *planned.space]
    return _result(data, planned, checks, rebuild, strict=strict)


class _Planned(NamedTuple):
    """The plan of a build, as far as it goes."""

    listing: Listing
    plan: BuildPlan | None
    error: LatentcacheError | None
    needs: str
    """Option without which there is no plan."""
    space: list[Check]
    warnings: list[str]


def _plan(settings: BuildSettings, engine: LocalEngine) -> _Planned:
    """List DATA and plan a build; raises the error if DATA cannot be listed."""
    from latentcache.pipeline.build import plan_build
    from latentcache.report.inspection import checked, space

    listings: list[Listing] = []
    warnings: list[str] = []
    try:
        plan = plan_build(settings, listed=listings.append, warned=warnings.append, engine=engine)
        assert plan.listing is not None  # of every build
        return _Planned(plan.listing, plan, None, "", [checked("space", lambda: space(plan))], warnings)
    except LatentcacheError as error:
        if not listings:
            raise
        if error.slug == "tokenizer-missing":
            return _Planned(listings[0], None, None, "--tokenizer", [], warnings)
        return _Planned(listings[0], None, error, "", [], warnings)


def _result(data: Path, planned: _Planned, checks: Sequence[Check], rebuild: Any, *, strict: bool) -> Result:
    from latentcache.pipeline.publish import quarantined
    from latentcache.plan.numbers import tolerated
    from latentcache.report.inspection import describe_data, shown_samples

    plan = planned.plan
    source = planned.plan or planned.listing
    items = findings(source.rejected, source.notes)
    rejected = quarantined(source.rejected)
    payload = {"data": str(data), **describe_data(planned.listing)}
    payload["samples"] = shown_samples(planned.listing, plan)
    payload["items"] = [item.as_json() for item in items]
    payload["counts"] |= {"quarantined": rejected, "notes": sum(note.count for note in source.notes)}
    payload["counts"] |= {"cached": plan.cached, "duplicates": plan.duplicates} if plan else {}
    payload |= {"needs": planned.needs, **(about(plan) if plan else {"plan": None})}
    payload["checks"] = checks
    payload["warnings"] = planned.warnings
    too_many = rejected > (tolerated(plan.allow_failed, plan.samples) if plan else 0)
    fix = rebuild(f"--allow-failed {rejected}") if too_many else ""
    status = _status(checks) or int(too_many or (strict and bool(source.notes)))
    return Result(payload, _lines(payload, items, plan, checks, fix), exit_code=status, error=planned.error)


def _status(checks: Sequence[Check]) -> int:
    return 3 if any(check["state"] == "problem" for check in checks) else 0


# text


def _verdict(checks: Sequence[Check]) -> str:
    problems = sum(check["state"] == "problem" for check in checks)
    return f"{count_of(problems, 'problems')} found" if problems else "ready"


def _check_lines(check: Check) -> Iterator[str]:
    yield f"{check['state']:8} {check['name']:9} {check['text']}"
    yield from (f"  {name}: {check[name]}" for name in ("hint", "fix") if name in check)


def _lines(
    payload: Mapping[str, Any],
    items: Sequence[Finding],
    plan: BuildPlan | None,
    checks: Sequence[Check],
    fix: str,
) -> Iterator[str]:
    """Data, samples, findings by cause, the plan of the build, the machine."""
    yield from (f"{label:10} {text}" for label, text in _recognized(payload))
    for sample in payload["samples"]:
        yield from _sample_lines(sample)
    yield from finding_lines(items)
    if not items:
        yield f"{'notes':10} every file is used as given"
    for work in plan.fields.values() if plan else ():
        for label, text in (*field_lines(work), *work.about.items()):
            yield f"{label:10} {text}"
        if work.described.demo:
            yield f"{'note':10} the demo encoder is not for training: give a VAE with --model"
    said = {note for work in plan.fields.values() for note in work.described.notes} if plan else set()
    yield from (f"{'warning':10} {message}" for message in payload["warnings"] if message not in said)
    needs = f"also needs {payload['needs']}" if payload["needs"] else "would reject DATA:"
    yield f"{'build':10} {planned_entries(plan) if plan else needs}"
    if fix:
        yield f"  fix: repair the rejected files, or allow them: {fix}"
    yield f"{'machine':10} {_verdict(checks)} (all checks: `latentcache inspect --machine`)"
    yield from chain.from_iterable(_check_lines(check) for check in checks if check["state"] != "ok")


def _sample_lines(sample: Mapping[str, Any]) -> Iterator[str]:
    words = [sample["path"], *(f"{name} {sample[name]}" for name in ("set", "split") if name in sample)]
    words += [f"bucket {bucket}" for bucket in sorted({*sample.get("buckets", {}).values()})]
    words += [f"{name} {file}" for name, file in sample.get("paired", {}).items()]
    yield f"{'sample':10} {', '.join(words)}"
    if "caption" in sample:
        file = sample.get("caption_file", sample["path"])
        origin = f"  ({file})" if file != sample["path"] else ""
        yield f"{'':10}   {sample['caption'].replace(chr(10), ' ') or 'no caption'}{origin}"
    for turn in sample.get("turns", ()):
        yield f"{'':10}   {turn['role']}: {turn['text'].replace(chr(10), ' ')}"


def _recognized(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of what was recognized."""
    counts = payload["counts"]
    layout = payload.get("layout")
    read = f", layout {layout['word']}: {layout['why']}" if layout else ""
    yield "data", f"{payload['data']}: {count_of(counts['samples'], 'samples')} of {payload['data_kind']}{read}"
    sets = layout["sets"] if layout else []
    for entry in sets[:SHOWN] if len(sets) > 1 or (sets and sets[0]["repeats"] > 1) else ():
        words = [f"{entry['name']}: {count_of(entry['samples'], 'samples')}"]
        words += [f"{entry['repeats']} repeats"] if entry["repeats"] != 1 else []
        words += [f'class words "{entry["class_words"]}"'] if entry.get("class_words") else []
        words += ["regularization"] if entry.get("is_reg") else []
        yield "set", ", ".join([*words, f"split {entry['split']}"] if entry.get("split") else words)
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
        yield "files", ", ".join(f"{entry['path']} {entry['records']}" for entry in records["files"])
        if records["roles"]:
            roles = ", ".join(f"{role} {count}" for role, count in records["roles"].items())
            yield "roles", f"{roles} (in the first {count_of(records['looked_at'], 'records')})"
    if payload.get("sizes", {}).get("read"):
        ends = (payload["sizes"][name] for name in ("smallest", "largest"))
        low, high = (f"{entry['height']}x{entry['width']} ({entry['path']})" for entry in ends)
        yield "sizes", f"smallest {low}, largest {high} (height x width)"
    if clips := payload.get("clips"):
        yield "videos", f"{clips['samples']}, of {clips['shortest']} to {count_of(clips['longest'], 'frames')}"
    yield from ((name, count_of(count, "samples")) for name, count in payload.get("further", {}).items())
    if payload["duplicates"]["known"]:
        equal = count_of(payload["duplicates"]["known"], "samples have the content of another one")
        yield "duplicates", f"{equal}, the first is {payload['duplicates']['first']}"
