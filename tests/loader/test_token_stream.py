import pytest
import torch
from made_tokens import cache_of, texts
from torch.utils.data import DataLoader

from latentcache.errors import UsageError
from latentcache.loader.token_formats import TokenCollator
from latentcache.loader.token_stream import as_rows

VIEW = cache_of(texts(41)).packed(40)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_dataloader_of_rows_gives_the_batches_of_the_loader(workers):
    loader = VIEW.loader(batch_size=4, seed=5)
    stream = as_rows(VIEW.loader(batch_size=4, seed=5))
    rows = DataLoader(stream, batch_size=4, num_workers=workers, collate_fn=TokenCollator("transformers"))
    for epoch in (0, 3):
        loader.set_epoch(epoch)
        stream.set_epoch(epoch)
        found = [batch["labels"] for batch in rows]
        expected = [batch["labels"] for batch in loader]
        assert (len(rows), len(stream)) == (len(loader), 4 * len(loader))
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_whole_batches_are_not_copied():
    stream = as_rows(VIEW.loader(batch_size=4))
    rows = [row for row, _ in zip(stream, range(4), strict=False)]
    batch = TokenCollator()(rows)
    assert batch["labels"].data_ptr() == rows[0]["labels"].data_ptr()


def test_a_pass_does_not_move_the_epoch():
    stream = as_rows(VIEW.loader(batch_size=4))
    first = [row["input_ids"].tolist() for row in stream]
    assert [row["input_ids"].tolist() for row in stream] == first


@pytest.mark.parametrize("words", [{"small_buckets": "partial"}, {"format": "flat"}])
def test_batches_that_could_not_be_made_again_are_refused(words):
    with pytest.raises(UsageError, match="rows of batches"):
        as_rows(VIEW.loader(batch_size=4, **words))
