"""Rows that a caller names himself: served as they are, or refused before anything is read."""

import numpy as np
import pytest
import torch
from made_tokens import cache_of, texts
from small_cache import build, draw_four

from latentcache.errors import UsageError
from latentcache.geometry.sizes import Size
from latentcache.loader.asked_rows import checked_rows, require_one_bucket
from latentcache.loader.cache import open_cache

GOOD = [[1, 0, 1], (2,), range(3), np.array([0, 2], dtype=np.uint8), torch.tensor([2, 1])]
WRONG = [[], [3], [-1], [0.5], ["a"], None, 1, "12", [True], np.array([[0, 1]]), [[0], [1, 2]], list(range(99))]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("asked")
    build(draw_four(folder / "data"), folder / "cache", flip=True)
    return open_cache(folder / "cache")


@pytest.mark.parametrize("rows", GOOD, ids=repr)
def test_numbers_of_rows(rows):
    assert checked_rows(rows, 3).tolist() == [int(row) for row in rows]


@pytest.mark.parametrize("rows", WRONG, ids=lambda rows: repr(rows)[:20])
def test_what_are_no_numbers_of_rows(rows):
    with pytest.raises(UsageError, match="a batch of the rows") as caught:
        checked_rows(rows, 3)
    assert "0 to 2" in caught.value.why
    assert len(caught.value.what) < 100


def test_rows_of_several_buckets_are_named():
    sizes = [Size(64, 64), Size(48, 80), Size(80, 48)]
    require_one_bucket(np.array([5, 7]), np.array([1, 1]), sizes)
    with pytest.raises(UsageError, match="2 buckets") as caught:
        require_one_bucket(np.array([5, 6, 7]), np.array([2, 0, 2]), sizes)
    assert caught.value.where == "row 6: 64x64, row 5: 80x48"


def test_a_loader_of_pictures_refuses_rows_of_two_buckets_and_damages_nothing(pictures):
    loader = pictures.loader(batch_size=1)
    bucket = pictures.generation.rows.bucket.tolist()
    one, other = 0, next(row for row in range(4) if bucket[row] != bucket[0])
    with pytest.raises(UsageError, match="rows of 2 buckets") as caught:
        loader.batch([one, other])
    for row in (one, other):
        assert f"row {row}: {pictures.generation.buckets[bucket[row]]}" in caught.value.where
    alike = [row for row in range(4) if bucket.count(bucket[row]) == 2]
    assert loader.batch(alike)["names"] == [f"p{row}.png" for row in alike]
    for wrong in ([4], [], ["a"]):  # mirror images have no number of their own
        with pytest.raises(UsageError, match="0 to 3"):
            loader.batch(wrong)
    for epoch in (-1, 1.5, "x"):
        with pytest.raises(UsageError, match="epoch"):
            loader.batch([0], epoch)


def test_a_loader_of_tokens_refuses_entries_of_two_lengths_and_rows_that_are_longer():
    documents = texts(20, 60)
    one_length = cache_of(documents).padded(64).loader(batch_size=2)
    assert one_length.batch([19, 0])["input_ids"][:, 0].tolist() == [documents[19][0], documents[0][0]]
    view = cache_of(documents).padded(64, lengths=[16, 32, 64])
    loader = view.loader(batch_size=2)
    plan = loader.position.whole()
    served = [loader.batch(plan.batch(step)) for step in range(len(plan))]
    assert [batch["input_ids"].tolist() for batch in served] == [batch["input_ids"].tolist() for batch in loader]
    shapes = {batch["input_ids"].shape[1]: plan.batch(step) for step, batch in enumerate(served)}
    with pytest.raises(UsageError, match="rows of 2 buckets"):
        loader.batch(np.concatenate([shapes[16], shapes[64]]))
    with pytest.raises(UsageError, match="tokens, its length is 16"):
        loader.batch([int(np.argmax(view.row_lengths))])
    with pytest.raises(UsageError, match="0 to 59"):
        loader.batch([60])
