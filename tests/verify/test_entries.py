import os
import shutil
from functools import partial

import numpy as np
import pytest
from damaged import flip
from made_cache import DEPTHS, counts, make

from latentcache.errors import UsageError
from latentcache.store import gather
from latentcache.store.reader import EntryReader
from latentcache.verify import entries as entries_module
from latentcache.verify.entries import Check, Depth, confidence, parse_slice
from latentcache.verify.verify import check_cache, verify_cache


def shards(case):
    return [case.paths.shard(name) for name in case.snapshot.shards]


@DEPTHS
def test_a_shard_that_is_gone(case, depth):
    path = case.entry(2)[0]
    shutil.rmtree(path.parent)
    report = check_cache(case.cache, depth)[0]
    assert counts(report) == {"missing": 4, "ok": 4}
    assert {(finding.reason, finding.found) for finding in report.findings} == {("entry-lost", "its shard is gone")}
    assert {finding.file for finding in report.findings} == {f"shards/{path.parent.name}"}


@DEPTHS
def test_a_damaged_index_is_a_finding_of_its_shard_and_of_no_sample(case, depth):
    path = shards(case)[0] / "index.safetensors"
    path.chmod(0o644)
    path.write_bytes(b"[]")
    report = check_cache(case.cache, depth)[0]
    assert (report.counts["ok"], report.counts["corrupt"]) == (8, 1)
    (finding,) = report.findings
    assert (finding.reason, finding.path) == ("index", "")
    assert finding.file == f"shards/{path.parent.name}/index.safetensors"
    assert report.exit_code() == 1


@pytest.mark.parametrize("change", ["checksum", "head", "key", "offset"])
def test_an_index_that_disagrees_with_the_snapshot(case, change, monkeypatch):
    load = entries_module.checked_index

    def changed(folder, **more):
        index = load(folder, **more)
        if folder != shards(case)[0]:
            return index
        if change == "key":
            index.key = np.asarray(index.key) ^ 1
        else:
            setattr(index, change, np.asarray(getattr(index, change)) + 1)
        return index

    monkeypatch.setattr(entries_module, "checked_index", changed)
    report = verify_cache(case.cache)
    lost = change in ("key", "offset")
    assert counts(report) == {"missing" if lost else "corrupt": 4, "ok": 4}
    assert {finding.reason for finding in report.findings} == {"entry-lost" if lost else "header"}


def test_a_shard_that_may_not_be_read_is_unverifiable(case, monkeypatch):
    path, opened = case.entry(2)[0], entries_module.file_descriptor

    def denied(place):
        if place == path:
            raise PermissionError(13, "Permission denied")
        return opened(place)

    monkeypatch.setattr(entries_module, "file_descriptor", denied)
    report = verify_cache(case.cache, full=True)
    assert counts(report) == {"unverifiable": 4, "ok": 4}
    fix = f"chmod -R u+rX {case.cache}"
    assert {(finding.reason, finding.fix) for finding in report.findings} == {("permission", fix)}


def test_errors_of_the_disk_are_unverifiable(case, monkeypatch):
    shard = case.entry(0)[0]

    def failing(real, descriptor, *more):
        if os.path.samestat(os.fstat(descriptor), shard.stat()):
            raise OSError(5, "Input/output error")
        return real(descriptor, *more)

    monkeypatch.setattr(gather, "LIBRARY", None)
    for name in ("pread", "preadv"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
    report = verify_cache(case.cache, full=True)
    assert {(finding.category, finding.reason) for finding in report.findings} == {("unverifiable", "io-error")}
    assert counts(report) == {"unverifiable": 4, "ok": 4}


def test_entries_that_the_system_reads_in_parts(case, monkeypatch):
    """The system reads 2 GiB at most per call."""
    path, offset, _, _ = case.entry(2)
    flip(path, offset + 70)
    read, read_into = os.pread, os.preadv
    monkeypatch.setattr(gather, "LIBRARY", None)
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 100), at))
    monkeypatch.setattr(os, "preadv", lambda file, rooms, at: read_into(file, [memoryview(rooms[0])[:100]], at))
    found = counts(verify_cache(case.cache, full=True))
    assert found == {"corrupt": case.sharing(2), "ok": 8 - case.sharing(2)}
    reader = EntryReader(case.paths, case.snapshot)
    rows = np.flatnonzero(np.asarray(case.snapshot.fields[case.names[0]].entry) != case.entry(2)[3])
    assert all(reader.read(case.names[0], row).size for row in rows)


@pytest.mark.usefixtures("each_way")
def test_a_damaged_head_is_found_by_a_full_check(case):
    path, offset, _, entry = case.entry(2)
    head = int(case.snapshot.fields[case.names[0]].head[entry])
    flip(path, offset - head + 70)
    report = verify_cache(case.cache, full=True)
    assert counts(report)["corrupt"] == case.sharing(2)
    assert {finding.reason for finding in report.findings} == {"header"}


@pytest.mark.parametrize("text", ["", "0", "0/7", "8/7", "1/0", "5%", "300", "-1", "1/", "x", "1/7 "])
def test_anything_else_is_a_usage_error(text):
    with pytest.raises(UsageError, match="sample="):
        parse_slice(text)


def test_new_inputs_keep_entries_in_their_part(tmp_path):
    case = make(tmp_path, "flat", total=20)
    before = _parts(case)
    case.write(30)
    case.build()
    after = _parts(case)
    assert {key: part for key, part in after.items() if key in before} == before


def _parts(case):
    keys = np.asarray(case.snapshot.fields["flat"].key)
    return {
        keys[entry].tobytes(): part
        for part in range(1, 8)
        for entry in np.flatnonzero(Check(case.snapshot, Depth(slice=(part, 7))).entries["flat"])
    }


def test_the_bound_follows_the_rule_of_three():
    assert confidence(59, 10_000_000).endswith("less than 5 % of the samples are wrong")
    assert confidence(0, 10).endswith("less than 1e+02 % of the samples are wrong")
    assert confidence(4, 4) == "4 samples clean: all of them"
