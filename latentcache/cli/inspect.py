"""``latentcache inspect``: what is understood of DATA, the plan of a build, and the checks of this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import SHOWN, Result, finding_lines, findings
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import about, captions_text, field_lines, planned_entries
from latentcache.errors import LatentcacheError, UsageError, count_of
from latentcache.report.units import clock, human_bytes

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.workers.local import LocalEngine
    from latentcache.report.data import ShownSample
    from latentcache.report.estimate import Estimate
    from latentcache.report.machine import Check
    from latentcache.sources.scan import Listing
    from latentcache.verify.findings import Finding

HELP = """Show what is understood of DATA, what build would do with it, and if this machine can.

Three samples are shown with their captions, splits, buckets and masks. Nothing is written. Exit status: 0 fine,
1 inputs are rejected (or noticed and not used, with --strict), 2 build would reject DATA, 3 the machine cannot build.
"""


def inspect(
    data: Path | None = argument("[DATA]", "A folder of images, a table of images, or records.", None),
    *,
    machine: bool = option(False, "--machine", "Check this machine only, without DATA."),
    estimate: bool = option(
        False, "--estimate", "Encode a few samples in a temporary folder to estimate the time of the build."
    ),
    out_folder: flags.Out = None,
    requested: flags.Requested,
    source: flags.Source,
    run: flags.Run,
) -> Result:
    """Show what is understood of DATA, and what build would do."""
    from latentcache.pipeline.settings import BuildSettings
    from latentcache.pipeline.workers.local import LocalEngine

    device, strict = run.get("device", "auto"), run.pop("strict", False)
    if (data is None) != machine:
        what = "DATA: not with --machine" if machine else "DATA is missing"
        raise UsageError(what, fix="latentcache inspect DATA, or latentcache inspect --machine")
    with LocalEngine(device) as engine:
        if data is None:
            checks = _machine(device, engine, out_folder or Path.cwd(), lambda more: "")
            payload: dict[str, Any] = {"data": None, "checks": [check.as_json() for check in checks]}
            lines = (*chain.from_iterable(map(_check_lines, checks)), _verdict(checks))
            return Result(payload, lines, exit_code=_status(checks))
        given = {"source": source, **requested.build}
        settings = BuildSettings(data=data, out=out_folder, **run, **given)
        found = _Inspected(settings)
        found.look(engine, estimate=estimate)

        def rebuild(more: str) -> str:
            return flags.build_command(data, out_folder, requested, device, more)

        checks = _machine(device, engine, settings.cache, rebuild)
        checks += [found.space] if found.space else []
    return _result(data, found, checks, rebuild, strict=strict)


def _machine(device: str, engine: LocalEngine, cache: Path, rebuild: Any) -> list[Check]:
    from latentcache.report.machine import machine_checks

    return list(machine_checks(device, engine.ask, cache, rebuild))


class _Inspected:
    """What was found in DATA, as far as it goes."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings
        self.listing: Listing | None = None
        self.plan: BuildPlan | None = None
        self.error: LatentcacheError | None = None
        self.needs = ""
        """Option without which there is no plan."""
        self.space: Check | None = None
        self.estimates: list[Estimate] = []
        self.warnings: list[str] = []

    def look(self, engine: LocalEngine, *, estimate: bool) -> None:
        """List DATA and plan a build; raises the error if DATA cannot be listed."""
        from latentcache.pipeline.build import plan_build
        from latentcache.report.estimate import estimate as estimated
        from latentcache.report.machine import checked, space

        try:
            self.plan = plan_build(self.settings, listed=self._listed, warned=self.warnings.append, engine=engine)
            self.space = checked("space", partial(space, self.plan))
            if estimate:
                self.estimates = [estimated(self.plan, name, engine) for name in self.plan.fields]
        except LatentcacheError as error:
            if self.listing is None:
                raise
            if error.slug == "tokenizer-missing":
                self.needs = "--tokenizer"
            else:
                self.error = error

    def _listed(self, listing: Listing) -> None:
        self.listing = listing


