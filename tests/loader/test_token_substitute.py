"""A row of tokens that cannot be read is replaced as a picture is: the same one each time, said, counted, bounded."""

import json
import pickle
from collections import Counter

import numpy as np
import pytest
from made_tokens import cache_of, texts
from small_tokens import build, tamper, write_texts
from small_tokens import texts as written
from torch.utils.data import DataLoader

from latentcache.errors import CacheDamagedError, CorruptEntryError, UsageError
from latentcache.loader.iterable import as_iterable
from latentcache.loader.token_mix import combine_views
from latentcache.loader.token_opening import open_tokens
from latentcache.store.documents import MemoryTokens

WARNED = "ignore:the tokens of"
TEXTS = [[number + 2, *row[1:]] for number, row in enumerate(texts(41, 60))]  # the first id tells the document
BAD = 7


class Hurt(MemoryTokens):
    """Documents of which those of ``bad`` cannot be read."""

    def ids(self, document):
        if document in self.bad:
            raise CorruptEntryError("a document is damaged", where="memory", why="tested", fix="none")
        return super().ids(document)

    def gather(self, document, start, length, out, at):
        for number in set(np.asarray(document).tolist()) & set(self.bad):
            self.ids(number)
        super().gather(document, start, length, out, at)


def hurt(kind="padded", ids=TEXTS, bad=(BAD,), **words):
    cache = cache_of(ids)
    cache.store.__class__, cache.store.bad = Hurt, bad
    return getattr(cache, kind)(64, **words)


def substituting(view, **words):
    return view.loader(**{"batch_size": 4, "on_bad": "substitute"} | words)


def rows_of(batches):
    return [tuple(row.tolist()) for batch in batches for row in batch["input_ids"]]


def test_the_default_is_an_error_that_names_the_line():
    with pytest.raises(CorruptEntryError, match="memory:8"):
        list(hurt().loader(batch_size=4))
    assert hurt().loader(batch_size=4).substituted == {}


@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
def test_another_row_of_its_length_takes_its_place(lengths):
    whole = {batch[0]: batch for batch in rows_of(cache_of(TEXTS).padded(64).loader(batch_size=1))}
    view = hurt(lengths=lengths)
    loader = substituting(view)
    with pytest.warns(UserWarning, match=r"the tokens of memory:8 are damaged, so row \d+ \(memory:\d+\) is served"):
        batches = list(loader)
    assert len(batches) == len(loader)
    ((name, times),) = loader.substituted.items()
    assert (name, times) == (f"row {BAD} (memory:8)", 1)
    found = Counter(row[0] for row in rows_of(batches))
    assert TEXTS[BAD][0] not in found
    assert found.total() == 44
    for row in rows_of(batches):
        assert row == whole[row[0]][: len(row)]


@pytest.mark.filterwarnings(WARNED)
@pytest.mark.parametrize("kind", ["padded", "packed", "blocks"])
def test_repeating_resuming_and_workers_give_the_same_and_epochs_do_not(kind):
    view = hurt(kind)
    words = {"max_substitutes": 9, "seed": 1}
    order = rows_of(substituting(view, **words))
    loader = substituting(view, **words)
    assert rows_of(loader) == rows_of(loader) == order
    passing = iter(loader)
    head = rows_of(next(passing) for _ in range(3))
    resumed = substituting(view, max_substitutes=9, seed=8)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert head + rows_of(resumed) == order
    one = substituting(view, prefetch=0, **words)
    for source in (one, pickle.loads(pickle.dumps(one))):
        assert [row for step in range(len(one)) for row in rows_of([source[step]])] == order
    if kind == "padded":
        stand_ins = set()
        for epoch in range(8):
            loader.set_epoch(epoch)
            times = Counter(row[0] for row in rows_of(loader))
            stand_ins.add(tuple(sorted(first for first, count in times.items() if count > 1)))
        assert len(stand_ins) > 4


@pytest.mark.filterwarnings(WARNED)
def test_of_its_own_data_set_where_there_are_weights_and_lengths():
    few = [[3, *row[1:]] for row in texts(12, 20, seed=9)]
    many = [[2, *row[1:]] for row in texts(60, 60, seed=8)]
    for lengths in (None, [16, 32, 64]):
        views = [hurt(ids=few, bad=(0, 3), lengths=lengths), cache_of(many).padded(64, lengths=lengths)]
        both = combine_views(views, weights=[1, 2], names=["few", "many"])
        loader = substituting(both, max_substitutes=12)
        assert Counter(row[0] for row in rows_of(loader)) == Counter(
            {3: loader.served()["few"].samples, 2: loader.served()["many"].samples}
        )
        assert set(loader.substituted) == {"row 0 (memory:1)", "row 3 (memory:4)"}


@pytest.mark.filterwarnings(WARNED)
def test_a_row_that_only_fills_may_be_bad_too():
    view = hurt(bad=tuple(range(0, 41, 2)))
    loader = substituting(view, small_buckets="mask", max_substitutes=41)
    batches = list(loader)
    assert sum(int(batch["is_pad_row"].sum()) for batch in batches) == 3
    assert all((batch["labels"][batch["is_pad_row"]] == -100).all() for batch in batches)


@pytest.mark.filterwarnings(WARNED)
def test_more_than_a_limit_is_an_error():
    with pytest.raises(CacheDamagedError, match="more than 1 of 41 samples are damaged or missing"):
        list(substituting(hurt(bad=(3, BAD))))
    assert len(list(substituting(hurt(bad=(3, BAD)), max_substitutes=2))) == 11
    with pytest.raises(CacheDamagedError, match="no entry of bucket 1x64"):
        list(substituting(hurt(bad=tuple(range(41))), max_substitutes=41))
    for words in ({"on_bad": "skip"}, {"max_substitutes": -1}):
        with pytest.raises(UsageError):
            substituting(hurt(), **words)


@pytest.mark.filterwarnings(WARNED)
def test_a_damaged_block_of_a_cache_on_disk(tmp_path):
    data = write_texts(tmp_path / "texts.jsonl", written(200, 4000))
    build(data, tmp_path / "cache")
    whole = len(open_tokens(tmp_path / "cache").padded(4096, idle="drop"))
    tamper(tmp_path / "cache")
    view = open_tokens(tmp_path / "cache").padded(4096)
    with pytest.raises(CorruptEntryError, match=r"texts.jsonl:\d+"):
        list(view.loader(batch_size=8))
    loader = substituting(view, batch_size=8, max_substitutes=whole)
    assert sum(len(batch["labels"]) for batch in loader) >= whole
    assert 0 < len(loader.substituted) < whole
    stream = DataLoader(as_iterable(substituting(view, prefetch=0, max_substitutes=whole)), batch_size=None)
    assert len(list(stream)) == len(stream)
