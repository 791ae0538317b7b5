"""``verify_cache``: check a cache against its sources and itself; ``repair_cache``: take out what fails its check.

``fast`` reads manifest, columns and shard indexes, stats every source, and hashes sources whose stat differs.
``full`` also reads every payload and every source; ``sample`` does so for a slice. Only encoding again needs a model,
which the caller brings. The same checks run for every kind of field.

Through an untrusted cache no file outside its folder is opened: links, special files and too large files are errors,
before a byte is parsed. The command limits its own memory. Nothing guards against changes during the check.
"""

from __future__ import annotations

import itertools
import os
import resource
import shlex
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.failpoint import failpoint
from latentcache.fields.registry import load, settings_of
from latentcache.fields.settings import checked
from latentcache.plan.numbers import whole
from latentcache.sources.scan import Listing
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.publish import kept_rows, publish_replacement
from latentcache.store.shard import mend_index, remove_entries
from latentcache.store.snapshot import Snapshot, open_leased
from latentcache.value import Value
from latentcache.verify.collect import intact_snapshots, shard_use
from latentcache.verify.compare import compare_sources, find_data, list_sources
from latentcache.verify.entries import (
    LOST,
    BadEntries,
    Check,
    Depth,
    check_entries,
    confidence,
    parse_slice,
    scan_payloads,
)
from latentcache.verify.findings import PROBLEMS, Commands, Reencoded, VerifyReport
from latentcache.verify.recipes import Reencode, check_plans, check_recipes, described_now, reencode_samples

#: Largest sizes by name, bytes; everything else but shards has ``_MOST_FILE_BYTES``.
_FILE_BYTES = {"CURRENT": 64, "BUILDING": 1 << 20, "builder.lock": 1 << 16, "manifest.json": 1 << 26}
_MOST_FILE_BYTES = 1 << 32
_FOLDERS_DEEP = 4
#: Memory beyond what columns and indexes need.
_MEMORY_BYTES = 2 << 30
#: Types of arguments of :func:`verify_cache`.
_TYPES: Any = make_dataclass(
    "Arguments",
    {"cache": Path, "data": Path | None, "full": bool, "fields": Mapping[str, Any] | None, "device": str}.items(),
)


def verify_cache(
    cache: Path | str,
    data: Path | str | None = None,
    *,
    full: bool = False,
    sample: str | None = None,
    seed: int = 0,
    fields: Mapping[str, Any] | None = None,
    reencode: int = 0,
    device: str = "auto",
) -> VerifyReport:
    """Check a cache against its sources and against itself, as ``latentcache verify`` does.

    Args:
        cache: The cache folder.
        data: The data, if it is not at the recorded place.
        full: Read every payload and every source.
        sample: Read a part only: ``1/7`` is the first of seven.
        seed: Seed that chooses the samples to encode again.
        fields: Field name -> settings, as of :class:`BuildSettings`: every sample is stale if its recipe differs.
        reencode: Number of samples to encode again and compare; this loads the encoder.
        device: Device of ``reencode``: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        UsageError: A number or a part of the samples is not allowed, or the cache lacks a field.
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single samples.
        SourceError: The data is gone, or a table or record file in it cannot be read.
        EncoderError: The model that is to encode again is not at hand, or cannot be used.
        DeviceError: Its device failed, or does not exist.
    """
    arguments = checked(_TYPES, {"cache": cache, "data": data, "full": full, "fields": fields, "device": device})
    depth = Depth(
        full=full,
        slice=None if sample is None else parse_slice(str(sample)),
        reencode=whole("reencode", reencode, 0),
        seed=whole("seed", seed, 0),
        device=device,
    )
    settings = {name: settings_of(name, value) for name, value in (arguments["fields"] or {}).items()}
    return check_cache(arguments["cache"], depth, data=arguments["data"], settings=settings)[0]


def check_cache(
    cache: Path,
    depth: Depth,
    commands: Commands | None = None,
    *,
    data: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    reencode: Reencode | None = None,
) -> tuple[VerifyReport, Check]:
    """The report, and the damage behind it. ``settings``: what a build would be asked for now, by field.

    ``reencode``: encodes samples again if ``depth`` says so, by default as a build does.
    """
    started = time.monotonic()
    commands = commands or Commands()
    if reencode is None and depth.reencode:  # by name: a check alone imports no encoder
        reencode = load("latentcache.pipeline.reencode:reencode")
    if depth.untrusted:
        check_outside(cache)
    commands = replace(commands, cache=cache, data="" if data is None else f"--data {shlex.quote(str(data))}")
    snapshot = _opened(cache, commands)
    described, not_compared = described_now(snapshot, settings or {}, depth)
    root = None if depth.untrusted and data is None else find_data(cache, snapshot.source, data)
    check = Check(snapshot, depth)
    listing = _look(check, root)
    if root is not None:
        compare_sources(check, listing)
    changes = check_recipes(check, described)
    again = None
    if reencode is not None and root is not None:
        again = reencode_samples(check, reencode, described, root)
    fixes = replace(
        commands,
        root=root,
        allow_failed=snapshot.allow_failed if commands.allow_failed is None else commands.allow_failed,
        reencode=f"--reencode {depth.reencode} --seed {depth.seed}",
    )
    report = _report(check, listing, again)
    return replace(
        report,
        findings=tuple(map(fixes, report.findings)),
        not_compared=_not_compared(check, not_compared),
        recipe_diff=changes,
        elapsed_s=time.monotonic() - started,
    ), check


