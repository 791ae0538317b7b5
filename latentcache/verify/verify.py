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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import make_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.failpoint import failpoint
from latentcache.fields.protocol import Described
from latentcache.fields.registry import load, settings_of
from latentcache.fields.settings import checked
from latentcache.plan.numbers import whole
from latentcache.store.garbage import intact_snapshots, shard_use
from latentcache.store.index import load_index, mend_index, remove_entries
from latentcache.store.lock import builder_lock
from latentcache.store.paths import CachePaths
from latentcache.store.publish import kept_rows, publish_replacement
from latentcache.store.snapshot import Snapshot, open_leased
from latentcache.value import Value
from latentcache.verify.entries import (
    Check,
    Chosen,
    Depth,
    View,
    check_entries,
    choose,
    confidence,
    parse_slice,
    positions,
)
from latentcache.verify.findings import PROBLEMS, Commands, VerifyReport
from latentcache.verify.sources import (
    check_plans,
    check_recipes,
    compare_sources,
    described_now,
    find_data,
    note_sources,
)

if TYPE_CHECKING:
    from latentcache.verify.compare import Compared
    from latentcache.verify.payloads import Reencode

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
    seed, reencode = whole("seed", seed, 0), whole("reencode", reencode, 0)
    depth = Depth(full=full, slice=None if sample is None else parse_slice(str(sample)), reencode=reencode, seed=seed)
    settings = {name: settings_of(name, value) for name, value in (arguments["fields"] or {}).items()}
    look: dict[str, Any] = {"data": arguments["data"]}
    look["requested"] = partial(described_now, settings=settings, depth=depth, device=device)
    if reencode:  # by name: a check alone imports no encoder
        look["reencode"] = partial(load("latentcache.pipeline.reencode:reencode"), device=device)
    return check_cache(arguments["cache"], depth, **look)[0]


def check_cache(
    cache: Path,
    depth: Depth,
    commands: Commands | None = None,
    *,
    data: Path | None = None,
    requested: Callable[[Snapshot], Mapping[str, Described]] | None = None,
    reencode: Reencode | None = None,
) -> tuple[VerifyReport, Check]:
    """The report, and the damage that was found; ``requested`` describes fields as a build would make them now."""
    started, commands = time.monotonic(), commands or Commands()
    if depth.untrusted:
        check_outside(cache)
    commands = replace(commands, cache=cache, data="" if data is None else f"--data {shlex.quote(str(data))}")
    snapshot = _opened(cache, commands)
    described = {} if requested is None else requested(snapshot)
    root = None if depth.untrusted and data is None else find_data(cache, snapshot.source, data)
    check = Check(snapshot)
    chosen = choose(snapshot, depth.slice)
    compared = _look(check, depth, root, chosen)
    looked = chosen.samples if root is None else note_sources(check, compared, chosen.samples)
    changes = check_recipes(check, described)
    again = None
    if reencode is not None and root is not None:
        from latentcache.verify.payloads import reencode_samples

        fine, draw = looked & ~check.findings.of(*PROBLEMS), (depth.reencode, depth.seed)
        again = reencode_samples(check, reencode, described, root, fine, *draw)
    report = _report(check, depth, chosen, looked, compared)
    allowed = snapshot.allow_failed if commands.allow_failed is None else commands.allow_failed
    words = f"--reencode {depth.reencode} --seed {depth.seed}"
    fixes = replace(commands, root=root, allow_failed=allowed, reencode=words)
    return replace(
        report,
        findings=tuple(map(fixes, report.findings)),
        checked={**report.checked, "reencoded": 0 if again is None else again.samples},
        not_compared=_not_compared(check, described),
        recipe_diff=changes,
        reencoded=again,
        elapsed_s=time.monotonic() - started,
    ), check


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


def _report(
    check: Check, depth: Depth, chosen: Chosen, looked: NDArray[np.bool_], compared: Compared | None
) -> VerifyReport:
    """What the check found, without fixes and without what concerns models."""
    snapshot, counts = check.snapshot, check.findings.counts(looked)
    categorized = looked | check.findings.of(*PROBLEMS)
    clean = not any(counts[name] for name in PROBLEMS)
    return VerifyReport(
        mode=depth.mode,
        snapshot=snapshot.number,
        counts=counts | {"unreferenced": _unreferenced(check)},
        findings=check.findings.result(looked),
        samples=len(snapshot.samples) + sum(item.count for item in check.rejected_whole),
        checked={
            "samples": int(categorized.sum()),
            "headers": check.headers,
            "payloads": check.payloads,
            "payload_bytes": check.payload_bytes,
            "sources_stat": 0 if compared is None else int(compared.looked.sum()),
            "sources_hashed": 0 if compared is None else compared.now.hashed,
        },
        not_looked_at=int((~categorized).sum()),
        confidence=_stated(check, depth, chosen, looked) if clean else "",
        recipe_ids={name: view.rows.recipe_id.hex() for name, view in check.views.items()},
        allow_failed=snapshot.allow_failed,
        part=snapshot.part,
        building=check.paths.building.exists(),
        complete=snapshot.complete,
    )


def _look(check: Check, depth: Depth, root: Path | None, chosen: Chosen) -> Compared | None:
    """Look at entries and sources; payloads are read only if ``depth`` says so."""

    def look() -> Compared | None:
        some = None if depth.slice is None else chosen.samples
        return None if root is None else compare_sources(check, root, full=depth.reads, chosen=some)

    check_entries(check, chosen.entries)
    check_plans(check, chosen.samples)
    if not depth.reads:
        return look()
    from latentcache.verify.payloads import scan_payloads

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(look)  # reading files and reading shards wait for different things
        scan_payloads(check, chosen.entries)
        return reading.result()


