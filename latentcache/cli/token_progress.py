"""Progress of a build of tokens on stderr: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from latentcache.cli.console import counted, human_bytes, say
from latentcache.cli.progress import Talk, clock

if TYPE_CHECKING:
    from latentcache.pipeline.token_report import TokenPlan, TokenProgress


class TokenTalk(Talk):
    """Shows the plan, then how far the build is. ``quiet`` shows warnings only."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet)
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
        share = f", share {plan.share} of them" if plan.share else ""
        say(f"{counted(plan.samples, 'record')} of {files} in {plan.data}{share}, cache {plan.cache}")
        kind = f"{recipe.num_ids:,} ids in {recipe.dtype}, loss on {recipe.loss}"
        say(f"  tokenizer  {plan.tokenizer} ({recipe.tokenizer[:8]}, {kind}), recipe {recipe.recipe_id.hex()[:8]}")
        cost = f"about {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
        by = f" by {counted(plan.workers, 'worker')}" if plan.workers else ""
        taken = f", {plan.taken} to take over" if plan.taken else ""
        todo = f"{counted(plan.todo, 'document')} to tokenise{by}{taken}, {plan.reused} reused"
        say(f"  plan       {todo}, {cost if plan.todo + plan.taken else 'nothing to write'}")
        if plan.refused:
            say(f"  refused    {counted(len(plan.refused), 'record')} so far, named at the end")
        self._begin()

    def advanced(self, progress: TokenProgress) -> None:
        """How far it is; looks at the clock before it prints."""
        self.progress = progress
        if self._due():
            self._show(progress.done, progress.total, [_line(progress, self._elapsed)])


def _line(progress: TokenProgress, elapsed: float) -> str:
    """Rates and the time left; that goes by characters, because records are of very different lengths."""
    rate = progress.characters / elapsed
    left = f"{clock((progress.characters_total - progress.characters) / rate) if rate else '-:--'} left"
    tokens = f"{progress.tokens / elapsed:,.0f} tokens/s"
    speed = f"{progress.done / elapsed:.0f} documents/s, {human_bytes(rate)}/s, {tokens}"
    return f"{left}, {speed}, {progress.refused} refused"
