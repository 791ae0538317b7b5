import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from made_entries import make_cache, publish_entries
from pin_children import __file__ as CHILDREN

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.store import pins
from latentcache.store.pins import Pin, holders, open_pinned, unpinned
from latentcache.store.views import combine, select


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache")


def manifest(layout, number=1):
    return layout.generation(number) / "manifest.json"


def free(layout, number=1):
    with unpinned(manifest(layout, number)) as answer:
        return answer


def files(folder):
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*")}


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_generation_is_held_as_long_as_it_is_in_use(layout):
    before = open_files()
    generation = open_pinned(layout.root)
    assert (generation.number, free(layout), open_files()) == (1, False, before + 1)
    part = select(generation, [0, 1])
    del generation
    assert not free(layout)
    del part
    assert (free(layout), open_files()) == (True, before)


def test_holding_writes_nothing(layout):
    before = files(layout.root)
    generation = open_pinned(layout.root)
    assert files(layout.root) == before
    assert generation.pins[0].held


def test_several_readers_share_it(layout):
    first, second = Pin(manifest(layout)), Pin(manifest(layout))
    first.close()
    first.close()
    assert (first.held, second.held, free(layout)) == (False, True, False)
    second.close()
    assert free(layout)


def test_a_combined_cache_holds_all_its_parts(layout, tmp_path):
    other = make_cache(tmp_path / "other")
    both = combine([(place, open_pinned(place.root)) for place in (layout, other)])
    assert (free(layout), free(other)) == (False, False)
    del both
    assert (free(layout), free(other)) == (True, True)


def test_a_pickled_generation_takes_its_own(layout):
    generation = open_pinned(layout.root)
    data = pickle.dumps(generation)
    copy = pickle.loads(data)
    del generation
    assert copy.pins[0].held
    assert not free(layout)
    del copy
    assert free(layout)


def test_a_pickled_generation_that_is_gone_is_not_held(layout):
    data = pickle.dumps(open_pinned(layout.root))
    manifest(layout).unlink()
    assert not pickle.loads(data).pins[0].held


def test_a_reader_does_not_get_what_is_being_removed(layout, monkeypatch):
    publish_entries(layout, range(3))
    with unpinned(manifest(layout)) as answer:
        assert answer
        with pytest.raises(BlockingIOError):
            Pin(manifest(layout))
        assert open_pinned(layout.root).number == 2


def test_a_current_that_moves_on_is_followed(layout, monkeypatch):
    publish_entries(layout, range(3))
    numbers = iter([1, 2])
    monkeypatch.setattr(type(layout), "current_generation", lambda self: next(numbers))
    with unpinned(manifest(layout)):
        generation = open_pinned(layout.root)
    assert (generation.number, generation.pins[0].held) == (2, True)


def test_a_file_system_without_locks_is_read_without_a_pin(layout, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(95, "not supported")

    monkeypatch.setattr(pins.fcntl, "flock", refuse)
    before = open_files()
    generation = open_pinned(layout.root)
    assert (generation.number, generation.pins[0].held, open_files()) == (1, False, before)
    assert free(layout)


def test_no_cache_and_a_damaged_one_are_said_as_ever(layout, tmp_path):
    before = open_files()
    with pytest.raises(CacheNotFoundError):
        open_pinned(tmp_path / "nothing")
    (layout.generation(1) / "key.npy").write_bytes(b"x")
    with pytest.raises(CacheDamagedError):
        open_pinned(layout.root)
    manifest(layout).unlink()
    with pytest.raises(CacheDamagedError):
        open_pinned(layout.root)
    assert open_files() == before


def child(layout, mode):
    process = subprocess.Popen(
        [sys.executable, CHILDREN, mode, str(layout.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    return process, int(process.stdout.readline())


def test_the_holder_is_named_and_its_death_lets_go(layout):
    process, pid = child(layout, "hold")
    (holder,) = holders(manifest(layout))
    assert (holder.pid, holder.host) == (pid, os.uname().nodename)
    assert holder.since[:2] == "20"
    assert set(holder.as_json()) == {"pid", "host", "since"}
    assert not free(layout)
    process.kill()
    process.communicate()
    assert free(layout)
    assert holders(manifest(layout)) == [pins.Holder()]


def test_a_forked_child_goes_on_holding(layout):
    process, pid = child(layout, "fork")
    assert pid != process.pid
    assert not free(layout)  # the parent has closed its own
    process.communicate(b"end\n")
    assert free(layout)


def test_a_pipe_in_the_place_of_the_manifest_is_damage_and_no_wait(layout):
    manifest(layout).unlink()
    os.mkfifo(manifest(layout))
    with pytest.raises(CacheDamagedError):
        open_pinned(layout.root)


def test_a_pin_lets_go_when_the_interpreter_has_taken_the_names_of_its_module(layout, monkeypatch):
    pin = Pin(manifest(layout))
    monkeypatch.setattr(pins, "os", None)  # as at the end of a script, for an object that is still in use then
    pin.close()
    monkeypatch.undo()
    assert free(layout)