def _result(data: Path, found: _Inspected, checks: Sequence[Check], rebuild: Any, *, strict: bool) -> Result:
    from latentcache.pipeline.report import quarantined
    from latentcache.plan.numbers import tolerated
    from latentcache.report.data import describe_data, shown_samples

    plan, listing = found.plan, found.listing
    assert listing is not None  # else it raises
    if plan is not None and plan.listing is not None:
        listing = plan.listing
    rejected, notes = (plan.rejected, plan.notes) if plan else (listing.rejected, listing.notes)
    items, samples = findings(rejected, notes), shown_samples(listing, plan)
    payload = {"data": str(data), **describe_data(listing).as_json()}
    payload["samples"] = [sample.as_json() for sample in samples]
    payload["items"] = [item.as_json() for item in items]
    payload["counts"] |= {"quarantined": quarantined(rejected), "notes": sum(note.count for note in notes)}
    payload["counts"] |= {"cached": plan.cached, "duplicates": plan.duplicates} if plan else {}
    payload |= {"needs": found.needs, **(about(plan) if plan else {"plan": None})}
    payload["checks"] = [check.as_json() for check in checks]
    payload["warnings"] = found.warnings
    payload["estimate"] = {one.field: one.as_json() for one in found.estimates}
    allowed = tolerated(plan.allow_failed, plan.samples) if plan else 0
    too_many = payload["counts"]["quarantined"] > allowed
    fix = rebuild(f"--allow-failed {payload['counts']['quarantined']}") if too_many else ""
    failed = too_many or (strict and bool(notes)) or any(one.failed for one in found.estimates)
    lines = _lines(payload, items, samples, found, checks, fix)
    return Result(payload, lines, exit_code=_status(checks) or int(failed), error=found.error)


def _status(checks: Sequence[Check]) -> int:
    return 3 if any(check.problem for check in checks) else 0


# text


def _verdict(checks: Sequence[Check]) -> str:
    problems = sum(check.problem for check in checks)
    return f"{count_of(problems, 'problems')} found" if problems else "ready"


def _check_lines(check: Check) -> Iterator[str]:
    yield f"{check.state:8} {check.name:9} {check.text}"
    yield from (f"  {name}: {text}" for name, text in (("hint", check.hint), ("fix", check.fix)) if text)


def _lines(
    payload: Mapping[str, Any],
    items: Sequence[Finding],
    samples: Sequence[ShownSample],
    found: _Inspected,
    checks: Sequence[Check],
    fix: str,
) -> Iterator[str]:
    """Data, samples, findings by cause, the plan of the build, the machine."""
    plan = found.plan
    yield from (f"{label:10} {text}" for label, text in _recognized(payload))
    for sample in samples:
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
    yield from (f"{'warning':10} {message}" for message in found.warnings if message not in said)
    if plan:
        yield f"{'build':10} {planned_entries(plan)}"
    else:
        yield f"{'build':10} {f'also needs {found.needs}' if found.needs else 'would reject DATA:'}"
    yield from (f"{'time':10} {_estimate_text(one)}" for one in found.estimates)
    if fix:
        yield f"  fix: repair the rejected files, or allow them: {fix}"
    bad = [check for check in checks if check.state != "ok"]
    yield f"{'machine':10} {_verdict(checks)} (all checks: `latentcache inspect --machine`)"
    yield from chain.from_iterable(map(_check_lines, bad))


def _estimate_text(one: Estimate) -> str:
    if one.failed:
        return f"{one.field}: none of {one.failed} inputs of the largest group could be encoded"
    if not one.probed:
        return f"{one.field}: nothing to encode"
    measured = f"{count_of(one.probed, 'entries')}{f', {one.group} first,' if one.group else ''}"
    took = f"{one.encode_s:.1f} s and {one.open_s:.1f} s to open the encoder"
    return f"{one.field}: about {clock(one.seconds)} and {human_bytes(one.num_bytes)} (from {measured} in {took})"


def _sample_lines(sample: ShownSample) -> Iterator[str]:
    buckets = sorted(set(sample.buckets.values()))
    about = [f"set {sample.set_name}" if sample.set_name else "", f"split {sample.split}" if sample.split else ""]
    about += [f"bucket {bucket}" for bucket in buckets]
    about += [f"{name} {file}" for name, file in sample.paired.items()]
    yield f"{'sample':10} {', '.join([sample.path, *filter(None, about)])}"
    if sample.caption is not None:
        origin = f"  ({sample.caption_file})" if sample.caption_file not in ("", sample.path) else ""
        yield f"{'':10}   {sample.caption.replace(chr(10), ' ') or 'no caption'}{origin}"
    for role, text in sample.turns:
        yield f"{'':10}   {role}: {text.replace(chr(10), ' ')}"


def _recognized(payload: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(label, text) of what was recognized."""
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
