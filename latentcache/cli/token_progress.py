"""Progress of a build of tokens on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import counted, human_bytes, say
from latentcache.cli.progress import clock

if TYPE_CHECKING:
    from latentcache.pipeline.token_report import TokenPlan, TokenProgress

_LINE_S = 10.0
_BAR_S = 0.1


class TokenTalk:
    """Shows the plan, then how far the build is. ``quiet`` shows warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._started = self._shown = time.monotonic()
        self._bar: Any = None
        self._task: Any = None
        self.plan: TokenPlan | None = None
        """As it was told."""
        self.progress: TokenProgress | None = None
        """As it was told last."""

    def planned(self, plan: TokenPlan) -> None:
        """The plan, before anything is tokenised."""
        self.plan = plan
        if self._quiet:
            return
        recipe = plan.recipe
        files = counted(plan.sources, "file")
        say(f"{counted(plan.samples, 'record')} of {files} in {plan.data}, cache {plan.cache}")
        kind = f"{recipe.num_ids:,} ids in {recipe.dtype}, loss on {recipe.loss}"
        say(f"  tokenizer  {plan.tokenizer} ({recipe.tokenizer[:8]}, {kind}), recipe {recipe.recipe_id.hex()[:8]}")
        cost = f"about {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
        by = f" by {counted(plan.workers, 'worker')}" if plan.workers else ""
        todo = f"{counted(plan.todo, 'document')} to tokenise{by}, {plan.reused} reused"
        say(f"  plan       {todo}, {cost if plan.todo else 'nothing to write'}")
        if plan.refused:
            say(f"  refused    {counted(len(plan.refused), 'record')} so far, named at the end")
        self._started = time.monotonic()

    def advanced(self, progress: TokenProgress) -> None:
        """How far it is; looks at the clock before it prints."""
        self.progress = progress
        now = time.monotonic()
        interval = _BAR_S if sys.stderr.isatty() else _LINE_S
        if self._quiet or now - self._shown < interval:
            return
        self._shown = now
        text = _line(progress, max(now - self._started, 1e-6))
        if sys.stderr.isatty():
            self._draw(progress, text)
        else:
            say(f"{progress.done}/{progress.total} {text}")

    def warned(self, message: str) -> None:
        """Something the user should know; the bar makes way for it."""
        self.close()
        say(f"warning: {message}")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _draw(self, progress: TokenProgress, text: str) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            console = Console(stderr=True)
            columns = BarColumn(min(40, console.width // 4)), MofNCompleteColumn(), TextColumn("{task.description}")
            self._bar = Bar(*columns, console=console, transient=True)
            self._task = self._bar.add_task("", total=progress.total)
            self._bar.start()
        self._bar.update(self._task, completed=progress.done, description=text)


def _line(progress: TokenProgress, elapsed: float) -> str:
    """Rates and the time left; that goes by characters, because records are of very different lengths."""
    rate = progress.characters / elapsed
    left = f"{clock((progress.characters_total - progress.characters) / rate) if rate else '-:--'} left"
    tokens = f"{progress.tokens / elapsed:,.0f} tokens/s"
    speed = f"{progress.done / elapsed:.0f} documents/s, {human_bytes(rate)}/s, {tokens}"
    return f"{left}, {speed}, {progress.refused} refused"
