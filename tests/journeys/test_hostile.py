"""Hostile files are rejected with their cause; good files beside them are built."""

import json
import os
import subprocess
import sys

import hostile
import pytest
from commands import ROOT, look, run, state_of

MOST_BYTES = 500 << 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "data"
    expected = hostile.make(folder)
    return folder, expected


def sandbox(folder):
    """An empty working folder, with a fake Ghostscript that records calls."""
    (folder / "bin").mkdir(parents=True)
    (folder / "tmp").mkdir()
    for name in ("gs", "rsvg-convert", "inkscape", "heif-convert"):
        (folder / "bin" / name).write_text(f'#!/bin/sh\ntouch "{folder}/tmp/called"\n')
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    return {"cwd": folder / "tmp", "env": {**os.environ, "PATH": path, "TMPDIR": str(folder / "tmp")}}


def examined(folder, box):
    """What a process that decodes all files of a folder says of each."""
    around = sandbox(box)
    around["env"] |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, hostile.__file__, str(folder)]
    done = subprocess.run(command, **around, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"ended by {-done.returncode} at {done.stderr[-300:]}"
    report = json.loads(done.stdout)
    assert report["peak_bytes"] < MOST_BYTES
    assert list((box / "tmp").iterdir()) == []
    return report["causes"]


def test_decoding_hostile_files_needs_little_memory(corpus, tmp_path):
    folder, expected = corpus
    causes = examined(folder, tmp_path / "box")
    assert causes == {name: None if name.startswith("caption-") else expected[name] for name in causes}
    assert len(causes) >= 120


def test_a_build_rejects_hostile_files_by_name(corpus, tmp_path, monkeypatch):
    folder, expected = corpus
    around = sandbox(tmp_path / "box")
    monkeypatch.setenv("PATH", around["env"]["PATH"])
    monkeypatch.setenv("TMPDIR", around["env"]["TMPDIR"])
    before = state_of(folder)
    recipe = ["--model", "stub", "--resolution", 64, "--bucket-step", 8]
    done = run("build", folder, "--out", tmp_path / "cache", *recipe, "--json", "--quiet", timeout=300)
    assert done.status == 1, done.err
    assert list((tmp_path / "box" / "tmp").iterdir()) == []
    rejected = {item["path"]: item["reason"] for item in done.json["items"] if item["category"] == "quarantined"}
    assert rejected == {name: cause for name, cause in expected.items() if cause}
    hints = {item["path"]: item["hint"] for item in done.json["items"] if item["category"] == "quarantined"}
    assert all(hints.values())
    built = {
        path
        for entry in look("info", tmp_path / "cache", "--entries", "--json").json["entries"]
        for path in entry["paths"]
    }
    assert built == {name for name, cause in expected.items() if cause is None}
    assert state_of(folder) == before
    checked = look("verify", tmp_path / "cache", "--full", "--json").json
    assert checked["counts"]["ok"] == len(built)
    assert {item["path"]: item["hint"] for item in checked["items"] if item["category"] == "quarantined"} == hints
    assert checked["counts"]["quarantined"] == len(rejected)
    again = look("build", folder, "--out", tmp_path / "cache", "--json").json
    assert again["counts"]["encoded"] == 0
    assert {item["path"] for item in again["items"] if item["category"] == "quarantined"} == set(rejected)
