"""Every file of DATA is a sample's, rejected or in a note, whatever DATA is."""

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from commands import look, state_of
from drawn_data import data_sets, write
from file_truth import truth_of
from hypothesis import HealthCheck, given, settings

from latentcache.store.snapshot import open_snapshot

#: Notes on what samples lack or how they are read; their files are used.
NOT_OF_FILES = {
    "no-caption", "caption-lines", "in-two-sets", "duplicate-row", "text-column", "member-unused", "split-read",
}  # fmt: skip


def notes_of(report, samples):
    """Files that notes count, by reason; notes on members of archives are none of these."""
    counts = Counter()
    archives = {name.partition(".tar/")[0] + ".tar/" for name in samples if ".tar/" in name}
    for item in report["items"]:
        inside = any(item["path"].startswith(archive) for archive in archives) or ".tar/" in item["path"]
        if item["category"] == "note" and item["reason"] not in {*NOT_OF_FILES, "cache-folder"} and not inside:
            counts[item["reason"]] += item.get("count", 1)
    return counts


def rejected_by(report):
    return Counter(item["path"] for item in report["items"] if item["category"] == "quarantined")


def check_report(report, truth):
    """The items and counts of one command."""
    assert report["exit_code"] == int(bool(truth.rejected)), report
    assert rejected_by(report) == truth.rejected
    total = truth.rejected.total()
    assert (report["counts"]["samples"], report["counts"]["quarantined"]) == (len(truth.samples) + total, total)
    noted = notes_of(report, truth.samples)
    assert noted.total() == len(truth.noted), (noted, truth.noted)
    read = sum(item.get("count", 1) for item in report["items"] if item["reason"] == "split-read")
    assert read == truth.splits_read
    for reason, count in noted.items():
        sure = sum(reasons == (reason,) for reasons in truth.noted.values())
        possible = sum(reason in reasons for reasons in truth.noted.values())
        assert sure <= count <= possible, (reason, count, truth.noted)
    caches = {item["path"] for item in report["items"] if item["reason"] == "cache-folder"}
    assert caches == truth.caches


def check_files(root, cache, truth):
    """The samples of the snapshot, and that no file below DATA is without a place."""
    samples = open_snapshot(cache).samples
    usable = [row for row, name in enumerate(samples.names) if name not in truth.rejected]
    texts = samples.inputs["caption"].text if "caption" in samples.inputs else [""] * len(samples)
    assert {samples.names[row]: texts[row] for row in usable} == truth.samples
    used = set(samples.files.names)
    below = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    reached = {path for path in below if path.startswith(tuple(truth.caches))}
    reached |= {
        path for path in below if any(name.startswith(path + "/") for name in (*used, *truth.noted, *truth.rejected))
    }
    captions = {path for path in below for name in truth.rejected if _is_caption_of(path, name)}
    assert below - reached - captions <= {*used, *truth.rejected, *truth.noted}


def _is_caption_of(path, image):
    return path.rpartition(".")[0] in (image, image.rpartition(".")[0])


def check_each_command(data, folder):
    root = write(data, folder)
    truth, cache, before = truth_of(data), folder / "cache", state_of(root)
    words = (root, "--out", cache, *data.options, "--json")
    if truth.error:
        for command in ("inspect", "build"):
            report = look(command, *words).json
            assert report["exit_code"] == 2
            assert truth.error in report["error"]["fix"] + report["error"]["what"]
        assert not cache.exists()
        return
    if not truth.samples and not truth.rejected:
        assert look("build", *words).json["exit_code"] == 2
        return
    check_report(look("inspect", *words).json, truth)
    first = look("build", *words).json
    check_report(first, truth)
    check_files(root, cache, truth)
    again = look("build", *words).json
    check_report(again, truth)
    check_files(root, cache, truth)
    assert (again["counts"]["encoded"], again["items"]) == (0, first["items"])
    check_report(look("inspect", *words).json, truth)
    shown = look("info", cache, "--json").json["counts"]
    assert {name: shown[name] for name in ("samples", "quarantined")}.items() <= first["counts"].items()
    for depth in ((), ("--full",)):
        checked = look("verify", cache, *depth, "--json").json
        assert (checked["exit_code"], checked["samples"]) == (first["exit_code"], first["counts"]["samples"])
        counts = {name: count for name, count in checked["counts"].items() if count}
        assert counts.pop("quarantined", 0) == truth.rejected.total()
        assert counts in ({"ok": len(truth.samples)}, {})
        assert rejected_by(checked) == truth.rejected
    assert state_of(root) == before


def each_command(data):
    with tempfile.TemporaryDirectory() as folder:
        check_each_command(data, Path(folder))


@settings(max_examples=60, derandomize=True, report_multiple_bugs=False)
@given(data_sets())
def test_every_file_is_used_rejected_or_noted(data):
    each_command(data)


@pytest.mark.slow
@settings(max_examples=3000, report_multiple_bugs=False, suppress_health_check=[*HealthCheck])
@given(data_sets())
def test_every_file_of_many_data_sets(data):
    each_command(data)
