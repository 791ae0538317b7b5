"""A snapshot compared with DATA: each sample has one state, and all of DATA is compared."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.fields.table import Rejected
from latentcache.sources import known
from latentcache.sources.causes import fault
from latentcache.sources.options import SourceOptions
from latentcache.sources.scan import scan
from latentcache.verify.compare import compare
from latentcache.verify.findings import Findings

IMAGES, RECORDS = SourceOptions(kind="images"), SourceOptions(kind="records")
OK, TOUCHED, MOVED, NOT_CHECKED = "ok", "stat-changed", "line-changed", "not looked at"
CAPTION, CHANGED, REMOVED = "caption-changed", "source-changed", "source-removed"


@pytest.fixture(autouse=True)
def _trusting(monkeypatch):
    monkeypatch.setattr(known, "RACY_NS", 0)  # trust every file at once


def compared(before, now, *, chosen=None):
    """Compare, and give the findings with the samples that were looked at."""
    result = Findings(before.samples)
    looked = np.ones(len(before.samples), dtype=np.bool_) if chosen is None else chosen
    compare(result, now, rejected=before.rejected, chosen=looked)
    return result, looked


def on_samples(result, looked):
    """The findings on samples, by their names."""
    items = [item for item in result.result(looked) if not any(item is other for other in result.others)]
    return {f"{item.path}:{item.line}" if item.line else item.path: item for item in items}


def states(result, looked):
    by_name, names = on_samples(result, looked), list(result.table.names)
    reasons = {name: by_name[name].reason if name in by_name else OK for name in names}
    return {name: reasons[name] if seen else NOT_CHECKED for name, seen in zip(names, looked, strict=True)}


def new(result, _):
    return [f"{item.path}:{item.line}" for item in result.others if item.reason == "not-built"]


def others(result, _):
    items = [item for item in result.others if item.reason != "not-built"]
    return sorted((item.category, item.reason, item.path, item.line) for item in items)


# images


@pytest.fixture
def data(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    for name in "abcd":
        (root / f"{name}.jpg").write_text(name)
        (root / f"{name}.txt").write_text(f"caption {name}")
    return root


def images(root, before=None, *, full=False, **options):
    before = before or scan(root, IMAGES, hash_all=True)
    now = scan(root, IMAGES, before.samples, full=full, rejected=before.rejected, **options)
    return compared(before, now, **options)


TABLE = "file_name,text\nb.jpg,x\n"


@pytest.mark.parametrize(
    ("change", "state", "reason"),
    [
        (lambda path: path.unlink(), REMOVED, "source-removed"),
        (lambda path: (path.unlink(), os.mkfifo(path)), CHANGED, "source-changed"),
        (lambda path: (path.unlink(), path.mkdir()), REMOVED, "source-removed"),
        (lambda path: (path.unlink(), path.symlink_to("nowhere.jpg")), REMOVED, "source-removed"),
        (lambda path: path.write_text(""), CHANGED, "source-changed"),
        (lambda path: path.with_suffix(".txt").write_bytes(b"\xff"), CAPTION, "caption-changed"),
        (lambda path: path.with_suffix(".txt").unlink(), CAPTION, "caption-changed"),
        (lambda path: (path.parent / "metadata.csv").write_text(TABLE), REMOVED, "source-removed"),
    ],
)
def test_states_of_one_changed_file(data, change, state, reason):
    before = scan(data, IMAGES, hash_all=True)
    change(data / "a.jpg")
    result = images(data, before)
    item = on_samples(*result)["a.jpg"]
    assert (states(*result)["a.jpg"], item.reason, item.category) == (state, reason, "stale")
    assert item.expected
    assert item.found


def test_a_read_error_is_unverifiable(data, monkeypatch):
    before = scan(data, IMAGES, hash_all=True)
    os.utime(data / "a.jpg", (1, 1))

    def fail(root, place):
        raise fault("io-error", "the disk is on fire", root)

    monkeypatch.setattr("latentcache.sources.known.read_image", fail)
    item = on_samples(*images(data, before))["a.jpg"]
    assert (item.category, item.reason, item.found) == ("unverifiable", "io-error", "the disk is on fire")


def test_only_chosen_samples(data):
    before = scan(data, IMAGES, hash_all=True)
    (data / "a.jpg").write_text("z")
    (data / "b.jpg").write_text("z")
    result = images(data, before, full=True, chosen=np.array([True, False, True, False]))
    assert list(states(*result).values()) == [CHANGED, NOT_CHECKED, OK, NOT_CHECKED]


def built(root: Path, *out: str, **more: object):
    """A snapshot that rejects some images by content."""
    before = scan(root, IMAGES, hash_all=True)
    table, names = before.samples, list(before.samples.names)
    rows = np.array([row for row, name in enumerate(names) if name not in out])
    items = []
    for name in out:
        file = int(table.inputs["image"].file[names.index(name)])
        stat = tuple(table.files.stat[file].tolist())
        content = table.files.content[file].tobytes().rstrip(b"\0")
        items.append(Rejected(name=name, reason="truncated" if content else "empty", content=content, stat=stat))
    inputs = {
        name: replace(
            held, content=held.content[rows], file=held.file[rows], text=held.text and held.text.select(rows)
        )
        for name, held in table.inputs.items()
    }
    left = replace(table, names=table.names.select(rows), inputs=inputs, columns={})
    return replace(before, samples=left, rejected=(*before.rejected, *items))


@pytest.mark.parametrize("full", [False, True])
def test_a_rejected_image_stays_quarantined_until_its_bytes_change(data, full):
    (data / "x.jpg").symlink_to("nowhere.jpg")
    (data / "y.jpg").write_text("")
    (data / "z.jpg").write_text("z")
    (data / "z.txt").write_bytes(b"\xff")
    before = built(data, "a.jpg", "b.jpg", "c.jpg", "y.jpg")
    result = images(data, before, full=full)
    assert others(*result) == [
        ("quarantined", "caption-encoding", "z.jpg", 0),
        ("quarantined", "empty", "y.jpg", 0),
        ("quarantined", "not-found", "x.jpg", 0),
        *[("quarantined", "truncated", f"{name}.jpg", 0) for name in "abc"],
    ]
    assert (states(*result), new(*result)) == ({"d.jpg": OK}, [])
    (data / "a.jpg").write_text("mended")
    (data / "b.jpg").unlink()
    os.utime(data / "c.jpg", (1, 1))
    (data / "x.jpg").unlink()
    (data / "z.txt").write_text("mended")
    assert others(*images(data, before, full=full)) == [
        ("quarantined", "empty", "y.jpg", 0),
        ("quarantined", "truncated", "c.jpg", 0),
        ("stale", "caption-changed", "z.jpg", 0),
        ("stale", "source-changed", "a.jpg", 0),
    ]


# records


def write(path, *texts):
    path.write_text("".join(f'{{"text": {json.dumps(one)}}}\n' if one != "{" else "{bad\n" for one in texts))


def records(data, before):
    return compared(before, scan(data, RECORDS, before.samples, rejected=before.rejected))


def test_states_of_records(tmp_path):
    write(tmp_path / "a.jsonl", "one", "two", "three", "four")
    write(tmp_path / "b.jsonl", "five")
    write(tmp_path / "c.jsonl", "six", "seven")
    before = scan(tmp_path)
    assert set(states(*records(tmp_path, before)).values()) == {OK}
    write(tmp_path / "a.jsonl", "one", "2", "four")
    (tmp_path / "b.jsonl").rename(tmp_path / "bb.jsonl")
    os.utime(tmp_path / "c.jsonl", (1, 1))
    result = records(tmp_path, before)
    of_a = {"a.jsonl:1": OK, "a.jsonl:2": CHANGED, "a.jsonl:3": REMOVED, "a.jsonl:4": MOVED}
    assert states(*result) == of_a | {"b.jsonl:1": REMOVED, "c.jsonl:1": TOUCHED, "c.jsonl:2": TOUCHED}
    assert new(*result) == ["bb.jsonl:1"]
    changed, removed, moved = (on_samples(*result)[f"a.jsonl:{line}"] for line in (2, 3, 4))
    assert (changed.path, changed.line, changed.reason) == ("a.jsonl", 2, "source-changed")
    assert (len(changed.expected), len(changed.found)) == (8, 8)
    assert removed.found == "its record is gone"
    of_moved = (moved.category, moved.reason, moved.expected, moved.found)
    assert of_moved == ("touched", "line-changed", "line 4", "line 3")


def test_rejected_records(tmp_path):
    write(tmp_path / "a.jsonl", "one", "{", "bad", "bad", "also bad", "{")
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe")
    before = scan(tmp_path)
    held, table = before.samples.inputs["record"], before.samples
    made = [
        Rejected(name="a.jsonl", reason="template", line=int(held.line[row]), content=held.content[row].tobytes())
        for row in (1, 2, 3)
    ]
    record = replace(held, content=held.content[:1], file=held.file[:1], line=held.line[:1])
    columns = {name: column[:1] for name, column in table.columns.items()}
    left = replace(table, names=table.names.select(np.array([0])), inputs={"record": record}, columns=columns)
    before = replace(before, samples=left, rejected=(*before.rejected, *made))
    result = records(tmp_path, before)
    both = [("quarantined", "no-json", "a.jsonl", line) for line in (2, 6)]
    utf16 = ("quarantined", "not-utf8", "b.jsonl", 0)
    assert others(*result) == [*both, utf16, *[("quarantined", "template", "a.jsonl", line) for line in (3, 4, 5)]]
    assert (states(*result), new(*result)) == ({"a.jsonl:1": OK}, [])
    write(tmp_path / "a.jsonl", "one", "mended", "bad", "new", "{", "bad")
    result = records(tmp_path, before)
    assert others(*result) == [
        ("quarantined", "no-json", "a.jsonl", 5),
        utf16,
        ("quarantined", "template", "a.jsonl", 3),
        ("quarantined", "template", "a.jsonl", 6),
        ("stale", "source-changed", "a.jsonl", 2),
    ]
    assert new(*result) == ["a.jsonl:4"]


TWO_FILES = st.lists(st.lists(st.sampled_from("xyz{"), max_size=5), min_size=2, max_size=2)


@settings(max_examples=60, deadline=None)
@given(TWO_FILES, TWO_FILES)
def test_every_record_is_counted_once(tmp_path_factory, old, now):
    """Matched, removed and new records cover both sides; equal data has no findings."""
    root = tmp_path_factory.mktemp("records")
    write(root / "0.jsonl", "always")
    for number, texts in enumerate(old):
        write(root / f"a{number}.jsonl", *texts, "end")
    before = scan(root)
    for number, texts in enumerate(now):
        write(root / f"a{number}.jsonl", *texts, "end")
    after = scan(root)
    result = compared(before, after)
    other = others(*result)
    count = Counter(states(*result).values())
    mended = sum(item[:2] == ("stale", "source-changed") for item in other)
    matched = count[OK] + count[MOVED] + count[CHANGED] + count[TOUCHED]
    assert len(after.samples) == matched + len(new(*result)) + mended
    only_quarantined = all(category == "quarantined" for category, *_ in other)
    clean = not new(*result) and set(count) <= {OK, TOUCHED} and only_quarantined
    assert clean == (old == now) or any("{" in x for x in (*old, *now))
    multiset = [Counter((n, t) for n, x in enumerate(side) for t in x if t != "{") for side in (old, now)]
    same = sum((multiset[0] & multiset[1]).values()) + 3
    assert count[OK] + count[MOVED] + count[TOUCHED] == same
