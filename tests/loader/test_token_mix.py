from collections import Counter

import pytest
from made_tokens import cache_of, texts

from latentcache.errors import PlanError, UsageError
from latentcache.loader.token_mix import combine_views

MANY = [[2, *row] for row in texts(60, 30, seed=1)]
FEW = [[3, *row] for row in texts(10, 60, seed=2)]


def views(**words):
    return [cache_of(ids).padded(64, **words) for ids in (MANY, FEW)]


def served(view, epoch=0, **words):
    loader = view.loader(batch_size=1, **words)
    loader.set_epoch(epoch)
    return [(batch["input_ids"][0, 0].item(), batch["input_ids"][0].tolist()) for batch in loader]


def test_without_weights_every_row_comes_once():
    both = combine_views(views())
    assert len(both) == 70
    assert Counter(first for first, _ in served(both)) == {2: 60, 3: 10}
    batch = both.batch([65, 1, 60, 59])
    assert batch["input_ids"][:, 0].tolist() == [3, 2, 3, 2]
    expected = [views()[0].batch([1, 59]), views()[1].batch([5, 0])]
    assert batch["labels"][[1, 3]].tolist() == expected[0]["labels"].tolist()
    assert batch["labels"][[0, 2]].tolist() == expected[1]["labels"].tolist()


def test_shares_of_rows_are_exact_in_every_epoch():
    mixed = combine_views(views(), weights=[2, 1], rows=30)
    for epoch in range(3):
        assert Counter(first for first, _ in served(mixed, epoch)) == {2: 20, 3: 10}
    assert len({str(row) for epoch in range(3) for first, row in served(mixed, epoch) if first == 2}) == 60
    assert [data.samples for data in mixed.plan(batch_size=1).datasets] == [20, 10]


def test_shares_of_tokens():
    mixed = combine_views(views(), weights=["0.5", "0.5"], by="tokens")
    tokens = Counter()
    for first, row in served(mixed):
        tokens[first] += len([number for number in row if number != 1]) + 1
    assert tokens[2] == pytest.approx(tokens[3], rel=0.05)


def test_shares_of_documents():
    packed = [cache_of(ids).packed(128) for ids in (MANY, FEW)]
    mixed = combine_views(packed, weights=[6, 1], by="documents")
    counts = [data.samples for data in mixed.plan(batch_size=1).datasets]
    assert counts == [len(packed[0]), len(packed[1])]  # 60 and 10 documents are 6 to 1 as they are


def test_a_checkpoint_holds_the_shares():
    loader = combine_views(views(), weights=[2, 1]).loader(batch_size=2)
    state = loader.state_dict()
    with pytest.raises(PlanError, match="other weights"):
        combine_views(views(), weights=[1, 1]).loader(batch_size=2).load_state_dict(state)


def test_what_cannot_be_combined():
    one, other = views()
    mixed = combine_views([one, other], weights=[1, 1])
    foreign = cache_of(FEW, num_ids=2000).padded(64)
    for some in ([], [one, mixed], [one, cache_of(FEW).padded(63)], [one, cache_of(FEW).packed(64)], [one, foreign]):
        with pytest.raises(UsageError):
            combine_views(some)
    for words in (
        {"rows": 3},
        {"weights": [1]},
        {"weights": [1, 0]},
        {"weights": [1, "x"], "by": "tokens"},
        {"by": "x"},
    ):
        with pytest.raises(UsageError):
            combine_views([one, other], **words)
