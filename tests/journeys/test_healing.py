"""Damage in any part of any file of a cache: following the printed fixes makes it clean, without encoding again."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import commands_are_put_together_once, look
from damaged import flip
from small_cache import SMALL, draw_four
from small_tokens import texts, write_texts

from latentcache.store.columns import ColumnFile
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

#: Commands until the cache must be clean.
MOST = 8
COLUMNS, INDEX = "snapshots/000001/columns.safetensors", "shards/*/index.safetensors"
DATA, MANIFEST = "shards/*/data.mdb", "snapshots/000001/manifest.json"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    commands_are_put_together_once(monkeypatch.setattr)


class Healthy:
    """A cache without damage, and the command that built it."""

    def __init__(self, folder, kind):
        self.data, self.cache, self.copy = folder / f"{kind} data", folder / "whole", folder / "cache"
        if kind == "images":
            draw_four(self.data)
            (self.data / "bad.png").write_bytes(b"")
            recipe = SMALL
        else:
            self.data.mkdir()
            write_texts(self.data / "a.jsonl", [*texts(60, longest=4000), ("bad",)])
            recipe = "--tokenizer", "stub", "--workers", "0"
        self.recipe = *recipe, "--allow-failed", "1"
        done = look("build", self.data, "--out", self.cache, *self.recipe)
        assert done.status == 0, done.err

    def copied(self):
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.cache, self.copy)
        return self.copy

    def cure(self, first):
        """Run a command, then the printed fixes, until a full check finds nothing; return all results."""
        left, results = [first], []
        while left:
            assert len(results) < MOST, f"no end of fixes: {[done.json['error'] or done.json for done in results]}"
            done = look(*left.pop(0), "--json")
            assert done.status in (0, 1, 3), done.err
            results.append(done)
            found = done.json
            items = [item for item in found.get("items", ()) if item["category"] not in ("quarantined", "note")]
            fixes = [found["error"]["fix"]] if found["error"] else [item.get("fix", "") for item in items]
            left += [words for fix in dict.fromkeys(fixes) for words in self.commands(fix) if words not in left]
            if not left and (found["command"], found["exit_code"]) != ("verify", 0):
                left.append(["verify", self.copy, "--full"])
        return results

    def commands(self, fix):
        """Commands of a fix; those of the shell run here."""
        if "first build" in fix or "the same `latentcache build`" in fix:
            return [["build", self.data, "--out", self.copy, *self.recipe]]
        words = [shlex.split(part) for part in re.split(r"[;`]", fix)]
        found = [part[1:] for part in words if part[:1] == ["latentcache"]]
        if not found and fix:
            subprocess.run(fix, shell=True, check=True)
        for part in found:
            part[:] = [str(self.data) if word == "DATA" else word for word in part]
            if str(self.copy) not in part:
                assert "on the cache" in fix
                part.insert(1, str(self.copy))
        return found


@pytest.fixture(scope="module", params=["images", "records"])
def healthy(request, tmp_path_factory):
    return Healthy(tmp_path_factory.mktemp("healing"), request.param)


def middles(path):
    """Name and middle byte of every stored column of a file."""
    file = ColumnFile(path)
    forms = {name: file[name].form for name in file}
    return {name: form.start + form.num_bytes // 2 for name, form in forms.items() if form.num_bytes}


@pytest.mark.parametrize("first", ["build", "verify", "verify --repair --yes", "info", "gc --apply"])
def test_every_column_of_a_snapshot_heals(healthy, first):
    name, *flags = first.split()
    places = middles(healthy.cache / COLUMNS)
    assert len(places) > 10
    for column, place in places.items():
        cache = healthy.copied()
        flip(cache / COLUMNS, place)
        given = [name, healthy.data, "--out", cache] if name == "build" else [name, cache, *flags]
        if name == "build":
            planned = look("inspect", *given[1:], "--json").json
            assert planned["plan"]["entries_to_make"] == 0, column
        results = healthy.cure(given)
        builds = [done for done in results if done.json["command"] == "build"]
        assert builds, column
        for done in builds:
            assert done.json["error"] is None, (column, done.err)
            assert done.json["counts"]["encoded"] == 0, column
        assert "columns.safetensors is damaged: checksum of " in builds[0].err
        assert open_snapshot(cache).number == 2
        assert open_snapshot(cache).fingerprint == open_snapshot(healthy.cache).fingerprint


@pytest.mark.parametrize("first", ["build", "verify --full"])
def test_every_column_of_an_index_heals(healthy, first):
    name, *flags = first.split()
    (index,) = healthy.cache.glob(INDEX)
    for place in middles(index).values():
        cache = healthy.copied()
        flip(cache / index.relative_to(healthy.cache), place)
        results = healthy.cure([name, healthy.data, "--out", cache] if name == "build" else [name, cache, *flags])
        assert sum(done.json["counts"].get("encoded", 0) for done in results) == 0


def _cut(path):
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_front(path):
    flip(path, min(20, path.stat().st_size - 2))


WAYS = {"front": _flip_front, "cut": _cut, "deleted": Path.unlink}


@pytest.mark.parametrize("first", ["build", "verify --full", "verify --repair --yes"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", [COLUMNS, INDEX, DATA, MANIFEST, "snapshots/000001/rejected.jsonl", "CURRENT"])
def test_every_file_heals(healthy, file, way, first):
    name, *flags = first.split()
    cache = healthy.copied()
    (path,) = cache.glob(file)
    WAYS[way](path)
    results = healthy.cure([name, healthy.data, "--out", cache] if name == "build" else [name, cache, *flags])
    if file != DATA:
        assert sum(done.json["counts"].get("encoded", 0) for done in results if not done.json["error"]) == 0


def test_an_old_snapshot_with_damage_does_not_stop_the_collector(healthy):
    cache = healthy.copied()
    shutil.rmtree(CachePaths(cache).shard(open_snapshot(cache).shards[0]))  # its entries are encoded again
    look("build", healthy.data, "--out", cache, *healthy.recipe)
    assert open_snapshot(cache).number == 2
    for place in middles(cache / COLUMNS).values():
        flip(cache / COLUMNS, place)
        for words in (["gc", cache], ["gc", cache, "--apply", "--keep", "2"], ["verify", cache]):
            assert look(*words).status == 0, words
        flip(cache / COLUMNS, place)
