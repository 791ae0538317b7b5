"""Training that begins while its documents are still being tokenized, by a build in another process."""

import os
import signal

import pytest
import torch
from commands import start_followed
from small_tokens import build, write_texts

from latentcache.errors import NotYetEncodedError
from latentcache.loader.cache import open_cache
from latentcache.store.paths import CachePaths

COUNT = 10
#: A unit of work, so that each document is tokenized by itself, and a block of its own.
LONG = (1 << 20) + 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Records of which each makes a block."""
    lines = [f"{number} ".ljust(LONG, "abcdefgh"[number % 8]) for number in range(COUNT)]
    return write_texts(tmp_path_factory.mktemp("followed") / "data.jsonl", lines)


def start(data, cache):
    small = ("--commit-every", 1, "--workers", 0, "--batch-size", 1)
    return start_followed(cache, data, "--tokenizer", "stub", *small)


def rows_of(cache):
    return cache.rows(pad=64, overflow="truncate_right", no_loss="error")


def served(view):
    """An epoch, batch after batch."""
    return [{name: value.clone() for name, value in b.items()} for b in view.loader(batch_size=2, seed=3)]


def same(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(batch[name], again[name]) for batch, again in pairs for name in batch)


def test_rows_are_served_before_the_build_ends_and_are_those_of_the_finished_cache(data, tmp_path):
    process = start(data, tmp_path / "cache")
    pending = open_cache(tmp_path / "cache", follow=True, timeout_s=60)
    view = rows_of(pending)
    assert (len(pending), len(view), len(view.loader(batch_size=2))) == (COUNT, COUNT, COUNT // 2)
    state = view.loader(batch_size=2, seed=3).state_dict()
    process.send_signal(signal.SIGCONT)
    first = view.batch([0])["input_ids"].clone()
    found = served(view)
    assert process.wait(60) == 0
    finished = open_cache(tmp_path / "cache", follow=True)
    expected = rows_of(finished)
    assert same(found, served(expected))
    assert torch.equal(first[0], expected[0]["input_ids"])
    assert not CachePaths(tmp_path / "cache").pending.exists()
    expected.loader(batch_size=2, seed=3).load_state_dict(state)  # it is the same plan
    assert len(finished.rows(pack=64)) > COUNT


def test_a_build_that_dies_is_said_and_the_next_one_is_followed_on(data, tmp_path):
    process = start(data, tmp_path / "cache")
    pending = open_cache(tmp_path / "cache", follow=True, timeout_s=0.5)
    view = rows_of(pending)
    with pytest.raises(NotYetEncodedError, match=f"runs as process {process.pid}") as caught:
        view.batch([COUNT - 1])
    assert f"data.jsonl:{COUNT} was not encoded within 0.5 s" in str(caught.value)
    assert "open_cache(..., timeout_s=...)" in caught.value.fix
    os.kill(process.pid, signal.SIGKILL)
    process.wait(60)
    with pytest.raises(NotYetEncodedError, match="not running") as caught:
        served(view)
    assert "--stream" in caught.value.fix
    build(data, tmp_path / "cache", stream=True)
    assert same(served(view), served(rows_of(open_cache(tmp_path / "cache"))))
