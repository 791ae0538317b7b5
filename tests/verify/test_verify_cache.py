import os
import shutil
import subprocess

import numpy as np
import pytest
from made_cache import DEPTHS, FULL, counts, make

from latentcache.errors import SourceNotFoundError
from latentcache.store.lock import builder_lock
from latentcache.verify.entries import Depth
from latentcache.verify.verify import check_cache, verify_cache


def check(case, depth=FULL, **more):
    report = check_cache(case.cache, depth, **more)[0]
    assert sum(report.counts.values()) - report.counts["unreferenced"] >= case.total
    return report


def state(folder):
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@DEPTHS
def test_an_intact_cache_is_ok(case, depth):
    report = check(case, depth)
    assert counts(report) == {"ok": 8}
    assert (report.exit_code(), report.findings, report.snapshot, report.samples) == (0, (), 1, 8)
    assert (report.checked["payloads"] > 0) == depth.full
    assert report.checked["headers"] == len(case.snapshot.fields[case.names[0]].key)


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
def test_damage_in_a_payload_is_found_by_a_full_check_for_every_sample_of_the_entry(case):
    case.damage(2)
    assert counts(check(case, Depth())) == {"ok": 8}
    report = check(case)
    shared = case.sharing(2)
    assert counts(report) == {"corrupt": shared} | ({"ok": 8 - shared} if shared < 8 else {})
    one = next(one for one in report.findings if one.path.startswith("002") or one.line == 3)
    assert (one.category, one.reason, one.field) == ("corrupt", "payload", case.names[0])
    assert one.file.startswith("shards/")
    assert "checksum: expected" in one.found
    rows = case.snapshot.fields[case.names[0]]
    assert one.key == rows.row_keys(np.array([2])).tobytes().hex()
    assert report.exit_code() == 1


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
    assert [(one.category, one.reason, one.found) for one in report.findings] == [
        ("corrupt", "values", "it has values that are not finite")
    ]


@DEPTHS
def test_changed_gone_and_new_inputs(case, depth):
    names = [case.write(1, "other"), case.write(8), case.write(9)]
    case.remove(4)
    report = check(case, depth)
    found = counts(report)
    assert found.pop("touched", 0) == (3 if case.of_records else 0)  # records after the removed one moved up a line
    assert found == {"stale": 2, "missing": 2, "ok": 3 if case.of_records else 6}
    found = {(one.reason, one.path if not one.line else f"{one.path}:{one.line}") for one in report.findings}
    lost = "t.jsonl:5" if case.of_records else "004.png"
    if not case.of_records:
        assert found == {("source-changed", names[0]), ("source-removed", lost), ("not-built", names[1]),
                         ("not-built", names[2])}  # fmt: skip
    mended = [one for one in report.findings if one.category != "touched"]
    assert all("latentcache build" in one.fix and str(case.data) in one.fix for one in mended)
    made, _ = case.build()
    assert made == 3
    assert counts(check(case, depth)) == {"ok": 9}


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


def test_a_sample_has_the_worst_state_of_its_fields(tmp_path):
    case = make(tmp_path, "flat", "lines")
    case.damage(1, "lines")
    case.damage(2, "flat")
    case.damage(3, "flat")
    case.damage(3, "lines")
    case.write(1, "other")
    case.write(4, "other")
    report = check(case)
    assert counts(report) == {"corrupt": 3, "stale": 1, "ok": 4}
    assert sorted((one.path, one.field) for one in report.findings if one.category == "corrupt") == [
        ("001.png", "lines"), ("002.png", "flat"), ("003.png", "flat"), ("003.png", "lines")
    ]  # fmt: skip


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
