"""The whole of verify for the kinds of this package and a kind from outside, on caches that a build made."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from small_cache import draw

from latentcache.fields import registry
from latentcache.fields.input_ids import InputIdsSettings
from latentcache.fields.latents import LatentsSettings
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.reencode import Reencode
from latentcache.pipeline.settings import BuildSettings
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot
from latentcache.verify.collect import collect
from latentcache.verify.repair import repair_cache
from latentcache.verify.selection import Depth, parse_selection
from latentcache.verify.verify import verify_cache

SETTINGS = {
    "latents": LatentsSettings(model="stub", resolutions=(64,), bucket_step=8),
    "input_ids": InputIdsSettings(tokenizer="stub"),
    "edge_map": None,
}
FULL = Depth(full=True)


@dataclass
class Real:
    field: str
    data: Path
    cache: Path

    def write(self, number: int, text: str = "input") -> None:
        if self.field != "input_ids":
            draw(self.data / f"{number}.png", (96, 64), seed=hash(text) % 1000 + number)
            return
        path = self.data / "t.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        lines += [""] * (number + 1 - len(lines))
        lines[number] = json.dumps({"text": f"{text} {number} " * 40})
        path.write_text("\n".join(lines) + "\n")

    def build(self) -> tuple[int, int]:
        settings = SETTINGS[self.field]
        chosen = settings if settings is not None else registry.field_kind(self.field).settings()
        done = build_cache(BuildSettings(data=self.data, out=self.cache, fields={self.field: chosen}))
        return done.encoded, done.cached

    def damage(self, number: int) -> int:
        """Flip a bit of the payload that holds a sample; how many samples share it."""
        snapshot = open_snapshot(self.cache)
        rows = snapshot.fields[self.field]
        entries = np.asarray(rows.entry)
        entry = int(entries[np.flatnonzero(np.asarray(rows.sample) == number)[0]])
        path = CachePaths(self.cache).data(snapshot.shards[int(rows.shard[entry])])
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.seek(int(rows.offset[entry]) + 1)
            byte = file.read(1)[0]
            file.seek(int(rows.offset[entry]) + 1)
            file.write(bytes([byte ^ 1]))
        return len(np.unique(np.asarray(rows.sample)[entries == entry]))


def counts(real, depth=FULL, **more):
    report = verify_cache(real.cache, depth=depth, **more)
    return {name: number for name, number in report.counts.items() if number and name != "unreferenced"}


@pytest.fixture(params=list(SETTINGS))
def real(request, tmp_path, monkeypatch):
    if request.param == "edge_map":
        monkeypatch.setenv(registry.VARIABLE, "tests.fields.edge_map:EdgeMap")
        monkeypatch.syspath_prepend(Path(__file__).parents[2])
        registry.field_kinds.cache_clear()
    real = Real(field=request.param, data=tmp_path / "data", cache=tmp_path / "cache")
    real.data.mkdir()
    for number in range(6):
        real.write(number)
    assert real.build() == (6, 0)
    yield real
    monkeypatch.undo()
    registry.field_kinds.cache_clear()


def test_a_build_is_fine_and_stays_fine(real):
    assert counts(real, Depth()) == counts(real) == {"ok": 6}
    assert counts(real, Depth(selection=parse_selection("3"))) == {"ok": 3}
    assert real.build() == (0, 6)


def test_damage_is_found_repaired_and_built_again(real):
    shared = real.damage(2)
    assert counts(real) == {"corrupt": shared} | ({"ok": 6 - shared} if shared < 6 else {})
    assert repair_cache(real.cache, confirm=lambda plan: True).done
    assert counts(real)["missing"] == shared
    assert real.build() == (shared, 6 - shared)
    assert counts(real) == {"ok": 6}


def test_a_shard_that_is_gone_is_built_again(real):
    for name in open_snapshot(real.cache).shards:
        shutil.rmtree(CachePaths(real.cache).shard(name))
    assert counts(real, Depth()) == {"missing": 6}
    real.build()
    assert counts(real) == {"ok": 6}


def test_changed_inputs_are_stale_and_their_old_entries_are_collected(real):
    for number in range(4):
        real.write(number, "other")
    assert counts(real, Depth()) == counts(real) == {"stale": 4, "ok": 2}
    assert real.build() == (4, 2)
    assert counts(real) == {"ok": 6}
    collect(real.cache, apply=True, keep=1, grace_s=0)
    collect(real.cache, apply=True, keep=1, grace_s=0)
    assert verify_cache(real.cache).counts["unreferenced"] == 0
    assert counts(real) == {"ok": 6}
    assert real.build() == (0, 6)


def test_encoded_again_it_is_the_same(real):
    report = verify_cache(real.cache, depth=Depth(reencode=4), reencode=Reencode(device="cpu"))
    assert (report.exit_code(), report.reencoded.samples, report.reencoded.drifted) == (0, 4, 0)


def test_a_rejected_input_stays_quarantined_until_it_changes(real):
    if real.field == "input_ids":
        with (real.data / "t.jsonl").open("a") as file:
            file.write("{not json\n")
    else:
        (real.data / "bad.png").write_bytes(b"<html>")
    real.build()
    for depth in (Depth(), FULL):
        report = verify_cache(real.cache, depth=depth)
        assert (report.counts["quarantined"], report.counts["ok"], report.samples) == (1, 6, 7)
        assert (report.exit_code(1), report.exit_code(0)) == (0, 1)
