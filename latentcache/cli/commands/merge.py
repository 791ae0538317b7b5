"""``latentcache merge``: parts of one build become one cache."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from latentcache.cli import flags
from latentcache.cli.commands.build import summary
from latentcache.cli.console import Result
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import BuildProgress

HELP = "Merge the parts of a build into one cache."
EXAMPLES = """\
latentcache build images/ --model ./sdxl --part 0/2 --out part0
latentcache build images/ --model ./sdxl --part 1/2 --out part1
latentcache merge part0 part1 --out images.latentcache
"""


def merge(
    parts: list[Path] = argument("PART...", "Caches that build --part made from the same data, or their URLs."),
    *,
    out_folder: Path = option(..., "--out -o CACHE", "The merged cache, or its URL."),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
) -> Result:
    """Merge caches into one; settings that differ are rejected by field."""
    from latentcache.pipeline.merge import merge_caches

    with closing(BuildProgress(quiet=quiet)) as display:
        return summary(merge_caches(parts, out_folder, observer=display))
