"""Unsloth: ``expected sequence of length 4096 at dim 1 (got 3999)``, with dynamic padding.

The collator pads known columns only. Here the plan decides the row length, and ids, masks and labels are padded
together. The tests fail if a row is as long as its document.
"""

import pytest
import small_tokens
import torch
from torch.utils.data import DataLoader

from latentcache import open_cache
from latentcache.errors import PlanError

LENGTHS = [4096, 3999, 17, 2048]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ragged")
    (folder / "texts.jsonl").write_text("".join(f'{{"text": "{"x" * (length - 1)}"}}\n' for length in LENGTHS))
    small_tokens.build(folder / "texts.jsonl", folder / "cache")
    return open_cache(folder / "cache")


@pytest.mark.parametrize("kind", ["pad", "pack", "chunk"])
def test_the_same_lengths_make_batches_of_one_length_here(cache, kind):
    assert cache.documents().tokens == sum(LENGTHS)
    view = cache.rows(**{kind: 4096})
    loaders = [view.loader(batch_size=2), DataLoader(view, batch_size=2, collate_fn=view.collator(), shuffle=True)]
    for batches in loaders:
        for batch in batches:
            assert batch.pop("use_cache", False) is False
            assert all(isinstance(tensor, torch.Tensor) for tensor in batch.values())
            assert {tensor.shape[1] for tensor in batch.values()} == {4096}


def test_long_rows_are_not_cut_silently(cache):
    with pytest.raises(PlanError, match="1 document longer than 4095 tokens") as caught:
        cache.rows(pad=4095, overflow="error")
    assert caught.value.where == "texts.jsonl:1 (4096 tokens)"
    assert cache.rows(pad=4095, overflow="truncate_right").tokens_dropped["truncated"] == 1
