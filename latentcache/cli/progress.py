"""Progress on stderr: a bar on a terminal (rich, which typer needs too), a line every ten seconds elsewhere.

Rates and times left count encoded work only, from the moment when the encoder was open. Inputs that a resumed build
skips or copies cost almost nothing and would make the estimate too short. Everything is counted in entries.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import SHOWN, say
from latentcache.errors import count_of
from latentcache.plan.numbers import clock, human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

    from latentcache.pipeline.diff import FieldWork
    from latentcache.pipeline.publish import BuildPlan
    from latentcache.pipeline.workers.engine import RunResult

_LINE_S = 10.0
#: Changed settings that are shown.
_CHANGES = 4
_DRAW_S = 0.1
#: Characters of a setting in the line of what changed.
_LONGEST = 80
#: Seconds of encoding before a time left is shown: the first commits are no steady rate.
_STEADY_S = 5.0


class ProgressDisplay:
    """Shows how far a command is. ``quiet``: warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started = self._shown = time.monotonic()
        self._bar: Progress | None = None

    def warned(self, message: str) -> None:
        """Show a warning above the bar."""
        self.close()
        say(f"warning: {message}")

    def close(self) -> None:
        """Erase the bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def counted_up(self, done: int, total: int, noun: str) -> None:
        """Show plain work: a number of things done, their rate and the time left."""
        if self._due():
            rate = done / max(time.monotonic() - self._started, 1e-6)
            self._show(noun, done, total, f"{_left(total - done, rate)}, {rate:.0f} {noun}/s")

    def moved(self, done: int, total: int) -> None:
        """Show bytes that are moved, in megabytes."""
        self.counted_up(done // 1_000_000, total // 1_000_000, "MB")

    def _due(self) -> bool:
        now = time.monotonic()
        interval = _DRAW_S if sys.stderr.isatty() else _LINE_S
        if self._quiet or now - self._shown < interval:
            return False
        self._shown = now
        return True

    def _show(self, stage: str, done: int, total: int, details: str) -> None:
        """Draw the bar, or write a line; the time left comes first in the details, where nothing cuts it off."""
        if not sys.stderr.isatty():
            say(f"{stage}: {done}/{total}, {details}")
            return
        if self._bar is None:
            self._bar = _bar()
        (task,) = self._bar.task_ids
        self._bar.update(task, description=stage, completed=done, total=total, details=details)
        with contextlib.suppress(OSError):  # a terminal that was closed
            self._bar.refresh()


def _bar() -> Progress:
    """A bar that its caller redraws; it is erased at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    details = TextColumn("{task.fields[details]}", table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis"))
    columns = (TextColumn("{task.description}", markup=False), BarColumn(20), MofNCompleteColumn(), details)
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True, expand=True)
    progress.add_task("", details="")
    progress.start()
    return progress


