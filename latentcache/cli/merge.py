"""``latentcache merge``: parts of one build, or caches of one recipe, become one cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from latentcache.cli import build, flags
from latentcache.cli.console import Result
from latentcache.cli.flags import argument, option

if TYPE_CHECKING:
    from latentcache.cli.progress import BuildProgress
    from latentcache.errors import InterruptedBuildError
    from latentcache.pipeline.report import BuildReport

HELP = "Merge parts of a build, or caches of one recipe, into one cache."


def merge(
    parts: list[Path] = argument("PART...", "Caches of build --part, or of one recipe."),
    *,
    out_folder: Path = option(..., "--out -o CACHE", "The merged cache."),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
    as_json: flags.Json = False,
) -> Result:
    """Merge caches into one; settings that differ are rejected by field."""

    def make(display: BuildProgress, last_words: Callable[[InterruptedBuildError], None]) -> BuildReport:
        from latentcache.pipeline.merge import merge_caches

        return merge_caches(parts, out_folder, observer=display)

    return build.run_build("merge", make, quiet=quiet, as_json=as_json)
