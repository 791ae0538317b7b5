"""Pieces of files in memory, with and without the compiled library."""

import os

import numpy as np
import pytest

from latentcache.store import gather

DATA = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f").write_bytes(DATA.tobytes())
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def check_reads(file, count, seed=0):
    """Read pieces with a gap of three bytes before each."""
    random = np.random.default_rng(seed)
    size = random.integers(1, 300_000 if count < 50 else 3000, count)
    first = random.integers(0, len(DATA) - size)
    at = np.cumsum(size + 3) - size
    out = np.full(int(at[-1] + size[-1]), 0xAA, np.uint8)
    assert gather.read_pieces(np.stack([np.full(count, file), first, size, at]), out) == count
    for begin, length, start in zip(at, size, first, strict=True):
        assert np.array_equal(out[begin : begin + length], DATA[start : start + length])
        assert (out[begin - 3 : begin] == 0xAA).all()


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("count", [1, 32, 1000])
def test_every_read_fills_its_piece(file, count):
    check_reads(file, count)


@pytest.mark.usefixtures("each_way")
def test_pieces_before_the_first_that_does_not_come_whole(file):
    out = np.zeros(300, np.uint8)
    first, size, at = [0, len(DATA) - 50, 0], [100] * 3, [0, 100, 200]
    assert gather.read_pieces(np.array([[file] * 3, first, size, at]), out) == 1
    assert np.array_equal(out[:100], DATA[:100])
    assert gather.read_pieces(np.array([[10**6] * 3, first, size, at]), out) == 0  # no such file


def test_the_environment_disables_the_library(library, monkeypatch):
    monkeypatch.delenv("LATENTCACHE_NATIVE", raising=False)
    assert gather.compiled(library) is not None
    assert gather.compiled(library.with_name("gone.so")) is None
    monkeypatch.setenv("LATENTCACHE_NATIVE", "0")
    assert gather.compiled(library) is None
