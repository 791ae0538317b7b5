"""Progress of a build on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import SHOWN, counted, human_bytes, kept, say

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.work import Progress

_LINE_S = 10.0
_BAR_S = 0.1


class BuildTalk:
    """Shows the plan, then how far the build is. ``quiet`` shows warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self._reused = 0
        self.plan: BuildPlan | None = None
        """As it was told."""
        self.progress: Progress | None = None
        """As it was told last."""

    def planned(self, plan: BuildPlan) -> None:
        """The plan, before anything is decoded."""
        self.plan = plan
        self._reused = plan.entries_cached
        if self._quiet:
            return
        spec = plan.recipe.encoder
        say(f"{counted(plan.samples, 'picture')} in {plan.data}, cache {plan.cache}")
        about = f"{spec.family}, {spec.channels} channels, f{spec.factor}, {spec.storage_dtype}{kept(spec.posterior)}"
        say(f"  model    {plan.model} ({about}), recipe {plan.recipe.recipe_id.hex()[:8]}")
        shown = [f"{size} ({count})" for size, count in list(plan.buckets.items())[:SHOWN]]
        more = len(plan.buckets) - len(shown)
        say(f"  buckets  {', '.join(shown) or 'none'}{f' and {more} more' if more > 0 else ''}  (height x width)")
        cost = f"{human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
        made = counted(plan.entries_to_make, "entry", "entries")
        say(f"  plan     {made} to make, {plan.entries_cached} reused, {cost}")
        if plan.refused:
            say(f"  refused  {counted(len(plan.refused), 'file')} so far, named at the end")
        self._started = time.monotonic()

    def advanced(self, progress: Progress) -> None:
        """How far it is; looks at the clock before it prints."""
        self.progress = progress
        now = time.monotonic()
        interval = _BAR_S if sys.stderr.isatty() else _LINE_S
        if self._quiet or now - self._shown < interval:
            return
        self._shown = now
        lines = self._lines(progress, max(now - self._started, 1e-6))
        if sys.stderr.isatty():
            self._draw(progress, lines)
        else:
            say(f"{progress.done}/{progress.total} {lines[0]}")

    def warned(self, message: str) -> None:
        """Something the user should know; the bar makes way for it."""
        self.close()
        say(f"warning: {message}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _lines(self, progress: Progress, elapsed: float) -> tuple[str, ...]:
        """The same in fewer and fewer words; the time left is in all of them."""
        rate = progress.done / elapsed
        left = f"{clock((progress.total - progress.done) / rate) if rate else '-:--'} left"
        speed, refused = f"{rate:.1f} img/s", f"{progress.quarantined} quarantined"
        counts = f"{progress.encoded} encoded, {self._reused + progress.cached} reused, {refused}"
        whole = f"{speed}, {human_bytes(progress.payload_bytes / elapsed)}/s, {counts}, {left}"
        return whole, f"{speed}, {refused}, {left}", f"{speed}, {left}", left

    def _draw(self, progress: Progress, lines: tuple[str, ...]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            console = Console(stderr=True)
            columns = BarColumn(min(40, console.width // 4)), MofNCompleteColumn(), TextColumn("{task.description}")
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=progress.total)
            self._bar.start()
        width = self._bar.console.width
        room = width - min(40, width // 4) - 2 * len(str(progress.total)) - 4  # bar, "12/40", the spaces between
        text = next((line for line in lines if len(line) <= room), lines[-1])
        self._bar.update(self._task, completed=progress.done, description=text)


def clock(seconds: float) -> str:
    """Seconds as people write them: 0:07, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
