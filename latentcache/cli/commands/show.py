"""``latentcache show``: one sample of a cache, with its values and tokens."""

from __future__ import annotations

from latentcache.cli import flags
from latentcache.cli.console import Result
from latentcache.cli.flags import argument

HELP = "Show one sample of a cache: size, crop, caption, values, decoded tokens with loss."
EXAMPLES = """\
latentcache show images.latentcache cats/one.png
latentcache show images.latentcache 0
latentcache show chats.latentcache 0 --json
"""


def show(
    cache: flags.CacheOrUrl,
    name: str = argument("NAME", "The sample: a file below DATA, FILE:LINE for a record, or its number from 0."),
    *,
    field: flags.Kinds = None,
) -> Result:
    """Show one sample; its items are read and their checksums are compared."""
    from latentcache.report.sample import find_sample, sample_lines, sample_of
    from latentcache.store.snapshot import open_leased

    snapshot = open_leased(cache)
    facts = sample_of(snapshot, find_sample(snapshot, name)).facts
    is_damaged = any("shape" not in item for values in facts["fields"].values() for item in values["items"])
    return Result({"cache": str(cache), "sample": facts}, sample_lines(facts), exit_code=int(is_damaged))
