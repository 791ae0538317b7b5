"""``latentcache push`` and ``pull``: a cache goes to object storage, and comes from it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from latentcache.cli import flags
from latentcache.cli.console import Result
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import ProgressDisplay
from latentcache.errors import count_of
from latentcache.plan.numbers import human_bytes

if TYPE_CHECKING:
    from latentcache.store.remote.transfer import Transfer


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
    """Copy a cache to object storage: S3, Google Cloud Storage, Azure.

    Examples:
        latentcache push images.latentcache s3://bucket/images
        latentcache push images.latentcache s3://bucket/images --dry-run
        latentcache push images.latentcache gs://bucket/images --json
    """
    from latentcache.store.remote.transfer import push as send

    with closing(ProgressDisplay(quiet=quiet)) as display:
        transfer = send(cache, url, dry_run=dry_run, single_writer=single_writer, progress=display.moved)
    return Result(_json(transfer), _lines(transfer, dry_run))


def pull(
    url: str = argument("URL", "s3://BUCKET/PREFIX, or gs:// or az://, where a cache was pushed to."),
    cache: Path = argument("CACHE", "A folder: new, or an older state of the same cache."),
    *,
    fields: str | None = option(None, "--fields NAME,...", "Copy only these fields. [default: all]"),
    field: flags.Kinds = None,
    quiet: flags.Quiet = False,
) -> Result:
    """Copy a cache from object storage to a folder.

    Examples:
        latentcache pull s3://bucket/images images.latentcache
        latentcache pull gs://bucket/images /nvme/images.latentcache
        latentcache pull s3://bucket/images images.latentcache --fields latents
    """
    from latentcache.store.remote.transfer import pull as fetch

    chosen = tuple(filter(None, (fields or "").split(",")))
    with closing(ProgressDisplay(quiet=quiet)) as display:
        transfer = fetch(url, cache, fields=chosen, progress=display.moved)
    lines = (
        f"{_text(transfer)} fetched",
        f"{cache} has snapshot {transfer.snapshot}",
        f"next: `latentcache verify {shlex.quote(str(cache))} --full` proves every byte",
    )
    return Result(_json(transfer), lines)


def _lines(transfer: Transfer, dry_run: bool) -> Iterator[str]:
    yield f"{_text(transfer)} {'to send' if dry_run else 'sent'}"
    if not dry_run:
        yield f"{transfer.url} has snapshot {transfer.snapshot}"
        yield f"next: `latentcache pull {transfer.url} {shlex.quote(transfer.cache.name)}` on another machine"


def _text(transfer: Transfer) -> str:
    """Files and bytes of a transfer."""
    files = f"{count_of(transfer.files, 'files')}, {human_bytes(transfer.num_bytes)}"
    files += f" in {count_of(transfer.requests, 'requests')}"
    return f"{files}, {transfer.kept} there already;"


def _json(transfer: Transfer) -> dict[str, object]:
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
