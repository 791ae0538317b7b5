"""``latentcache pull``: a cache comes from object storage."""

from __future__ import annotations

import shlex
from contextlib import closing
from pathlib import Path

from latentcache.cli import flags
from latentcache.cli.commands.push import transfer_json, transfer_text
from latentcache.cli.console import Result
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import ProgressDisplay

HELP = "Copy a cache from object storage to a folder."
EXAMPLES = """\
latentcache pull s3://bucket/images images.latentcache
latentcache pull gs://bucket/images /nvme/images.latentcache
latentcache pull s3://bucket/images images.latentcache --fields latents
"""


def pull(
    url: str = argument("URL", "s3://BUCKET/PREFIX, or gs:// or az://, where a cache was pushed to."),
    cache: Path = argument("CACHE", "A folder: new, or an older state of the same cache."),
    *,
    fields: str | None = option(None, "--fields NAME,...", "Copy only these fields. [default: all]"),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
) -> Result:
    """Fetch what the folder does not have; run it again if it was cut."""
    from latentcache.store.remote import pull as fetch

    chosen = tuple(filter(None, (fields or "").split(",")))
    with closing(ProgressDisplay(quiet=quiet)) as display:
        transfer = fetch(url, cache, fields=chosen, progress=display.moved)
    lines = (
        f"{transfer_text(transfer)} fetched",
        f"{cache} has snapshot {transfer.snapshot}",
        f"next: `latentcache verify {shlex.quote(str(cache))} --full` proves every byte",
    )
    return Result(transfer_json(transfer), lines)
