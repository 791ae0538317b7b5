"""``verify_cache``: is this cache still true? Reads the cache and its sources, changes neither.

``fast`` reads manifest, columns and shard indexes, and stats every source, hashing those whose stat differs. ``full``
reads every payload and every source as well; ``sample`` does so for a part. None of them needs a model; only encoding
again does, and the caller brings the encoder. The same checks run for every kind of field.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError, LatentcacheError
from latentcache.fields.protocol import FieldRecipe
from latentcache.store.columns import ColumnFile
from latentcache.store.garbage import shard_use
from latentcache.store.lease import open_leased
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import COLUMNS, Snapshot, open_snapshot
from latentcache.verify import sandbox
from latentcache.verify.drift import Reencode, reencode_samples
from latentcache.verify.entries import Store, View, check_entries
from latentcache.verify.findings import PROBLEMS, Findings, RecipeChange, Reencoded, VerifyReport
from latentcache.verify.fixes import Commands, Fixes
from latentcache.verify.payloads import Scanned, scan_payloads
from latentcache.verify.selection import Chosen, Deadline, Depth, choose, confidence
from latentcache.verify.sources import (
    SamePixels,
    SourcesChecked,
    check_plans,
    check_recipes,
    check_sources,
    find_data,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requested:
    """Recipes that a trainer is about to ask for."""

    recipes: Mapping[str, FieldRecipe] = field(default_factory=dict)
    """Field -> recipe, of the fields that options were given for."""
    compared: frozenset[str] = frozenset()
    """Fields whose encoder was looked at; the others are named in ``not_compared``."""


#: Makes the recipes of the options once the snapshot is open.
RequestedBy = Callable[[Snapshot], Requested]


def verify_cache(
    cache: Path,
    *,
    data: Path | None = None,
    requested: RequestedBy | None = None,
    depth: Depth | None = None,
    reencode: Reencode | None = None,
    same_image: SamePixels | None = None,
    commands: Commands | None = None,
) -> VerifyReport:
    """Check a cache against its sources and against itself.

    Args:
        cache: The cache folder.
        data: The data, if it is not at the recorded place.
        requested: Gives the recipes to compare with; every sample is stale if its recipe differs.
        depth: How much to look at.
        reencode: Encodes the samples that ``depth.reencode`` asks for.
        same_image: Tells a metadata edit from a change of pixels.
        commands: Words for the printed commands.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged, so nothing can be said of single samples.
        SourceError: The data is gone, or a table or record file in it cannot be read.
        EncoderError: The model that is to encode again is not at hand, or cannot be used.
        DeviceError: Its device failed, or does not exist.
    """
    depth, commands = depth or Depth(), commands or Commands()
    if depth.untrusted:
        return sandbox.verify_untrusted(cache, data=data, depth=depth, commands=commands)
    check = Check(cache=cache, depth=depth, commands=commands)
    return check.run(data=data, requested=requested, reencode=reencode, same_image=same_image)


@dataclass(slots=True, kw_only=True)
class Check:
    """One check; :func:`verify_cache` and a repair run it."""

    cache: Path
    depth: Depth
    commands: Commands
    use_data: bool = True
    """False: the data is not looked for unless it was named (a cache that is not trusted)."""
    store: Store = field(init=False)
    """What was checked, and the damage that was found; set by :meth:`run`."""

    def run(
        self,
        *,
        data: Path | None,
        requested: RequestedBy | None = None,
        reencode: Reencode | None = None,
        same_image: SamePixels | None = None,
    ) -> VerifyReport:
        """Check, and report. Arguments and errors as :func:`verify_cache`."""
        started, deadline = time.monotonic(), Deadline(self.depth.max_duration_s)
        snapshot = open_checked(self.cache)
        columns = ColumnFile(snapshot.paths.snapshot(snapshot.number) / COLUMNS)
        for name in columns:
            columns[name].check()
        asked = Requested() if requested is None else requested(snapshot)
        root = find_data(self.cache, snapshot, data) if self.use_data or data is not None else None
        views = {name: View(rows, len(snapshot.samples)) for name, rows in snapshot.fields.items()}
        store = Store(
            paths=CachePaths(self.cache), snapshot=snapshot, findings=Findings(snapshot.samples), views=views
        )
        self.store = store
        chosen = choose(snapshot, self.depth.selection)
        part = None if chosen.everything else chosen.samples
        with ThreadPoolExecutor(1) as pool:  # reading files and reading shards wait for different things
            reading = None
            if root is not None:
                reading = pool.submit(
                    check_sources,
                    store,
                    root,
                    full=self.depth.reads,
                    chosen=part,
                    over=deadline.over,
                    same_image=same_image,
                )
            check_entries(store, chosen.entries)
            check_plans(store, chosen.samples)
            scanned = scan_payloads(store, chosen.entries, deadline.over) if self.depth.reads else None
            sources = reading.result() if reading else SourcesChecked(looked=np.ones(len(snapshot.samples), np.bool_))
        sources.apply()
        looked = _looked(store, chosen, scanned, sources)
        changes = check_recipes(store, asked.recipes)
        again = None
        if reencode is not None and root is not None:
            fine = looked & ~store.findings.of(*PROBLEMS)
            again = reencode_samples(store, reencode, root, fine, self.depth.reencode, self.depth.seed, deadline.over)
        return self._report(
            root,
            data is not None,
            asked,
            chosen,
            looked,
            scanned,
            sources,
            changes,
            again,
            time.monotonic() - started,
        )

    def _report(
        self,
        root: Path | None,
        named: bool,
        asked: Requested,
        chosen: Chosen,
        looked: NDArray[np.bool_],
        scanned: Scanned | None,
        sources: SourcesChecked,
        changes: tuple[RecipeChange, ...],
        again: Reencoded | None,
        elapsed_s: float,
    ) -> VerifyReport:
        store, snapshot, depth = self.store, self.store.snapshot, self.depth
        fixes = Fixes(
            commands=self.commands,
            cache=self.cache,
            root=root,
            named_data=named,
            allow_failed=snapshot.allow_failed,
            reencode=f"--reencode {depth.reencode} --seed {depth.seed}",
        )
        counts = store.findings.counts(looked)
        found = store.findings.result(looked)
        in_category = looked | store.findings.of(*PROBLEMS)
        clean = not any(counts[name] for name in PROBLEMS)
        kinds = {view.name: view.rows.kind for view in store.views.values()}
        not_compared = [
            kind.encoder for name, kind in kinds.items() if kind is not None and name not in asked.compared
        ]
        outside = {(one.name, one.line) for one in snapshot.rejected} - _present(store)
        return VerifyReport(
            mode=depth.mode,
            snapshot=snapshot.number,
            counts=counts | {"unreferenced": _unreferenced(store.paths, snapshot)},
            findings=tuple(fixes(finding) for finding in found),
            samples=len(snapshot.samples) + len(outside),
            checked={
                "samples": int(in_category.sum()),
                "headers": store.headers,
                "payloads": 0 if scanned is None else scanned.payloads,
                "payload_bytes": 0 if scanned is None else scanned.payload_bytes,
                "sources_stat": sources.checked,
                "sources_hashed": sources.hashed,
                "reencoded": 0 if again is None else again.samples,
            },
            not_looked_at=int((~in_category).sum()),
            not_compared=() if again is not None else tuple(dict.fromkeys(not_compared)),
            recipe_diff=changes,
            confidence=_stated(store, depth, chosen, looked, scanned) if clean else "",
            reencoded=again,
            recipe_ids={name: view.rows.recipe_id.hex() for name, view in store.views.items()},
            allow_failed=snapshot.allow_failed,
            part=snapshot.part,
            building=store.paths.building.exists(),
            complete=snapshot.complete,
            elapsed_s=elapsed_s,
        )


def open_checked(cache: Path) -> Snapshot:
    """The current snapshot, with a lease; damage to it comes with a way out: a build does not get past it either.

    Raises:
        CacheNotFoundError: No cache there, or no finished build in it.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: The manifest or a column is damaged.
    """
    try:
        return open_leased(cache)
    except CacheDamagedError as error:
        if error.fix == error.default_fix:
            current = shlex.quote(str(cache / "CURRENT"))
            error.fix = f"rm {current}, then the `latentcache build` command that made the cache: entries are kept"
        raise


def _looked(store: Store, chosen: Chosen, scanned: Scanned | None, sources: SourcesChecked) -> NDArray[np.bool_]:
    """(S,) samples of which all is known that was asked for."""
    looked = chosen.samples & sources.looked
    if scanned is not None:
        for name, view in store.views.items():
            unread = ~scanned.read[name]
            looked[view.sample[unread[view.entry]]] = False
    return looked


def _present(store: Store) -> set[tuple[str, int]]:
    """File and line of rejected inputs that are samples all the same: rejected by one of several fields."""
    wanted = {(one.name, one.line) for one in store.snapshot.rejected if one.target}
    if not wanted:
        return set()
    names = {f"{name}:{line}" if line else name: (name, line) for name, line in wanted}
    return {names[name] for name in store.findings.table.names if name in names}


def _unreferenced(paths: CachePaths, snapshot: Snapshot) -> int:
    """Entries in sealed shards that no snapshot on disk needs."""
    snapshots = [snapshot]
    with suppress(LatentcacheError):
        for number in paths.snapshots():
            if number != snapshot.number:
                with suppress(LatentcacheError):
                    snapshots.append(open_snapshot(paths.root, number))
        return sum(max(use.entries - use.needed, 0) for use in shard_use(paths, snapshots))
    return 0


def _stated(store: Store, depth: Depth, chosen: Chosen, looked: NDArray[np.bool_], scanned: Scanned | None) -> str:
    """What samples that are all clean say of the others; empty if nothing follows.

    A time limit leaves the front of the shards, which is no random draw.
    """
    drawn = depth.selection is not None or depth.max_duration_s is not None
    if scanned is None or not drawn or not looked.any():
        return ""
    if looked.all():
        return confidence(len(looked), len(looked))
    if chosen.everything or (chosen.samples & ~looked).any():
        return ""
    if chosen.unit == "entries":
        return confidence(
            sum(int(entries.sum()) for entries in chosen.entries.values()),
            sum(map(len, store.views.values())),
            "entries",
        )
    return confidence(int(looked.sum()), len(looked))
