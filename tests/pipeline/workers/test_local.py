import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from latentcache.errors import EncoderError, UsageError, WorkerError
from latentcache.pipeline.workers import local
from latentcache.pipeline.workers.engine import ENCODING, IDLE, OPENING, PREPARING, Beat, Step
from latentcache.pipeline.workers.local import VARIABLE, LocalEngine, Watchdog, WorkerProcess, deadline_s, import_path
from latentcache.pipeline.workers.resources import Device

CPU = Device(label="cpu", name="cpu")
ANSWER = "tests.pipeline.workers.toy_kinds:answer"


def test_one_process_answers_all_requests(squares):
    with LocalEngine("cpu*2") as engine:
        assert engine.ask(ANSWER, number=1)["number"] == 2
        with pytest.raises(EncoderError, match="a negative number") as caught:
            engine.ask(ANSWER, number=-1)
        assert caught.value.fix == "give another one"
        process, *_ = engine._waiting
        assert engine.ask(ANSWER, number=1) is engine.ask(ANSWER, number=1), "asked once"
        assert engine.ask(ANSWER, number=2)["number"] == 3
        assert squares.run(["a", "b"], device="cpu*2", engine=engine).encoded == 4
        assert process in engine._waiting


def test_a_worker_is_kept_for_the_next_field(squares):
    def pids():
        return [process.pid for process in engine._waiting]

    with LocalEngine("cpu") as engine:
        squares.run(["a", "b"], engine=engine)
        first = pids()
        assert squares.run(["c", "d"], engine=engine).encoded == 4
        assert pids() == first
        assert squares.run(["e", "f once-encode"], engine=engine).restarts == 1
        second = pids()
    assert len(first) == len(second) == 1
    assert first != second, "a worker that died is replaced, and its successor kept"
    assert not any(Path(f"/proc/{pid}").exists() for pid in first + second)


@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_waiting_worker_ends_when_the_build_is_killed(squares, held):
    """A fork of the build may keep its end of the connection open."""
    script = (
        "import os, time; from pathlib import Path; from tests.pipeline.workers.conftest import Toy, TOYS\n"
        "from latentcache.fields import registry; registry.register(TOYS)\n"
        "from latentcache.pipeline.workers.local import LocalEngine\n"
        "engine = LocalEngine('cpu')\n"
        f"Toy('squares', Path({str(squares.folder)!r})).run(['a'], engine=engine)\n"
        "print(*[process.pid for process in engine._waiting], flush=True)\n"
        f"{held} and os.fork() == 0 and (time.sleep(12), os._exit(0))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    build = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pids = build.stdout.readline().split()
    build.wait()
    until = time.monotonic() + 11
    while time.monotonic() < until and any(Path(f"/proc/{pid}").exists() for pid in pids):
        time.sleep(0.05)
    assert pids
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    build.stdout.close()


def test_a_process_that_dies_during_a_request_is_an_error():
    with LocalEngine("cpu") as engine, pytest.raises(WorkerError, match="ended before it answered") as caught:
        engine.ask(ANSWER, number=100)
    assert "SIGKILL" in caught.value.why


def test_a_module_in_the_working_directory_is_not_imported(tmp_path, monkeypatch):
    for name in ("json", "numpy", "socket", "signal"):
        (tmp_path / f"{name}.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "own.py").write_text("def answer(): return 7")
    tests = str(Path.cwd())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path, tests])
    with LocalEngine("cpu") as engine:
        assert engine.ask("own:answer") == 7


def test_a_folder_of_pythonpath_keeps_its_place(tmp_path, monkeypatch):
    """Workers import the tree under test, not an installed one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert import_path()[-1] == str(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert import_path()[0] == str(tmp_path)


def test_a_worker_that_prints_a_lot_neither_blocks_nor_fills_memory_or_disk(squares):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with LocalEngine("cpu") as engine:
        assert squares.run(["a", "b print-encode"], engine=engine).encoded == 4
        assert len(engine._waiting[0]._printed) < 10_000
        assert squares.run(["c print-prepare", "d crash-encode"], engine=engine).failed
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@pytest.mark.parametrize(("number", "words"), [(60, "has not moved"), (61, "no sign of life")])
def test_a_question_has_a_deadline(number, words, monkeypatch):
    monkeypatch.setenv(local.VARIABLE, "0.7")
    with LocalEngine("cpu") as engine:
        assert engine.ask(ANSWER, number=1)["number"] == 2
        pid = engine._waiting[0].pid
        with pytest.raises(WorkerError, match="ended before it answered") as caught:
            engine.ask(ANSWER, number=number)
        assert words in caught.value.why
        assert not Path(f"/proc/{pid}").exists()
        assert engine.ask(ANSWER, number=2)["number"] == 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_workers_ignore_group_signals(number):
    with LocalEngine("cpu") as engine:
        assert engine.ask(ANSWER, number=1)["number"] == 2
        os.kill(engine._waiting[0].pid, number)
        assert engine.ask(ANSWER, number=2)["number"] == 3


def test_exit_codes_are_reported():
    process = WorkerProcess(CPU)
    process.kill()
    process.join()
    assert process.end.how == "was ended by SIGKILL"
    process = WorkerProcess(replace(CPU, variables={"PYTHONHOME": "/nowhere"}))
    process.join()
    assert re.search("Python|encodings|Abort", process.end.how)


HANGING = Step(1, PREPARING, (5,))


def seconds_until_stuck(watch, reports, limit=5000, every=0.5):
    """Return the seconds until a worker is given up; ``reports`` gives what it reports before each look."""
    for number in range(limit):
        for report in reports(number):
            watch.report(report)
        if watch.stuck(every):
            return (number + 1) * every
    return None


def test_short_steps_never_time_out():
    watch = Watchdog(2, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: [Beat(), HANGING]) is None
    assert watch.begun == {5: PREPARING}
    watch.report(Step(1, IDLE))
    assert watch.begun == {}


def test_a_stopped_process_has_no_heartbeat():
    watch = Watchdog(3, on_cpu=True)
    assert seconds_until_stuck(watch, lambda n: [Beat()] if n < 10 else []) == pytest.approx(10 * 0.5 + 3.5)
    assert "sign of life" in watch.stuck(0.5)
    assert seconds_until_stuck(Watchdog(3, on_cpu=True), lambda n: []) == pytest.approx(31), "being started"


@pytest.mark.parametrize(
    ("stage", "jobs", "on_cpu", "expected"),
    [
        (OPENING, (), True, 100.0),
        (ENCODING, tuple(range(4)), True, 40.0),
        (ENCODING, tuple(range(16)), False, 30.0),
        (PREPARING, (1,), False, 10.0),
    ],
)
def test_each_stage_has_its_deadline(stage, jobs, on_cpu, expected):
    watch = Watchdog(10, on_cpu=on_cpu)
    watch.report(Step(0, stage, jobs))
    assert seconds_until_stuck(watch, lambda n: [Beat()]) == expected + 0.5


def test_a_suspended_build_blames_no_worker():
    watch = Watchdog(10, on_cpu=True)
    watch.report(HANGING)
    assert watch.stuck(3600.0) == ""


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan"])
def test_a_wrong_deadline_is_an_error(monkeypatch, text):
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(UsageError, match="not a positive number"):
        deadline_s()
