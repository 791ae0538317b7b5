import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable
from latentcache.verify.findings import CATEGORIES, EACH, Commands, Finding, Findings, VerifyReport

KEYS = np.arange(320, dtype=np.uint64).view(np.uint8)[: 10 * 32].reshape(10, 32)


def table(count, *, records=False):
    names = Strings.of(f"t.jsonl:{n + 1}" if records else f"{n:03}.png" for n in range(count))
    files = Strings.of(["t.jsonl"]) if records else names
    file = np.zeros(count, np.int32) if records else np.arange(count, dtype=np.int32)
    line = np.arange(1, count + 1, dtype=np.uint32) if records else None
    record = Input(content=np.zeros((count, 16), np.uint8), file=file, line=line)
    stat = np.zeros((len(files), 6), np.uint64)
    return SampleTable(names=names, files=Files(names=files, stat=stat, content=np.zeros((len(files), 16), np.uint8)),
                       inputs={"record" if records else "image": record})  # fmt: skip


def every(count):
    return np.ones(count, dtype=np.bool_)


@given(st.lists(st.tuples(st.sampled_from(CATEGORIES[:-1]), st.lists(st.integers(0, 19), max_size=8)), max_size=12))
def test_categories_sum_to_the_samples(added):
    findings = Findings(table(20))
    for category, samples in added:
        findings.add(category, "reason", np.array(samples, dtype=np.int64))
    counts = findings.counts(every(20))
    assert sum(counts.values()) == 20
    worst = [min([CATEGORIES.index(c) for c, samples in added if n in samples], default=7) for n in range(20)]
    assert list(counts.values()) == [worst.count(rank) for rank in range(8)]
    assert sum(finding.count for finding in findings.result(every(20))) == 20 - counts["ok"]


def test_a_sample_has_one_item_per_worst_field():
    findings = Findings(table(1))
    findings.add("corrupt", "payload", np.array([0]), field="latents", keys=KEYS[:1])
    findings.add("corrupt", "header", np.array([0]), field="latents", keys=KEYS[1:2])
    findings.add("corrupt", "payload", np.array([0]), field="mask", keys=KEYS[2:3])
    shown = [(finding.field, finding.reason) for finding in findings.result(every(1))]
    assert shown == [("latents", "payload"), ("mask", "payload")]


def test_a_cause_that_hits_many_samples_is_one_item():
    findings = Findings(table(EACH + 1, records=True))
    findings.add("touched", "stat-changed", np.arange(EACH + 1), found="touched")
    (finding,) = findings.result(every(EACH + 1))
    assert (finding.count, finding.path, finding.line, finding.found) == (EACH + 1, "t.jsonl", 0, "touched")
    assert finding.names[:2] == ("t.jsonl:1", "t.jsonl:2")
    assert len(finding.names) == 10
    assert finding.as_json()["count"] == EACH + 1
    findings = Findings(table(EACH + 1))  # only the attributes that all samples share
    findings.add("corrupt", "payload", np.arange(EACH + 1), file="shards/x", found=str, expected="so", hint="hint")
    (finding,) = findings.result(every(EACH + 1))
    assert (finding.file, finding.key, finding.hint) == ("shards/x", "", "hint")
    assert (finding.expected, finding.found) == ("so", "")


def test_a_million_findings_create_no_objects():
    count = 1_000_000
    files = table(1, records=True).files
    line = np.ones(count, np.uint32)
    record = Input(content=np.zeros((0, 16), np.uint8), file=np.zeros(count, np.int32), line=line)
    names = Strings(np.zeros(count, np.uint8) + 97, np.arange(1, count + 1))
    findings = Findings(SampleTable(names=names, files=files, inputs={"record": record}))
    tracemalloc.start()
    findings.add("touched", "stat-changed", np.arange(count), found=lambda number: f"text {number}")
    (finding,) = findings.result(every(count))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert finding.count == count
    assert peak < 80 * count


def test_unchecked_samples_count_only_with_problems():
    findings, looked = Findings(table(4)), np.array([True, False, False, False])
    findings.add("touched", "stat-changed", np.array([1]))
    findings.add("corrupt", "payload", np.array([2]))
    counts = findings.counts(looked)
    assert {name: number for name, number in counts.items() if number} == {"corrupt": 1, "ok": 1}
    assert [finding.category for finding in findings.result(looked)] == ["corrupt"]


def test_names_that_are_not_utf8_travel_as_bytes_too():
    item = Finding(category="stale", reason="x", path="b\udcff.png", names=("b\udcff.png",), count=2).as_json()
    assert item["path"] == "b\ufffd.png"
    assert item["path_b64"] == "Yv8ucG5n"
    assert item["names"] == ["b\ufffd.png"]


@pytest.mark.parametrize(
    ("counts", "code"),
    [({}, 0), ({"touched": 3}, 0), ({"quarantined": 1}, 0), ({"quarantined": 2}, 1), ({"stale": 1}, 1),
     ({"missing": 1}, 1), ({"corrupt": 1}, 1), ({"unverifiable": 1}, 1), ({"drift": 1}, 1), ({"unreferenced": 9}, 0)],
)  # fmt: skip
def test_exit_codes(counts, code):
    every_one = dict.fromkeys([*CATEGORIES, "unreferenced"], 0)
    report = VerifyReport(mode="fast", snapshot=1, counts=every_one | counts, findings=(), samples=9)
    assert report.exit_code(1) == code
    assert replace(report, counts=every_one).as_json()["items"] == []


BUILD = "latentcache build '/d a' --out /c --allow-failed 2% --field m:K --model M --device cpu"
AGAIN = "latentcache verify /c --reencode 9 --field m:K --model M --device cpu"
REPAIR = "latentcache verify /c --data x --field m:K --repair --yes"


@pytest.mark.parametrize(
    ("category", "reason", "data", "expected"),
    [
        ("stale", "source-changed", "", BUILD),
        ("missing", "not-built", "", BUILD),
        ("corrupt", "payload", "--data x", f"{REPAIR}; {BUILD}"),
        ("unverifiable", "permission", "", "chmod -R u+rX '/d a'"),
        ("unverifiable", "io-error", "", "latentcache verify /c --field m:K"),
        ("unverifiable", "not-encoded", "", AGAIN),
        ("drift", "x", "", f"{AGAIN} --repair --yes; {BUILD}"),
        ("touched", "stat-changed", "", ""),
        ("quarantined", "empty", "", ""),
    ],
)
def test_every_category_has_the_command_that_mends_it(category, reason, data, expected):
    words = {"common": "--field m:K", "recipe": "--model M", "run": "--device cpu", "allow_failed": "2%"}
    fixes = Commands(**words, cache=Path("/c"), root=Path("/d a"), data=data, reencode="--reencode 9")
    assert fixes(Finding(category=category, reason=reason)).fix == expected
