"""``latentcache push``: a cache goes to object storage."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from latentcache.cli import flags
from latentcache.cli.console import Result
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import ProgressDisplay
from latentcache.errors import count_of
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.store.remote import Transfer

HELP = "Copy a cache to object storage: S3, Google Cloud Storage, Azure."
EXAMPLES = """\
latentcache push images.latentcache s3://bucket/images
latentcache push images.latentcache s3://bucket/images --dry-run
latentcache push images.latentcache gs://bucket/images --json
"""


def push(
    cache: flags.Cache,
    url: str = argument("URL", "s3://BUCKET/PREFIX, or gs:// or az://."),
    *,
    dry_run: bool = option(False, "--dry-run", "Say what would be sent, and send nothing."),
    single_writer: bool = option(
        False, "--single-writer", "Skip the test for conditional writes: right if you alone push to this URL."
    ),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
) -> Result:
    """Send what the URL does not have; run it again if it was cut."""
    from latentcache.store.remote import push as send

    with closing(ProgressDisplay(quiet=quiet)) as display:
        transfer = send(cache, url, dry_run=dry_run, single_writer=single_writer, progress=display.moved)
    return Result(transfer_json(transfer), _lines(transfer, dry_run))


def _lines(transfer: Transfer, dry_run: bool) -> Iterator[str]:
    yield f"{transfer_text(transfer)} {'to send' if dry_run else 'sent'}"
    if not dry_run:
        yield f"{transfer.url} has snapshot {transfer.snapshot}"
        yield f"next: `latentcache pull {transfer.url} {shlex.quote(transfer.cache.name)}` on another machine"


def transfer_text(transfer: Transfer) -> str:
    """Files and bytes of a transfer."""
    files = f"{count_of(transfer.files, 'files')}, {human_bytes(transfer.num_bytes)}"
    files += f" in {count_of(transfer.requests, 'requests')}"
    return f"{files}, {transfer.kept} there already;"


def transfer_json(transfer: Transfer) -> dict[str, object]:
    """A transfer as keys of the JSON object."""
    return {
        "url": transfer.url,
        "cache": str(transfer.cache),
        "snapshot": transfer.snapshot,
        "files": transfer.files,
        "bytes": transfer.num_bytes,
        "kept": transfer.kept,
        "requests": transfer.requests,
    }
