import os
import shutil
import subprocess

import numpy as np
import pytest
from made_cache import DEPTHS, FULL, counts, make

from latentcache.errors import CacheLockedError, SourceNotFoundError
from latentcache.store.lock import builder_lock
from latentcache.store.shard import load_index, mend_index
from latentcache.verify.verify import check_cache, repair_cache, verify_cache


def check(case, depth=FULL, **more):
    report = check_cache(case.cache, depth, **more)[0]
    assert sum(report.counts.values()) - report.counts["unreferenced"] >= case.total
    return report


def state(folder):
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@DEPTHS
def test_verify_works_on_a_read_only_cache_beside_a_build(case, depth):
    case.paths.building.write_text("{}")
    before = state(case.cache), state(case.data)
    with builder_lock(case.paths.lock):
        names = {name for name in state(case.cache) if name not in before[0]}
        subprocess.run(["chmod", "-R", "a-w", case.cache], check=True)
        assert check(case, depth).building
        subprocess.run(["chmod", "-R", "u+w", case.cache], check=True)
    after = {name: found for name, found in state(case.cache).items() if name not in names}
    assert (after, state(case.data)) == before


@pytest.mark.usefixtures("each_way")
def test_values_that_the_kind_does_not_accept_are_corrupt_though_their_checksum_is_right(tmp_path, monkeypatch):
    import made_cache

    made = made_cache.Flat.encode
    bad = []

    def encode(self, content, recipe):
        array = made(self, content, recipe)
        if not bad:
            bad.append(content)
            array[3] = np.nan
        return array

    monkeypatch.setattr(made_cache.Flat, "encode", encode)
    case = make(tmp_path, "flat")
    report = check(case)
    assert [(finding.category, finding.reason, finding.found) for finding in report.findings] == [
        ("corrupt", "values", "it has values that are not finite")
    ]


@DEPTHS
def test_restored_size_and_time_hide_no_change(tmp_path, depth):
    case = make(tmp_path, "flat")
    path = case.data / "002.png"
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert counts(check(case, depth)) == {"stale": 1, "ok": 7}


def _swapped(case):
    case.put_records([{"text": f"other {n}"} for n in range(8)], "u.jsonl")
    case.build()
    for old, new in (("u", "v"), ("t", "u"), ("v", "t")):
        (case.data / f"{old}.jsonl").rename(case.data / f"{new}.jsonl")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda case: case.put_records(case.records(), "u.jsonl"), {"missing": 8, "ok": 8}),
        (lambda case: (case.data / "t.jsonl").rename(case.data / "u.jsonl"), {"stale": 8, "missing": 8}),
        (_swapped, {"stale": 16}),
    ],
)
def test_records_are_compared_by_file_and_place_not_as_a_set_of_contents(tmp_path, change, expected):
    case = make(tmp_path, "texts")
    change(case)
    report = check(case)
    assert {name: number for name, number in counts(report).items() if name != "unreferenced"} == expected
    assert report.exit_code() == 1


def test_data_that_moved_with_its_cache_is_found_and_data_that_is_gone_is_named(case, tmp_path):
    place = tmp_path / "elsewhere"
    place.mkdir()
    shutil.move(case.data, place / "data")
    with pytest.raises(SourceNotFoundError) as caught:
        verify_cache(case.cache)
    assert "--data DATA" in caught.value.fix
    assert counts(verify_cache(case.cache, data=place / "data")).keys() <= {"touched", "ok"}
    shutil.move(case.cache, place / "cache")
    assert verify_cache(place / "cache").exit_code() == 0


def test_unreferenced_entries_are_counted_and_never_a_finding(tmp_path):
    case = make(tmp_path, "flat")
    for snapshot in (2, 3):
        case.write(snapshot, f"other {snapshot}")
        case.build()
    shutil.rmtree(case.paths.snapshot(1))
    report = check(case)
    assert (report.counts["unreferenced"], report.findings, report.exit_code()) == (1, (), 0)
    (case.cache / "shards" / "0123").mkdir()
    assert check(case).exit_code() == 0


# repair


def repair(case):
    return repair_cache(case.cache, confirm=lambda plan: True)


def test_nothing_to_repair_changes_nothing(case):
    before = state(case.cache)
    report = repair(case)
    assert (report.needed, report.done, report.complete) == (False, False, True)
    after = state(case.cache)
    assert {name for name in after if after[name] != before.get(name)} <= {str(case.paths.lock)}


def test_a_repair_removes_every_entry_of_a_damaged_key(tmp_path):
    """Otherwise the next build would reuse the entry of another shard."""
    case = make(tmp_path, "flat", total=3)
    case.damage(0)
    data = case.entry(0)[0]
    shutil.copytree(data.parent, case.paths.shard("copy"))
    assert mend_index(case.paths.shard("copy"))
    before = load_index(case.paths.shard("copy")).entries
    assert len(repair(case).removals) == 1
    assert load_index(case.paths.shard("copy")).entries == before - 1
    assert case.build() == (1, 2)
    report = check(case)
    assert (report.counts["ok"], report.findings) == (3, ())


def test_a_running_build_is_not_repaired(case):
    with builder_lock(case.paths.lock), pytest.raises(CacheLockedError):
        repair(case)
