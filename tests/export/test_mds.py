import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_documents import CORPORA
from read_formats import read_mds
from small_tokens import build, texts, write_texts

from latentcache import open_cache
from latentcache.export import tokens
from latentcache.export.shards import array, sample
from latentcache.export.tokens import DTYPES, write_mds, write_splits


class Rows:
    """Rows of given ids, padded on the right."""

    def __init__(self, rows, length):
        self.rows, self.length = rows, length

    def __len__(self):
        return len(self.rows)

    def batch(self, rows):
        ids = np.zeros((len(rows), self.length), dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(self.rows[row])] = self.rows[row]
            mask[number, : len(self.rows[row])] = 1
        return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)}


def export(rows, out, num_ids=300, **more):
    dtype = DTYPES["uint16" if num_ids <= 1 << 16 else "uint32"]
    write_splits(rows, partial(write_mds, out, dtype=dtype), **more)


@given(CORPORA, st.sampled_from([1, 260, 1 << 26]))
def test_rows_round_trip(tmp_path_factory, corpus, size):
    num_ids, rows = corpus
    out = tmp_path_factory.mktemp("mds") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "SHARD_BYTES", size)
        patch.setattr(tokens, "BATCH_ROWS", 5)
        export({"train": Rows(rows, 9)}, out, num_ids)
    assert read_mds(out / "train") == rows
    shards = json.loads((out / "train/index.json").read_text())["shards"]
    assert len(shards) == (len(rows) if size == 1 else len(shards))
    assert all(shard["raw_data"]["bytes"] <= max(size, 400) for shard in shards)


def test_rows_of_a_cache(tmp_path):
    """Padded rows hold documents; chunks hold the concatenation."""
    lines = texts(20)
    build(write_texts(tmp_path / "data.jsonl", lines), tmp_path / "cache")
    cache = open_cache(tmp_path / "cache")
    documents = [[*line.encode(), 257] for line in lines]
    string = [token for document in documents for token in document]
    export(
        {"train": cache.rows(pad=128), "validation": cache.rows(chunk=8, last_chunk="drop")}, tmp_path / "out", 258
    )
    assert read_mds(tmp_path / "out/train") == documents
    rows = read_mds(tmp_path / "out/validation")
    assert rows == [string[at : at + 8] for at in range(0, len(string) - 7, 8)]


@pytest.mark.parametrize("length", [1, 255, 256, 65_535, 65_536, 70_000])
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_a_sample_is_as_long_as_the_format_says(length, dtype):
    data = sample([array(np.arange(length, dtype=dtype))])
    side = 1 if length < 256 else 2 if length < 65_536 else 4
    assert len(data) == 4 + 1 + side + length * np.dtype(dtype).itemsize
    assert data[:4] == (len(data) - 4).to_bytes(4, "little")
    assert data[4] == {1: 4, 2: 5, 4: 6}[side]
