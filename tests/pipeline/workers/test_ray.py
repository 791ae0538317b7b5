"""Workers on a real Ray cluster of two nodes of this machine, each build in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from latentcache.pipeline.workers import local
from latentcache.pipeline.workers.engine import Task
from latentcache.pipeline.workers.ray import differences, facts
from latentcache.store.paths import CachePaths
from latentcache.store.shard import load_index
from latentcache.store.snapshot import open_snapshot
from tests.ray_cluster import ROOT, Cluster, events_of, wait_for_events
from tests.small_cache import draw

pytest.importorskip("ray")

TEXTS = [f"word{number}" for number in range(24)]
AROUND = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def cluster():
    cluster = Cluster(1, 1)
    yield cluster
    cluster.close()


@pytest.fixture
def address(request):
    return request.getfixturevalue("cluster").address if "ray" in request.node.callspec.params["engine"] else ""


def run_toys(folder, kind, engine, address, texts, **around):
    folder.mkdir()
    command = [sys.executable, "-m", "tests.pipeline.workers.run_toys", str(folder), kind, engine, address, *texts]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=AROUND | around, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("engine", ["local", "ray"])
@pytest.mark.parametrize("kind", ["squares", pytest.param("words", marks=pytest.mark.slow)])
def test_torture(tmp_path, engine, kind, address):
    """A worker that is killed, one that stalls, a sample that kills each worker, one that needs too much memory."""
    orders = {
        3: "once-encode",
        7: "hangonce-prepare",
        11: "crash-encode",
        15: "memory-prepare",
        19: "stoponce-encode",
    }
    texts = [f"{text} {orders.get(number, '')}" for number, text in enumerate(TEXTS)]
    result = run_toys(tmp_path / "run", kind, engine, address, texts, **{local.VARIABLE: "2"})
    assert result["settled"] == list(range(24))
    assert result["failed"] == {"11": "encoder-crash", "15": "out-of-memory"}
    assert "SIGSEGV" in " ".join(result["details"]), "the report of the node's own engine"
    assert len(result["stored"]) == 22 * (2 if kind == "squares" else 1) == result["encoded"]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "photos"
    for number in range(120):
        draw(folder / f"{number:03}.png", (64, 64), seed=number)
    return folder


def command_of(photos, out, *words, delay_ms=0):
    command = [sys.executable, "-m", "latentcache", "build", str(photos), "--out", str(out), "--json"]
    options = ["--model", f"stub:delay_ms={delay_ms}" if delay_ms else "stub", "--resolution", "64"]
    return [*command, *options, "--batch-size", "4", "--commit-every", "4", *words]


def started(photos, out, cluster, *words, delay_ms=0):
    more = ("--engine", "ray", "--address", cluster.address, "--events", f"{out}.events", *words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": AROUND}
    return subprocess.Popen(command_of(photos, out, *more, delay_ms=delay_ms), **pipes)


def finished(build, timeout=120):
    """The JSON of a build, which alone is on stdout; with what it wrote to stderr."""
    with build:
        output, talk = build.communicate(timeout=timeout)
    return json.loads(output) | {"talk": talk}


def assert_like_local(photos, out):
    """Item keys, names and bytes are those of a local build, and each is stored once."""
    expected = out.with_name("expected")
    if not expected.exists():
        subprocess.run(command_of(photos, expected), check=True, capture_output=True, env=AROUND)
    entries, others = (entries_of(folder) for folder in (out, expected))
    assert entries == others
    keys = events_of(out.with_suffix(".events"))
    assert len(keys) == len(set(keys)) == len(entries)
    assert sum(load_index(folder).items for folder in CachePaths(out).sealed_shards()) == len(entries)
    assert not CachePaths(out).open_shards()


def entries_of(cache):
    command = [sys.executable, "-m", "latentcache", "info", str(cache), "--entries", "--json"]
    done = subprocess.run(command, check=True, capture_output=True, env=AROUND)
    return sorted((entry["key"], entry["checksum"], entry["paths"]) for entry in json.loads(done.stdout)["entries"])


def test_a_node_that_is_lost_loses_nothing(tmp_path, photos, cluster):
    build = started(photos, tmp_path / "out", cluster, delay_ms=100)
    wait_for_events(tmp_path / "out.events", 30)
    cluster.do("kill")
    result = finished(build)
    assert (result["exit_code"], result["counts"]["encoded"], result["counts"]["quarantined"]) == (0, 120, 0)
    assert "its samples are given out again" in result["talk"]
    assert_like_local(photos, tmp_path / "out")


@pytest.mark.slow
def test_a_node_that_joins_is_used(tmp_path, photos, cluster):
    build = started(photos, tmp_path / "out", cluster, delay_ms=300)
    wait_for_events(tmp_path / "out.events", 4)
    cluster.do("add")
    assert finished(build)["counts"]["encoded"] == 120
    assert len(CachePaths(tmp_path / "out").sealed_shards()) >= 2  # a worker that starts again has another
    assert_like_local(photos, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_same_command_goes_on_after_the_build_was_ended(tmp_path, photos, cluster, number):
    build = started(photos, tmp_path / "out", cluster, delay_ms=100)
    wait_for_events(tmp_path / "out.events", 30)
    build.send_signal(number)
    if number == signal.SIGTERM:
        assert finished(build, timeout=20)["error"]["slug"] == "interrupted"
    build.communicate()
    acknowledged = set(events_of(tmp_path / "out.events"))
    result = finished(started(photos, tmp_path / "out", cluster))
    assert result["counts"]["encoded"] <= 120 - len(acknowledged)
    assert_like_local(photos, tmp_path / "out")


@pytest.mark.slow
def test_a_node_that_differs_is_named_and_left_out(tmp_path, photos, cluster):
    other = tmp_path / "other" / "simplejpeg-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: simplejpeg\nVersion: 0.1\n")
    cluster.do(f"add {other.parent}")
    result = finished(started(photos, tmp_path / "out", cluster, delay_ms=50))
    assert (result["exit_code"], result["counts"]["encoded"]) == (0, 120)
    assert "simplejpeg is 0.1, not" in result["talk"]
    assert "the node is left out" in result["talk"]
    cluster.do("kill")


@pytest.mark.slow
def test_a_model_is_compared_and_gives_the_bits_of_a_local_build(tmp_path, photos, cluster):
    from tests.tiny_vae import tiny_vae

    model = tiny_vae(tmp_path / "vae")
    data = tmp_path / "photos"
    data.mkdir()
    for number in range(6):
        (data / f"{number}.png").write_bytes((photos / f"{number:03}.png").read_bytes())
    command = [sys.executable, "-m", "latentcache", "build", str(data), "--model", str(model), "--resolution", "64"]
    more = ("--engine", "ray", "--address", cluster.address, "--workers", "1")
    for out, words in (("expected", ()), ("out", more)):
        around = AROUND | {"OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "--out", str(tmp_path / out), *words], check=True, capture_output=True, env=around)
    assert entries_of(tmp_path / "out") == entries_of(tmp_path / "expected")

    fields = open_snapshot(tmp_path / "out").manifest["fields"]["latents"]
    task = Task(field="latents", recipe=fields["recipe"], producer={}, groups=(), root="", cache="")
    task = replace(task, provenance=fields["provenance"])
    known = facts(task)
    assert list(differences(known, task, "cpu", None)) == []
    tiny_vae(tmp_path / "vae", seed=8)
    assert [text.split(":")[0] for text in differences(known, task, "cpu", None)] == ["VAE differs"]
    shutil.rmtree(tmp_path / "vae")
    assert [text.split(":")[0] for text in differences(known, task, "cpu", None)] == ["VAE"]


@pytest.mark.slow
def test_a_cluster_of_another_version_is_an_error(tmp_path, photos, cluster):
    script = "import ray; ray.__version__ = '2.0.0'\nfrom latentcache.__main__ import run; run()"
    command = command_of(photos, tmp_path / "out", "--engine", "ray", "--address", cluster.address)
    done = subprocess.run([sys.executable, "-c", script, *command[3:]], capture_output=True, text=True, env=AROUND)
    assert done.returncode == 3
    error = json.loads(done.stdout)["error"]
    assert "install the same versions of Ray and Python on every node" in error["fix"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("--engine", "ray", "--address", "127.0.0.1:1"), 3, "no Ray cluster answers at 127.0.0.1:1"),
        (("--engine", "ray", "--address", "ray://127.0.0.1:10001"), 2, "ray job submit"),
        (("--engine", "ray", "--address", "head"), 2, "--address HOST:6379"),
        (("--engine", "ray", "--device", "cuda:0"), 2, "give auto, cuda or cpu"),
        (("--engine", "ray", "--workers", "0"), 2, "give 1 or more"),
        (("--address", "127.0.0.1:6379"), 2, "--engine=ray"),
        (("--engine", "dask"), 2, "local or ray"),
    ],
)
def test_bad_input_is_an_error_with_the_way(tmp_path, photos, words, status, text):
    done = subprocess.run(command_of(photos, tmp_path / "out", *words), capture_output=True, text=True, env=AROUND)
    assert done.returncode == status
    assert text in str(json.loads(done.stdout)["error"])
    assert not (tmp_path / "out").exists()


def test_without_ray_the_error_says_how_to_install_it(tmp_path, photos):
    script = "import sys; sys.modules['ray'] = None\nfrom latentcache.__main__ import run; run()"
    command = command_of(photos, tmp_path / "out", "--engine", "ray")
    done = subprocess.run([sys.executable, "-c", script, *command[3:]], capture_output=True, text=True, env=AROUND)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["fix"].startswith("pip install 'latentcache[ray]'")


def test_ray_is_imported_for_its_engine_only(tmp_path, photos):
    script = (
        "import sys\nfrom latentcache.__main__ import run\n"
        "try:\n    run()\nfinally:\n    assert 'ray' not in sys.modules"
    )
    command = [sys.executable, "-c", script, *command_of(photos, tmp_path / "out")[3:]]
    assert subprocess.run(command, capture_output=True, check=False, env=AROUND).returncode == 0


def test_a_node_with_other_data_cache_or_model_is_named(squares, tmp_path):
    """What a node finds is compared here, in one process: the files change between the two looks."""
    jobs = squares.jobs(TEXTS)
    task = squares.task(owner="me", locations=tuple(job.inputs["image"] for job in jobs[:3]))
    squares.paths.building.write_text(json.dumps({"owner": "me"}))
    known = facts(task)
    assert list(differences(known, task, "cpu", None)) == []
    (squares.folder / "data" / "001.txt").write_text("other")
    assert "content of DATA 001.txt" in next(differences(known, task, "cpu", None))
    (squares.folder / "data" / "001.txt").unlink()
    squares.paths.building.write_text(json.dumps({"owner": "another"}))
    data, cache = differences(known, task, "cpu", None)
    assert "001.txt" in data
    assert " is missing, not " in data
    assert "which nodes share, is missing" in cache
    others = differences({"torch": "1.0", "source file of field squares": "1234"}, task, "cpu", None)
    assert [text.split(" is ")[0] for text in others] == ["torch", "source file of field squares"]
