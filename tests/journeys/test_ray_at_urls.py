"""A Ray build whose cache is at a URL: nodes share no folder, and one of two is killed in the middle."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from ray_cluster import ROOT, Cluster, events_of, wait_for_events
from s3_server import entries, server, url
from small_cache import SMALL, draw, run

from latentcache.pipeline.workers.engine import Task
from latentcache.pipeline.workers.ray import Supervisor
from latentcache.store.catalog import load_catalog
from latentcache.store.paths import CachePaths
from latentcache.store.remote.view import StoredShards, worker_folder

pytest.importorskip("ray")

__all__ = ["run", "server", "url"]
PHOTOS = 100
SLOW = ("--model", "stub:delay_ms=200", *SMALL[2:], "--batch-size", "2")


def stored(url, folder):
    """Keys of all entries at a URL, also of those that no snapshot names yet."""
    StoredShards(url).fill(CachePaths(folder))
    catalog = load_catalog(CachePaths(folder))
    return {key.tobytes().hex() for key in catalog.keys(catalog.all_items())}


def test_a_node_without_credentials_is_left_out_with_the_reason(url, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    task = Task(field="latents", recipe={}, producer={}, groups=(), root="", cache="", url=url, scratch=str(tmp_path))
    assert Supervisor({}, "cpu", 1).prepare({}, task, 1) == [f"{url}: access is denied"]


def test_folders_of_workers_that_are_gone_are_removed(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from latentcache.store.remote.view import worker_folder\n"
        "with worker_folder(Path(sys.argv[1])) as folder: (folder / 'shard').write_text('x'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    with worker_folder(tmp_path) as first, worker_folder(tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_node_that_dies_takes_nothing_that_was_acknowledged(url, run, tmp_path):
    data, events, scratch = tmp_path / "data", tmp_path / "events", tmp_path / "scratch"
    for number in range(PHOTOS):
        draw(data / f"{number:03}.png", (64, 64), seed=number)
    cluster = Cluster(1, 1)  # its nodes have the credentials of this process
    try:
        words = ["build", data, "--out", url, *SLOW, "--scratch", scratch, "--publish-every", "2s"]
        words += ["--events", events, "--engine", "ray", "--address", cluster.address, "--json"]
        command = [sys.executable, "-m", "latentcache", *map(str, words)]
        around = os.environ | {"PYTHONPATH": str(ROOT)}
        build = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=around)
        wait_for_events(events, 10)
        acknowledged = set(events_of(events))
        assert acknowledged <= stored(url, tmp_path / "seen")
        cluster.do("kill")
        output, talk = build.communicate(timeout=180)
        assert build.returncode == 0, talk
    finally:
        cluster.close()
    assert json.loads(output)["counts"]["encoded"] == PHOTOS
    assert max(Counter(events_of(events)).values()) == 1
    assert run("verify", url, "--full", "--json").json["counts"]["ok"] == PHOTOS
    assert run("build", data, "--out", tmp_path / "local", *SMALL).status == 0
    assert entries(run, url) == entries(run, tmp_path / "local")
    assert set(entries(run, url)) == set(events_of(events))
    left = [path.name for path in scratch.iterdir()]
    assert len(left) <= 1, "of the node that was killed"
