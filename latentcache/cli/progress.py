"""Progress of a build on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import SHOWN, counted, human_bytes, kept, say

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.work import Progress

_LINE_S = 10.0
_BAR_S = 0.1


class Talk:
    """Says how far something is, on a terminal by a bar, elsewhere every ten seconds. ``quiet``: warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def warned(self, message: str) -> None:
        """Something the user should know; the bar makes way for it."""
        self.close()
        say(f"warning: {message}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _begin(self) -> None:
        """Rates count from now on."""
        self._started = time.monotonic()

    def _due(self) -> bool:
        """Whether something is to be shown; then the next time is counted from now on."""
        now, interval = time.monotonic(), _BAR_S if sys.stderr.isatty() else _LINE_S
        if self._quiet or now - self._shown < interval:
            return False
        self._shown = now
        return True

    @property
    def _elapsed(self) -> float:
        """Seconds since the beginning, more than none."""
        return max(time.monotonic() - self._started, 1e-6)

    def _show(self, done: int, total: int, lines: Sequence[str]) -> None:
        """So many are done; ``lines`` say the rest, the same in fewer and fewer words."""
        if sys.stderr.isatty():
            self._draw(done, total, lines)
        else:
            say(f"{done}/{total} {lines[0]}")

    def _draw(self, done: int, total: int, lines: Sequence[str]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            console = Console(stderr=True)
            columns = BarColumn(min(40, console.width // 4)), MofNCompleteColumn(), TextColumn("{task.description}")
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=total)
            self._bar.start()
        width = self._bar.console.width
        room = width - min(40, width // 4) - 2 * len(str(total)) - 4  # bar, "12/40", the spaces between
        text = next((line for line in lines if len(line) <= room), lines[-1])
        self._bar.update(self._task, completed=done, description=text)


class BuildTalk(Talk):
    """Shows the plan, then how far the build is. ``quiet`` shows warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
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
        self._begin()

    def advanced(self, progress: Progress) -> None:
        """How far it is; looks at the clock before it prints."""
        self.progress = progress
        if self._due():
            self._show(progress.done, progress.total, self._lines(progress, self._elapsed))

    def _lines(self, progress: Progress, elapsed: float) -> tuple[str, ...]:
        """The same in fewer and fewer words; the time left is in all of them."""
        rate = progress.done / elapsed
        left = f"{clock((progress.total - progress.done) / rate) if rate else '-:--'} left"
        speed, refused = f"{rate:.1f} img/s", f"{progress.quarantined} quarantined"
        counts = f"{progress.encoded} encoded, {self._reused + progress.cached} reused, {refused}"
        whole = f"{speed}, {human_bytes(progress.payload_bytes / elapsed)}/s, {counts}, {left}"
        return whole, f"{speed}, {refused}, {left}", f"{speed}, {left}", left


def clock(seconds: float) -> str:
    """Seconds as people write them: 0:07, 1:02:03."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
