from unittest.mock import Mock

import numpy as np
import pytest
from made_cache import make

from latentcache.errors import CorruptEntryError, StoreError
from latentcache.fields.protocol import Difference, Failure, Made
from latentcache.store.reader import EntryReader
from latentcache.verify.entries import Depth
from latentcache.verify.findings import Commands
from latentcache.verify.verify import check_cache, repair_cache, verify_cache


class ReEncoder:
    """Encodes like the made-up kinds; ``change`` alters a sample's array or returns a failure."""

    def __init__(self, change=lambda sample, array: array, columns=None):
        self.change, self.columns, self.encoded = change, columns or {}, []

    def __call__(self, snapshot, root, field, rows, described, *, device):
        fields = snapshot.fields[field]
        for row in reversed(rows):
            sample = int(fields.sample[row])
            self.encoded.append((field, sample))
            content = fields.row_keys(np.array([row]))[0, 8:24].tobytes()
            made = self.change(sample, fields.kind.encode(content, fields.recipe))
            yield row, made if isinstance(made, Failure) else Made(array=made, columns=self.columns), "cpu"


def check(case, again, number=99, **more):
    return check_cache(case.cache, Depth(reencode=number, **more), reencode=again)[0]


def off(*samples):
    return lambda sample, array: array + array.dtype.type(1) if sample in samples else array


def test_equal_re_encodings_are_ok(case):
    report = check(case, ReEncoder())
    assert (report.exit_code(), report.counts["ok"], report.counts["drift"]) == (0, 8, 0)
    again = report.reencoded
    assert (again.samples, again.entries, again.drifted, again.device) == (8, 8, 0, "cpu")
    assert again.confidence == "8 samples clean: all of them"
    assert report.not_compared == ()
    assert report.checked["reencoded"] == 8


def test_different_items_drift_and_are_repaired(case):
    words, depth = Commands(recipe="--model M", run="--device cpu"), Depth(reencode=99, seed=4)
    report = check_cache(case.cache, depth, words, reencode=ReEncoder(off(2, 5)))[0]
    assert (report.counts["drift"], report.counts["ok"], report.exit_code()) == (2, 6, 1)
    assert {(finding.category, finding.reason, finding.field) for finding in report.findings} == {
        ("drift", "reencoded", case.names[0])
    }  # fmt: skip
    (fix,) = {finding.fix for finding in report.findings}
    assert "--reencode 99 --seed 4 --model M --device cpu --repair --yes; latentcache build" in fix
    again = {"depth": Depth(full=True, reencode=99), "reencode": ReEncoder(off(2, 5))}
    done = repair_cache(case.cache, confirm=lambda plan: True, **again)
    assert {item.reason for item in done.removals} == {"drift"}
    lost = verify_cache(case.cache).counts["missing"]
    assert lost >= 2
    assert case.build() == (lost, 8 - lost)
    assert check(case, ReEncoder()).exit_code() == 0


def test_own_columns_are_compared_too(tmp_path):
    case = make(tmp_path, "texts")
    assert check(case, ReEncoder(columns={"spans": np.empty((0, 2), np.uint32)})).exit_code() == 0
    report = check(case, ReEncoder(columns={"spans": np.array([[0, 4]], np.uint32)}))
    assert {finding.found for finding in report.findings} == {"other values of spans"}
    assert report.counts["drift"] == 8


def test_the_kind_defines_the_noise(tmp_path, monkeypatch):
    import made_cache

    seen = []

    def compare(self, stored, made, noise, recipe):
        seen.append(noise)
        return Difference(differs=bool(np.abs(stored - made).max() > 2), largest=1.0, mean=0.5)

    monkeypatch.setattr(made_cache.Flat, "compare", compare)
    report = check(make(tmp_path, "flat"), ReEncoder(off(1)))
    assert (report.exit_code(), report.reencoded.largest, report.reencoded.mean) == (0, 1.0, 0.5)
    assert seen[0]["device"] == "cpu"


@pytest.mark.parametrize(
    ("reason", "category", "found"),
    [("source-changed", "stale", "source-changed"), ("truncated", "unverifiable", "not-encoded")],
)
def test_inputs_that_cannot_be_encoded_again(case, reason, category, found):
    failure = Failure(reason=reason, detail="why")
    report = check(case, ReEncoder(lambda sample, array: failure if sample == 3 else array))
    assert (report.counts[category], report.counts["ok"]) == (1, 7)
    assert [(finding.reason, finding.fix != "") for finding in report.findings] == [(found, True)]
    assert report.reencoded.confidence == ""
    assert report.reencoded.samples == 7


def test_all_fields_of_a_sample_are_encoded_one_field_after_the_other(tmp_path):
    case = make(tmp_path, "flat", "lines")
    again = ReEncoder()
    report = check(case, again, 3)
    assert [field for field, _ in again.encoded] == ["flat"] * 3 + ["lines"] * 3
    assert (report.reencoded.samples, report.reencoded.entries, report.counts["ok"]) == (3, 6, 8)
    assert report.reencoded.confidence.startswith("3 samples clean: 95 % sure")


@pytest.mark.parametrize("error", [CorruptEntryError("unread", reason="io-error"), StoreError("unread")])
def test_a_stored_item_that_cannot_be_read_now_is_not_corrupt(case, error, monkeypatch):
    monkeypatch.setattr(EntryReader, "read", Mock(side_effect=error))
    report = check(case, ReEncoder())
    assert {(finding.category, finding.reason) for finding in report.findings} == {("unverifiable", "io-error")}
