"""Concurrent file reads by the compiled library: all succeed, or False."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import xxhash

from latentcache.store import gather

DATA = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture(autouse=True)
def compiled(library, monkeypatch):
    monkeypatch.setattr(gather, "LIBRARY", gather.Library(library))


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(DATA.tobytes())
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    yield gather.File(descriptor)
    os.close(descriptor)


def read_together(*pieces):
    return gather.reading(*pieces).finish()


def pieces(count, seed):
    random = np.random.default_rng(seed)
    size = random.integers(1, 3000, count)
    offset = random.integers(0, len(DATA) - 3000, count)
    return offset, size, np.cumsum(size + 3) - size


def read(file, count, seed=0):
    offset, size, at = pieces(count, seed)
    out = np.full(int(at[-1] + size[-1]), 0xAA, np.uint8)
    assert read_together(file, offset, size, out, at)
    for place, number, start in zip(at, size, offset, strict=True):
        assert np.array_equal(out[place : place + number], DATA[start : start + number])
        assert (out[place - 3 : place] == 0xAA).all()


@pytest.mark.parametrize("count", [1, 32, 256, 257, 1000])
def test_every_read_fills_its_buffer(file, count):
    read(file, count)


def test_a_read_past_the_end_is_incomplete(file):
    out = np.zeros(200, np.uint8)
    both = np.array([0, len(DATA) - 50]), np.array([100, 100]), out, np.array([0, 100])
    assert not read_together(file, *both)
    reading = gather.reading(file, *both)
    reading.begin()
    assert not reading.finish()
    assert not read_together(gather.File(10**6), *both)  # no such file
    read(file, 40)  # the thread still works


def test_without_the_library_nothing_is_read(file, monkeypatch):
    monkeypatch.setattr(gather, "LIBRARY", None)
    assert not read_together(file, np.array([0]), np.array([10]), np.zeros(10, np.uint8), np.array([0]))


def test_checksums_are_of_the_bytes_in_the_file(file):
    scaling = gather.scaling("float32", np.float32([2, 3]), np.float32([1, 0]))
    offset, size = np.arange(40) * 4096, np.full(40, 800)
    out = np.zeros(40 * 800, np.uint8)
    reading = gather.reading(file, offset, size, out, np.arange(40) * 800, hashed=True, scaling=scaling)
    assert reading.finish()
    assert reading.hashes.tolist() == [xxhash.xxh3_64_intdigest(DATA[start : start + 800]) for start in offset]
    stored = np.stack([DATA[start : start + 800].view(np.float32) for start in offset])
    with np.errstate(all="ignore"):  # some are not numbers
        expected = np.concatenate([stored[:, :100] * 2 + 1, stored[:, 100:] * 3], axis=1)
    assert np.allclose(out.view(np.float32).reshape(40, 200), expected, rtol=1e-6, equal_nan=True)


def start_reads(file, number):
    """Start 40 reads of one part of the file."""
    size, out = np.full(40, 900), np.zeros(36000, np.uint8)
    reading = gather.reading(file, number * 40000 + np.arange(40) * 900, size, out, np.arange(40) * 900)
    reading.begin()
    return reading, out, DATA[number * 40000 : number * 40000 + 36000]


def test_concurrent_reads_end_in_any_order(file):
    random = np.random.default_rng(1)
    for _ in range(30):
        waiting = [start_reads(file, number) for number in range(8)]
        for place in random.permutation(8)[: random.integers(9)].tolist():
            reading, out, expected = waiting[place]
            assert reading.finish()
            assert np.array_equal(out, expected)
        del waiting  # the other reads are not needed


def test_threads_wait_for_their_own_reads(file):
    failed = []

    def work():
        for number in [*range(8)] * 20:
            reading, out, expected = start_reads(file, number)
            if not reading.finish() or not np.array_equal(out, expected):
                failed.append(number)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_forked_child_finishes_reads_of_its_parent(file):
    waiting = [start_reads(file, number) for number in range(8)]
    child = os.fork()
    if not child:
        status = 1
        try:
            for reading, out, expected in [*waiting, start_reads(file, 3)]:
                assert reading.finish()
                assert np.array_equal(out, expected)
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert all(reading.finish() and np.array_equal(out, expected) for reading, out, expected in waiting)


def test_a_file_that_is_cut_short_while_it_is_mapped(file, tmp_path):
    size, out = np.full(2, 100), np.zeros(200, np.uint8)
    os.truncate(tmp_path / "f", 8192)
    assert not gather.reading(file, np.array([0, 9000]), size, out, np.array([0, 100])).finish()
    reading = gather.reading(file, np.array([0, 9000]), size, out, np.array([0, 100]), hashed=True)
    reading.begin()
    assert not reading.finish()
    assert gather.reading(file, np.array([0, 8000]), size, out, np.array([0, 100])).finish()
    assert np.array_equal(out[100:], DATA[8000:8100])


@pytest.mark.parametrize("handler", ["", "import faulthandler; faulthandler.enable()"])
def test_a_foreign_bus_error_ends_the_process(tmp_path, library, handler):
    (tmp_path / "f").write_bytes(bytes(8192))
    code = f"""
import mmap, os, numpy as np
from pathlib import Path
from latentcache.store import gather
{handler}
gather.LIBRARY = gather.Library(Path({str(library)!r}))
file = gather.File(os.open({str(tmp_path / "f")!r}, os.O_RDONLY))
others = mmap.mmap(file.descriptor, 0, prot=mmap.PROT_READ)
os.truncate({str(tmp_path / "f")!r}, 0)
reading = gather.reading(file, np.array([0]), np.array([4]), np.zeros(4, np.uint8), np.array([0]))
reading.begin()
assert not reading.finish()
print("here", flush=True)
others[0]
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (-7, "here\n")


def test_the_environment_disables_the_library(library, monkeypatch):
    monkeypatch.delenv("LATENTCACHE_NATIVE", raising=False)
    assert gather.compiled(library) is not None
    assert gather.compiled(library.with_name("gone.so")) is None
    monkeypatch.setenv("LATENTCACHE_NATIVE", "0")
    assert gather.compiled(library) is None


@pytest.mark.parametrize("way", ["end", "sys.exit(0)", "os._exit(0)", "os.kill(os.getpid(), 15)"])
def test_the_interpreter_exits_during_reads(tmp_path, library, way):
    (tmp_path / "f").write_bytes(DATA.tobytes())
    code = f"""
import os, sys, numpy as np
from pathlib import Path
from latentcache.store import gather
gather.LIBRARY = gather.Library(Path({str(library)!r}))
file, all_of_it = gather.File(os.open({str(tmp_path / "f")!r}, os.O_RDONLY)), []
for number in range(40):
    out = np.empty(8 << 20, np.uint8)
    pieces = file, np.zeros(8, int), np.full(8, 1 << 20), out, np.arange(8) << 20
    all_of_it.append(gather.reading(*pieces, scaling=gather.scaling('float32', np.ones(1, 'f4'), np.ones(1, 'f4'))))
    all_of_it[-1].begin()
{"" if way == "end" else way}
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (-15 if "kill" in way else 0, "")
