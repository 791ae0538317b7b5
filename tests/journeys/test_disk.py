"""A full or read-only disk gives a clear error and keeps committed entries."""

import contextlib
import json
import os
import resource
import subprocess
import sys

import pytest
from commands import ROOT, acknowledged, build, draw_folder, entries, finished, look, start_build, state_of, wait_for
from small_cache import open_folder

from latentcache.store.catalog import mend_shards
from latentcache.store.paths import CachePaths

__all__ = ["open_folder"]
#: Runs every command as root to load all modules, then again as an unprivileged user.
AS_NOBODY = """
import contextlib, io, json, os, sys
import latentcache
from latentcache.cli.app import main

data, cache = sys.argv[1:]
build = ["build", data, "--out", cache, "--json", "--quiet"]
commands = [build, ["info", cache, "--entries", "--json"], ["verify", cache, "--full", "--json"]]

def run(words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main(words)
    return [code, json.loads(out.getvalue())]

for words in commands:
    run(words)
list(latentcache.open_cache(cache).loader(batch_size=2, seed=0))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
answers = [run(words) for words in commands]
loader = latentcache.open_cache(cache).loader(batch_size=2, seed=0)
answers.append(sorted(name for batch in loader for name in batch["names"]))
print(json.dumps(answers))
"""


def test_a_read_only_cache_is_readable(open_folder):
    data, cache = draw_folder(open_folder / "data", 4), open_folder / "cache"
    assert build(data, cache).status == 0
    folders = [path for path in (cache, *cache.rglob("*")) if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    words = [sys.executable, "-c", AS_NOBODY, str(data), str(cache)]
    around = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False, env=around)
    for folder in folders:
        folder.chmod(0o755)
    assert result.returncode == 0, result.stderr
    (built, error), (shown, info), (checked, verify), names = json.loads(result.stdout)
    assert (built, error["error"]["slug"]) == (3, "read-only")
    assert "--out" in error["error"]["fix"]
    assert (shown, checked, verify["counts"]["ok"]) == (0, 0, 4)
    assert all(entry["checksum"] for entry in info["entries"])
    assert names == [f"{number:04}.png" for number in range(4)]


def stopped_by_a_full_disk(process, cache, events):
    """Wait for a build that the disk stops; return the keys that it committed."""
    full = finished(process)
    assert (full.status, full.json["error"]["slug"]) == (3, "disk-full")
    assert "disk is full" in full.err
    keys = acknowledged(events)
    assert set(keys) <= set(entries(cache))
    return keys


def goes_on(data, cache, events, keys):
    """Build again when there is room: what was committed is used."""
    again = build(data, cache, events=events)
    assert (again.status, again.json["counts"]["encoded"]) == (0, 60 - again.json["counts"]["cached"])
    assert again.json["counts"]["cached"] >= len(keys)
    assert len(set(acknowledged(events))) == len(acknowledged(events))
    assert look("verify", cache, "--full", "--json").json["counts"]["ok"] == 60


def test_a_build_continues_after_a_full_disk(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 60), tmp_path / "cache", tmp_path / "events"
    sources = state_of(data)

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, 80_000))

    keys = stopped_by_a_full_disk(start_build(data, cache, events=events, preexec_fn=little_room), cache, events)
    assert keys
    goes_on(data, cache, events, keys)
    assert state_of(data) == sources


@pytest.fixture
def small_disk(tmp_path):
    """A separate file system of 96 MiB; requires root."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk):
    """Write a file that takes all that is free."""
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


BEGIN = """
import sys
from contextlib import closing
from pathlib import Path
from latentcache.errors import DiskFullError
from latentcache.store.entry import NewEntry
from latentcache.store.shard import ShardWriter

try:
    with closing(ShardWriter(Path(sys.argv[1], "shards", "0" * 16 + ".open"))) as writer:
        writer.write([NewEntry(bytes(32), bytes(1 << 18), (bytes(32),))])
except DiskFullError as error:
    print(error.slug)
"""


@pytest.mark.parametrize("pages", [0, 1, 2, 3, 8, 18, 60])
def test_a_new_shard_on_a_full_disk(small_disk, pages):
    """A sparse mapped file would crash the process here; existing files stay intact."""
    (small_disk / "shards").mkdir()
    filler = fill(small_disk)
    os.truncate(filler, filler.stat().st_size - 4096 * pages)
    command = [sys.executable, "-c", BEGIN, str(small_disk)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout.strip()) == (0, "disk-full"), done.stderr
    filler.unlink()
    assert mend_shards(CachePaths(small_disk)) == ([], [])
    assert not list((small_disk / "shards").iterdir())


@pytest.mark.slow
def test_a_disk_filled_by_another_process(tmp_path, small_disk):
    """LMDB reports this as EIO. Committed entries stay, and the build continues when there is room."""
    data, cache, events = draw_folder(tmp_path / "data", 60), small_disk / "cache", tmp_path / "events"
    process = start_build(data, cache, delay_ms=30, events=events)
    wait_for(lambda: len(acknowledged(events)) >= 5, process)
    filler = fill(small_disk)
    keys = stopped_by_a_full_disk(process, cache, events)
    assert 5 <= len(keys) < 60
    filler.unlink()
    goes_on(data, cache, events, keys)


@pytest.mark.parametrize("room", [0, 100, 5_000, 20_000])
def test_a_disk_that_is_full_at_the_start(tmp_path, room):
    data, cache = draw_folder(tmp_path / "data", 3), tmp_path / "cache"

    def little_room():
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    full = finished(start_build(data, cache, preexec_fn=little_room))
    assert (full.status, full.json["error"]["slug"]) == (3, "disk-full")
    assert build(data, cache).status == 0
