"""``collect_url``: find data at a URL that no snapshot needs and, on request, delete it.

Object storage has no leases, so age decides, by the store's clock. Guarantee: the current snapshot, younger ones,
their shards and all young objects stay. A build that takes longer than the age may lose shards: it ends with an error
before it publishes, and the same command encodes them again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from latentcache.errors import RemoteError
from latentcache.store.index import INDEX
from latentcache.store.remote import Bucket, current_head, no_cache
from latentcache.store.snapshot import MANIFEST, load_manifest
from latentcache.verify.collect import CollectReport, Garbage


def collect_url(url: str, *, older_than_s: float, apply: bool = False) -> CollectReport:
    """Find objects that no snapshot needs, and delete them if ``apply`` says so.

    Args:
        url: The cache.
        older_than_s: Seconds for which objects stay that nothing needs: longer than any reader or build takes.
        apply: Delete them; otherwise only report them.

    Raises:
        RemoteError: The store cannot be used, or another snapshot was published meanwhile.
        CacheNotFoundError: There is no cache at the URL.
    """
    bucket = Bucket(url)
    head, objects = current_head(bucket), bucket.objects()
    if head is None:
        raise no_cache(bucket)
    folders = defaultdict[str, list[str]](list)
    for key in objects:
        folders["/".join(key.split("/")[:2])].append(key)
    newest = {folder: max(objects[key][1] for key in keys) for folder, keys in folders.items()}
    size = {folder: sum(objects[key][0] for key in keys) for folder, keys in folders.items()}
    before = bucket.now() - timedelta(seconds=older_than_s)
    kept = [
        name for name in folders if name.startswith("snapshots/") and (newest[name] > before or name == head.folder)
    ]
    needed = _needed(bucket, kept, objects)
    items = [
        _judged(name, size[name], newest[name], before, head.folder, needed)
        for name in sorted(folders)
        if name.startswith(("snapshots/", "shards/", "probe-"))
    ]
    garbage = [item for item in items if item is not None]
    if apply:
        if current_head(bucket) != head:
            fix = "run the same command again"
            raise RemoteError(f"{bucket.url} got a snapshot meanwhile", where=bucket.url, fix=fix)
        for item in garbage:
            if item.state == "removable":
                for key in sorted(folders[item.file], key=lambda key: not key.endswith((INDEX, MANIFEST))):
                    bucket.remove(key)
    state = "removed" if apply else "removable"
    return CollectReport(
        applied=apply,
        snapshot=head.snapshot,
        items=tuple(replace(item, state=state) if item.state == "removable" else item for item in garbage),
    )


def _needed(bucket: Bucket, snapshots: list[str], objects: dict[str, tuple[int, datetime]]) -> set[str] | None:
    """Folders of the shards of snapshots; None: one is not whole yet, so any shard may be needed."""
    names = set[str]()
    with TemporaryDirectory(prefix="latentcache-") as folder:
        for snapshot in snapshots:
            if f"{snapshot}/{MANIFEST}" not in objects:
                return None
            bucket.fetch(f"{snapshot}/{MANIFEST}", Path(folder, MANIFEST))
            names.update(load_manifest(Path(folder))["shards"])
    return {f"shards/{name}" for name in names}


def _judged(
    name: str, size: int, newest: datetime, before: datetime, current: str, needed: set[str] | None
) -> Garbage | None:
    """What becomes of the objects of a folder; None: they are in use."""
    is_snapshot = name.startswith("snapshots/")
    if name == current or (needed is not None and name in needed):
        return None
    if newest > before:
        reason = "rollback" if is_snapshot else "unfinished-build"
        return Garbage(state="held", reason=reason, file=name, num_bytes=size, until="until it is older")
    if needed is None and not is_snapshot:
        until = "until the push that is under way has ended"
        return Garbage(state="held", reason="unfinished-build", file=name, num_bytes=size, until=until)
    reason = "superseded" if is_snapshot else "unreferenced" if name.startswith("shards/") else "left-over"
    return Garbage(state="removable", reason=reason, file=name, num_bytes=size)