def _report(check: Check, listing: Listing | None, again: Reencoded | None) -> VerifyReport:
    """What the check found, without fixes."""
    snapshot = check.snapshot
    counts = check.findings.counts(check.samples)
    categorized = int((check.samples | check.findings.of(*PROBLEMS)).sum())
    is_clean = check.samples.any() and not any(counts[name] for name in PROBLEMS)
    read = sum(int(entries.sum()) for entries in check.entries.values())
    stated = confidence(read, sum(map(len, check.views.values())), "entries")
    return VerifyReport(
        mode=check.depth.mode,
        snapshot=snapshot.number,
        counts=counts | {"unreferenced": _unreferenced(check)},
        findings=check.findings.result(check.samples),
        samples=len(snapshot.samples) + sum(item.count for item in check.rejected_whole),
        checked={
            "samples": categorized,
            "headers": check.headers,
            "payloads": check.payloads,
            "payload_bytes": check.payload_bytes,
            "sources_stat": 0 if listing is None else int(check.samples.sum()),
            "sources_hashed": 0 if listing is None else listing.hashed,
            "reencoded": 0 if again is None else again.samples,
        },
        not_looked_at=len(snapshot.samples) - categorized,
        confidence=stated if is_clean and check.depth.slice is not None else "",
        reencoded=again,
        recipe_ids={name: view.rows.recipe_id.hex() for name, view in check.views.items()},
        allow_failed=snapshot.allow_failed,
        part=snapshot.part,
        building=check.paths.building.exists(),
        complete=snapshot.complete,
    )


def _opened(cache: Path, commands: Commands) -> Snapshot:
    """The current snapshot, which is intact."""
    try:
        snapshot = open_leased(cache)
        snapshot.check()
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            error.fix = f"run `{commands.build()}` with the flags of its first build: no entry is lost"
        raise
    return snapshot


def _look(check: Check, root: Path | None) -> Listing | None:
    """Check entries, and payloads if they are to be read; gives what the data holds now."""
    check_entries(check)
    check_plans(check)
    if not check.depth.reads:
        return list_sources(check, root)
    with ThreadPoolExecutor(1) as pool:
        listing = pool.submit(list_sources, check, root)  # beside the reads of shards
        scan_payloads(check)
        return listing.result()


def _not_compared(check: Check, lost: Mapping[str, str]) -> tuple[str, ...]:
    """Models that are not here, by field, and fields whose kind is not installed."""
    unknown = [name for name, view in check.views.items() if view.rows.kind is None]
    sentences = [f"plan and values of {name} (its kind is not installed)" for name in unknown]
    return (*sentences, *(f"{name}: {reason}" for name, reason in lost.items()))


def _unreferenced(check: Check) -> int:
    """Entries in sealed shards that no snapshot on disk needs."""
    paths = check.paths
    others = {folder.name for folder in paths.sealed_shards()}.difference(check.snapshot.shards)
    if not others and not check.unneeded:  # what other snapshots need is then no question
        return 0
    return sum(max(use.entries - use.needed, 0) for use in shard_use(paths, intact_snapshots(paths)))


def check_outside(root: Path) -> None:
    """See that a folder holds only folders and regular files of sizes that a cache has."""
    for path in (Path(folder, name) for folder, *names in os.walk(root) for name in itertools.chain(*names)):
        status = path.lstat()
        if stat.S_ISLNK(status.st_mode):
            raise _foreign(path, f"it is a link to {path.readlink()}")
        if stat.S_ISREG(status.st_mode):
            most = _FILE_BYTES.get(path.name, _MOST_FILE_BYTES)
            if status.st_size > most and path.name != "data.mdb":
                raise _foreign(path, f"it has {status.st_size:,} bytes, at most {most:,} are expected")
        elif not stat.S_ISDIR(status.st_mode) or len(path.relative_to(root).parts) >= _FOLDERS_DEEP:
            raise _foreign(path, "it is neither a file nor a folder of a cache")


@contextmanager
def limited_memory(root: Path) -> Iterator[None]:
    """Let this process take no more memory than an honest cache of this size needs, while the block runs."""
    columns = [*root.glob("snapshots/*/*"), *root.glob("shards/*/index.safetensors")]
    taken = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    most = taken + _MEMORY_BYTES + 8 * sum(path.lstat().st_size for path in columns)
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))


