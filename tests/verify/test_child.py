import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from small_cache import build, damage_payload, draw

from latentcache import failpoint
from latentcache.errors import CacheDamagedError
from latentcache.store.layout import CacheLayout
from latentcache.verify import child
from latentcache.verify.child import Work, limits_for, run_child, signal_name
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Deadline, Depth, Limits

DIES = "import json, os, sys; print(json.dumps({{'shard': 0}}), flush=True); os.kill(os.getpid(), {number})"


def command_of(code):
    return (sys.executable, "-S", "-c", code)


@pytest.fixture
def three_shards(data, cache):
    """One shard of four pictures, and two of one each."""
    for number in (7, 8):
        draw(data / f"q{number}.png", seed=number)
        build(data, cache)
    assert len(CacheLayout(cache).sealed_shards()) == 3
    return cache


@pytest.mark.parametrize("number", [signal.SIGBUS, signal.SIGSEGV, signal.SIGABRT])
def test_a_shard_that_ends_the_process_is_corrupt_and_the_verdict_stands(cache, monkeypatch, number):
    monkeypatch.setattr(child, "COMMAND", command_of(DIES.format(number=int(number))))
    report = verify_cache(cache, full=True)
    assert (report.counts["corrupt"], report.counts["ok"], report.exit_code()) == (4, 0, 1)
    assert {f.found for f in report.findings} == {f"the process that read it was ended by {number.name}"}


def test_somebody_who_ends_the_process_damages_nothing(cache, monkeypatch):
    monkeypatch.setattr(child, "COMMAND", command_of(DIES.format(number=9)))
    report = verify_cache(cache, full=True)
    assert (report.counts["unverifiable"], report.counts["corrupt"]) == (4, 0)
    assert {f.fix for f in report.findings} == {f"latentcache verify {cache} --full"}


def test_the_scan_goes_on_after_the_shard_that_ended_it(three_shards, monkeypatch):
    """The second shard of each process kills it: the others are read."""
    monkeypatch.setenv(failpoint.VARIABLE, "scan-shard:2:kill")
    report = verify_cache(three_shards, full=True)
    assert report.counts["unverifiable"] in (1, 4)
    assert report.counts["ok"] == 6 - report.counts["unverifiable"]
    assert report.not_looked_at == 0


def test_damage_is_found_around_a_shard_that_ends_the_process(three_shards, monkeypatch):
    name = damage_payload(three_shards, row=0)
    everything = {f.path for f in verify_cache(three_shards, full=True).findings}
    assert everything == {name}
    monkeypatch.setenv(failpoint.VARIABLE, "scan-shard:3:kill")
    report = verify_cache(three_shards, full=True)
    assert {"corrupt", "unverifiable"} >= {f.category for f in report.findings}
    assert report.counts["unverifiable"] >= 1


def test_an_error_in_a_shard_is_its_damage(cache, monkeypatch):
    code = "import json; print(json.dumps({'shard': 0}), flush=True); raise MemoryError('too much')"
    monkeypatch.setattr(child, "COMMAND", command_of(code))
    (finding, *_) = verify_cache(cache, full=True).findings
    assert finding.category == "corrupt"
    assert finding.found == "the process that read it ended with status 1: MemoryError: too much"


def test_a_process_that_never_comes_to_a_shard_is_an_error(cache, monkeypatch):
    monkeypatch.setattr(child, "COMMAND", command_of("raise SystemExit('no')"))
    with pytest.raises(CacheDamagedError) as caught:
        verify_cache(cache, full=True)
    assert "ended with status 1: no" in caught.value.why


def test_where_no_process_can_be_started_this_one_reads(cache, monkeypatch):
    monkeypatch.setattr(child, "COMMAND", ("/nowhere/python",))
    name = damage_payload(cache)
    assert [f.path for f in verify_cache(cache, full=True).findings] == [name]
    work = Work(cache=str(cache), generation=1, shards=(0,))
    with pytest.raises(OSError):
        list(run_child(work))


def test_messages_are_those_of_the_scan(shared):
    work = Work(cache=str(shared[1]), generation=1, shards=(0,), pages=(0,))
    found = list(run_child(work))
    assert (found[0], found[-1]) == ({"shard": 0}, {"end": 0})
    assert max(message.get("upto", 0) for message in found) == 4


def test_time_that_is_over_reads_nothing(shared):
    report = verify_cache(shared[1], depth=Depth(full=True, max_duration_s=0.0))
    assert (report.not_looked_at, report.counts["ok"], report.exit_code()) == (4, 0, 0)
    assert report.checked["payloads"] == 0


def test_a_result_that_is_not_wanted_ends_the_process(shared, monkeypatch):
    code = "import json, time; print(json.dumps({'shard': 0}), flush=True); time.sleep(3600)"
    monkeypatch.setattr(child, "COMMAND", command_of(code))
    deadline = Deadline(None)
    messages = run_child(Work(cache=str(shared[1]), generation=1, shards=(0,)), deadline)
    assert next(messages) == {"shard": 0}
    deadline.cancel()
    assert list(messages) == []


def test_the_child_imports_neither_models_nor_the_engine(shared):
    asked = {"cache": str(shared[1]), "generation": 1, "shards": [], "pages": [], "selection": None}
    asked |= {"left_s": None, "probe": True, "limits": None}
    code = "import sys; from latentcache.verify.child import main; main()"
    code += "; print(sorted({'torch', 'lmdb', 'PIL', 'typer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(asked)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_limits_grow_with_the_cache(shared):
    layout = CacheLayout(shared[1])
    limits = limits_for(layout)
    assert limits.memory_bytes > 2 << 30
    assert limits.cpu_s >= 60
    work = Work(cache=str(layout.root), generation=1, shards=(0,), limits=limits)
    assert list(run_child(work))[-1] == {"end": 0}


def test_limits_hold(shared, monkeypatch):
    """A child that asks for more memory than it may have ends with an error, not with the machine's."""
    code = "import sys, json; from latentcache.verify import child; work = json.loads(sys.argv[1])"
    code += "; child._limit(work['limits']); print(json.dumps({'shard': 0}), flush=True); bytearray(8 << 30)"
    monkeypatch.setattr(child, "COMMAND", (sys.executable, "-c", code))
    limits = Limits(memory_bytes=2 << 30, cpu_s=60)
    (_, died) = run_child(Work(cache=str(shared[1]), generation=1, shards=(0,), limits=limits))
    assert (died["died"], died["category"]) == (0, "corrupt")
    assert died["found"].endswith("ended with status 1: MemoryError")


def test_a_folder_with_a_trap_in_it_is_no_place_to_import_from(cache, tmp_path, monkeypatch):
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "numpy.py").write_text("raise SystemExit('trapped')")
    monkeypatch.chdir(tmp_path / "trap")
    assert verify_cache(cache, full=True).counts["ok"] == 4


def test_names_of_signals():
    assert signal_name(int(signal.SIGBUS)) == "SIGBUS"
    assert signal_name(250) == "signal 250"


def test_a_cache_whose_name_is_no_text(cache):
    other = os.fsdecode(os.fsencode(cache) + b"\xff")
    shutil.copytree(cache, other)
    assert verify_cache(type(cache)(other), full=True).counts["ok"] == 4