class BuildProgress(ProgressDisplay):
    """Shows the plan of a build, then the progress of each field."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
        self.plan: BuildPlan | None = None
        """The plan, as far as it was made."""
        self._field = ""

    def planned(self, plan: BuildPlan) -> None:
        """Show the plan, before anything is encoded."""
        self.plan = plan
        if self._quiet:
            return
        part = f", part {plan.part}" if plan.part else ""
        say(f"{count_of(plan.samples, 'samples')} in {plan.data}{part}, cache {plan.cache}")
        fields = chain.from_iterable(map(field_lines, plan.fields.values()))
        for label, text in (*_data_lines(plan), *fields, ("plan", planned_entries(plan))):
            say(f"  {label:8} {text}")
        if plan.rejected:
            from latentcache.pipeline.publish import quarantined

            say(f"  rejected {count_of(quarantined(plan.rejected), 'samples')} so far, listed at the end")
        self._started = time.monotonic()

    def advanced(self, progress: RunResult) -> None:
        """Show the progress of a field; looks at the clock first."""
        if progress.field != self._field:  # another field: its own rate
            self.close()
            self._started = time.monotonic()
        self._field = progress.field
        if self._due():
            opening = not (progress.began or progress.done)
            stage = f"{progress.field}, opening the encoder" if opening else progress.field
            self._show(stage, progress.done, progress.total, self._details(progress))

    def _details(self, progress: RunResult) -> str:
        """The time left, rates and counts."""
        elapsed = max(time.monotonic() - (progress.began or self._started), 1e-6)
        encoded = progress.encoded
        reused = progress.copied + progress.skipped
        rate, settled = encoded / elapsed, encoded + reused
        speed = progress.cost_done * encoded / max(settled, 1) / elapsed  # cost of encoded work alone
        planned = self.plan.fields.get(progress.field) if self.plan else None
        expected = max((planned.assumed if planned else 0) - reused, 0)
        ahead = max(progress.total - progress.done, 1)
        cost = (progress.cost_total - progress.cost_done) * max(ahead - expected, 0) / ahead
        left = _left(cost, speed if elapsed >= _STEADY_S else 0.0)
        counts = f"{encoded} encoded, {reused} reused, {len(progress.failed)} rejected"
        return f"{left}, {rate:.1f}/s, {human_bytes(progress.written_bytes / elapsed)}/s, {counts}"


def _data_lines(plan: BuildPlan) -> Iterator[tuple[str, str]]:
    """(label, text): what was recognized in DATA, in a few lines."""
    from latentcache.sources.layout import INPUTS

    listing = plan.listing
    counts = Counter[str]()
    if listing is None:
        return
    layout, images = listing.layout, listing.images
    yield "data", f"{listing.data_kind}, layout {layout.word}: {layout.why}" if layout else listing.data_kind
    if images is not None:
        yield "captions", captions_text(images.captions, images.first_without, images.several)
    for option, names in INPUTS.items():
        for name in names:
            if name in listing.samples.inputs:
                column = listing.samples.inputs[name]
                present = int((column.file >= 0).sum())
                yield name, f"{present} of {len(column.file)} samples (--{option} none leaves them out)"
    for note in plan.notes:
        counts[note.reason] += note.count
    if counts:
        yield "notes", ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


def captions_text(captions: Mapping[str, int], first_without: str, several: int) -> str:
    """Return the origins of captions, the number of images with several, and the first image without one."""
    line = ", ".join(f"{word} {count}" for word, count in captions.items()) or "none"
    line += f", {count_of(several, 'samples')} with several" if several else ""
    return f"{line} (the first without a caption is {first_without})" if first_without else line


def field_lines(field: FieldWork) -> Iterator[tuple[str, str]]:
    """(label, text): how a field will be made."""
    yield field.name, f"{field.described.label}, recipe {field.recipe.recipe_id.hex()[:8]}"
    yield from field.described.chosen.items()
    groups = [f"{label} ({count})" for label, count in field.groups if label]
    more = f" and {len(groups) - SHOWN} more" if len(groups) > SHOWN else ""
    if groups:
        yield "buckets", f"{', '.join(groups[:SHOWN])}{more}  (height x width)"
    if field.changed:
        yield "changed", f"{field.name}: {_changed(field)}"
    if field.replan:
        seconds = field.replan_seconds
        time = "" if seconds is None else f", about {clock(seconds)}"
        yield "replan", f"--replan would encode {count_of(field.replan, 'entries')} of {field.name} again{time}"
    yield from (("note", note) for note in field.described.notes)


def about(plan: BuildPlan) -> dict[str, Any]:
    """A plan as JSON values."""
    same = ("items", "to_make", "cached", "inputs", "bytes_to_write", "duplicates", "replaced")
    fields = {
        name: {count: getattr(field, count) for count in same}
        | {"groups": dict(field.groups), "chosen": dict(field.described.chosen)}
        | {"encoder": field.described.label, "about": field.about}
        | {"replan": {"entries": field.replan, "seconds": field.replan and field.replan_seconds}}
        | {"recipe_id": field.recipe.recipe_id.hex(), "recipe": field.recipe.as_json()}
        | {"changed": [{"setting": setting, "cached": was, "requested": now} for setting, was, now in field.changed]}
        for name, field in plan.fields.items()
    }
    totals = {"entries_to_make": plan.to_make, "entries_cached": plan.cached, "bytes_to_write": plan.bytes_to_write}
    return {
        "cache": str(plan.cache),
        "data": str(plan.data),
        "data_kind": plan.data_kind,
        "part": plan.part,
        "plan": {**totals, "free_bytes": plan.free_bytes, "fields": fields},
    }


def planned_entries(plan: BuildPlan) -> str:
    """Entries that a build makes and reuses, and the bytes of it."""
    entries = count_of(plan.to_make, "entries")
    bound = "about" if any(field.recipe.spec.ragged for field in plan.fields.values()) else "at most"
    cost = f"{bound} {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
    shared = shared_entries(plan.duplicates)
    return f"{entries} to make, {plan.cached} reused{shared}, {cost if plan.to_make else 'nothing to write'}"


def shared_entries(duplicates: int) -> str:
    """Samples that need no entry of their own, after a comma; empty if there are none."""
    return f", {count_of(duplicates, 'duplicates')} sharing an entry" if duplicates else ""


def _changed(field: FieldWork) -> str:
    """Settings that differ from the snapshot, and how many of its entries that makes useless."""
    model = any(name == "encoder" for name, _, _ in field.changed)
    shown = [change for change in field.changed if not (model and change[0].startswith("encoder."))]
    more = f" and {len(shown) - _CHANGES} more" if len(shown) > _CHANGES else ""
    text = ", ".join(f"{name} {_brief(before)} -> {_brief(now)}" for name, before, now in shown[:_CHANGES]) + more
    lost = count_of(field.replaced, "cached entries")
    return f"{text}; {lost} cannot be used and will be made again" if field.replaced else text


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _left(work: float, speed: float) -> str:
    return f"{clock(work / speed) if speed else '-:--'} left"
