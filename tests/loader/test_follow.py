"""Streaming builds: lengths are exact at once, and batches equal the finished cache."""

import subprocess
import sys

import pytest
import torch
from small_tokens import texts, write_texts

from latentcache import open_cache
from latentcache.errors import CacheNotFoundError, UsageError


def streaming(data, cache, *words):
    command = [sys.executable, "-m", "latentcache", "build", str(data), "--out", str(cache), "--stream", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def test_rows(tmp_path):
    build = streaming(write_texts(tmp_path / "t.jsonl", texts(60, 400)), tmp_path / "c", "--tokenizer", "stub")
    cache = open_cache(tmp_path / "c", follow=True, timeout_s=60)
    words = {"pad": 128, "overflow": "truncate_right", "no_loss": "error"}
    if cache.snapshots[0].pending is not None:
        for bad in ({"pack": 128}, {"pad": 128}):
            with pytest.raises(UsageError, match="not while the cache is being built"):
                cache.rows(**bad)
    loader = cache.rows(**words).loader(batch_size=8)
    assert len(loader) == 8
    followed = [batch["labels"].clone() for batch in loader]
    assert build.wait() == 0
    finished = open_cache(tmp_path / "c").rows(**words).loader(batch_size=8)
    assert all(torch.equal(batch["labels"], labels) for batch, labels in zip(finished, followed, strict=True))
    finished.load_state_dict(loader.state_dict())


def test_no_streaming_build(tmp_path):
    with pytest.raises(CacheNotFoundError):
        open_cache(tmp_path / "none", follow=True, timeout_s=0.1)