def _foreign(path: Path, why: str) -> CacheDamagedError:
    return CacheDamagedError(
        "this cache holds something that no cache should",
        where=str(path),
        why=why,
        fix="do not use it; ask its maker for a copy made with `cp -rL` or `tar`",
    )


class Removal(NamedTuple):
    """One entry that is taken out of the snapshot."""

    key: str
    """In hex."""
    path: str
    """Path of its first sample."""
    reason: str
    num_bytes: int
    shard: str


class Repair(Value):
    """Plan or result of a repair."""

    report: VerifyReport
    """Result of the verification."""
    removals: tuple[Removal, ...]
    """Entries to be taken out; those that an index lacks when it is written again come on top."""
    shards: tuple[str, ...]
    """Shards that lose entries, or whose index is written again."""
    needed: bool
    """True if there is anything to do."""
    snapshot: int
    """The current snapshot."""
    complete: bool
    done: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the numbers of a repair for ``verify --json``."""
        removed = self.removals if self.done else ()
        return {
            "done": self.done,
            "removed": len(removed),
            "removed_bytes": sum(item.num_bytes for item in removed),
            "shards": list(self.shards),
            "snapshot": self.snapshot,
            "complete": self.complete,
        }


def repair_cache(
    cache: Path, *, confirm: Callable[[Repair], bool], depth: Depth | None = None, **options: Any
) -> Repair:
    """Verify everything, then take out what is corrupt, and drifted samples that the check encodes again.

    Only these entries are removed, and those that a damaged index lacks when it is written again. No entry is changed
    or copied. The indexes of shards name the removed ones no more, so no later build uses them. A snapshot without
    them is published, marked incomplete. The same command continues a killed repair.

    ``confirm`` is shown the plan if there is anything to do. ``options`` are those of :func:`check_cache`; entries
    of another recipe are reported and kept.
    """
    paths = CachePaths(cache)
    paths.current_snapshot()  # no lock is left in a folder that is no cache
    with builder_lock(paths.lock):
        report, check = check_cache(cache, depth or Depth(full=True), **options)
        gone = {name: np.zeros(len(view), dtype=np.bool_) for name, view in check.views.items()}
        removals = _take_out(check, check.bad, gone)
        shards = check.damaged | {removal.shard for removal in removals}
        plan = Repair(
            report=report,
            removals=tuple(removals),
            shards=tuple(sorted(shards)),
            needed=bool(shards or any(mask.any() for mask in gone.values())),
            snapshot=report.snapshot,
            complete=report.complete,
        )
        return _carry_out(check, plan, gone) if plan.needed and confirm(plan) else plan


def _take_out(check: Check, bad: Iterable[BadEntries], gone: Mapping[str, NDArray[np.bool_]]) -> list[Removal]:
    """Mark entries in ``gone``, (E,) by field; gives those of them that are there, and were not marked."""
    removals = list[Removal]()
    for field, reason, entries in sorted(bad, key=lambda item: item.reason == LOST):
        view = check.views[field]
        mask = gone[field]
        entries = np.unique(entries[~mask[entries]])
        mask[entries] = True
        for entry in entries.tolist() if reason != LOST else ():
            samples = view.sample[view.rows_of(np.array([entry]))]
            removals.append(
                Removal(
                    key=view.key[entry].tobytes().hex(),
                    path=check.findings.table.names[int(samples[0])] if len(samples) else "",
                    reason=reason,
                    num_bytes=int(view.head[entry] + view.bytes[entry]),
                    shard=check.snapshot.shards[view.shard[entry]],
                )
            )
    return removals


def _carry_out(check: Check, plan: Repair, gone: Mapping[str, NDArray[np.bool_]]) -> Repair:
    """Take entries out of the indexes, then publish the snapshot without them."""
    paths = check.paths
    removals = list(plan.removals)
    if check.damaged:
        for shard in sorted(check.damaged):
            mend_index(paths.shard(shard))
        again = Check(check.snapshot, Depth())
        check_entries(again)
        removals += _take_out(check, (bad._replace(reason="not-intact") for bad in again.bad), gone)
    keys = np.array([bytes.fromhex(removal.key) for removal in removals], dtype="S32")
    for folder in paths.sealed_shards():  # a build takes an entry of this key from any shard
        with suppress(CacheDamagedError):
            remove_entries(folder, keys)
    failpoint("repair-delete")
    fields = [kept_rows(view.rows, ~gone[name][view.entry]) for name, view in check.views.items()]
    complete = plan.complete and not any(mask.any() for mask in gone.values())
    publish_replacement(paths, check.snapshot, fields, complete=complete)
    current = paths.current_snapshot()
    return replace(plan, done=True, snapshot=current, complete=complete, removals=tuple(removals))