def _not_compared(check: Check, described: Mapping[str, Described]) -> tuple[str, ...]:
    """Models that are not here, by field, and fields whose kind is not installed."""
    lost = {name: field.not_compared for name, field in described.items() if field.not_compared}
    unknown = [name for name, view in check.views.items() if view.rows.kind is None]
    words = [f"plan and values of {name} (its kind is not installed)" for name in unknown]
    return (*words, *(f"{name}: {reason}" for name, reason in lost.items()))


def _unreferenced(check: Check) -> int:
    """Entries in sealed shards that no snapshot on disk needs."""
    paths = check.paths
    others = {folder.name for folder in paths.sealed_shards()}.difference(check.snapshot.shards)
    if not others and not check.unneeded:  # what other snapshots need is then no question
        return 0
    return sum(max(use.entries - use.needed, 0) for use in shard_use(paths, intact_snapshots(paths)))


def _stated(check: Check, depth: Depth, chosen: Chosen, looked: NDArray[np.bool_]) -> str:
    """Return the conclusion from samples that are all clean about the others; empty if nothing follows."""
    if depth.slice is None or not looked.any() or (chosen.samples & ~looked).any():
        return ""
    read = sum(int(entries.sum()) for entries in chosen.entries.values())
    return confidence(read, sum(map(len, check.views.values())), "entries")


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
    cache: Path, *, confirm: Callable[[Repair], bool], depth: Depth | None = None, **look: Any
) -> Repair:
    """Verify everything, then take out what is corrupt, and drifted samples that the check encodes again.

    Only these entries are removed, and those that a damaged index lacks when it is written again. No entry is changed
    or copied. The indexes of shards name the removed ones no more, so no later build uses them. A snapshot without
    them is published, marked incomplete. The same command continues a killed repair.

    ``confirm`` is shown the plan if there is anything to do. ``look`` are arguments of :func:`check_cache`; entries
    of another recipe are reported and kept.
    """
    paths = CachePaths(cache)
    paths.current_snapshot()  # no lock is left in a folder that is no cache
    with builder_lock(paths.lock):
        report, check = check_cache(cache, depth or Depth(full=True), **look)
        work = _Work(check)
        plan = work.plan(report)
        return work.carry_out(plan) if plan.needed and confirm(plan) else plan


class _Work:
    """Entries to remove, and their removal."""

    def __init__(self, check: Check) -> None:
        self.check = check
        self.drop = {name: np.zeros(len(view), dtype=np.bool_) for name, view in check.views.items()}
        """(E,) by field: entries that are taken out, and those that are lost already."""
        self.removals = list[Removal]()

    def plan(self, report: VerifyReport) -> Repair:
        shards = set(self.check.damaged)
        for bad in sorted(self.check.bad, key=lambda bad_entries: bad_entries.reason == "lost"):
            view = self.check.views[bad.field]
            if bad.reason == "lost":
                self.drop[bad.field][bad.entries] = True
            else:
                self._remove(view, bad.entries, bad.reason)
                shards |= {self.check.snapshot.shards[number] for number in np.unique(view.shard[bad.entries])}
        return Repair(
            report=report,
            removals=tuple(self.removals),
            shards=tuple(sorted(shards)),
            needed=bool(shards or any(mask.any() for mask in self.drop.values())),
            snapshot=report.snapshot,
            complete=report.complete,
        )

    def _remove(self, view: View, entries: NDArray[np.integer], reason: str) -> None:
        """Take out entries that are not out already."""
        mask = self.drop[view.name]
        entries = np.unique(entries)
        entries = entries[~mask[entries]]
        mask[entries] = True
        names, samples = self.check.findings.table.names, view.sample[view.first_rows(entries)]
        for entry, sample in zip(entries.tolist(), samples.tolist(), strict=True):
            size, key = int(view.head[entry] + view.bytes[entry]), view.key[entry].tobytes().hex()
            self.removals.append(Removal(key, names[sample], reason, size))

    def carry_out(self, plan: Repair) -> Repair:
        """Take entries out of the indexes, then publish the snapshot without them."""
        check, paths = self.check, self.check.paths
        for shard in sorted(check.damaged):
            self._mend(shard)
        keys = np.array([bytes.fromhex(item.key) for item in self.removals], dtype="S32")
        for folder in paths.sealed_shards():  # a build takes an entry of this key from any shard
            with suppress(CacheDamagedError):
                remove_entries(folder, keys)
        failpoint("repair-delete")
        fields = [kept_rows(view.rows, ~self.drop[name][view.entry]) for name, view in check.views.items()]
        complete = plan.complete and not any(mask.any() for mask in self.drop.values())
        publish_replacement(paths, check.snapshot, fields, complete=complete)
        return replace(
            plan,
            done=True,
            snapshot=paths.current_snapshot(),
            complete=complete,
            removals=tuple(self.removals),
        )

    def _mend(self, shard: str) -> None:
        """Write the index of a shard again, and remove the entries that it lacks."""
        check, folder = self.check, self.check.paths.shard(shard)
        mend_index(folder)
        index = load_index(folder)
        for view in check.views.values():
            entries = view.in_shard(check.snapshot.shards.index(shard))
            if index.entries:
                entries = entries[~positions(index, view, entries)[1]]
            self._remove(view, entries, "not-intact")
