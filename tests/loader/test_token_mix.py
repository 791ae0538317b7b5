from collections import Counter

import pytest
from made_tokens import cache_of, texts
from torch.utils.data import DataLoader

from latentcache.errors import PlanError, UsageError
from latentcache.loader.iterable import as_iterable
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


LENGTHS = (16, 32, 64)
POLICIES = ["repeat", "drop", "partial", "error"]


def firsts(batches):
    return Counter(first for batch in batches for first in batch["input_ids"][:, 0].tolist())


def by_length(rows=None, weights=(2, 1)):
    return combine_views(views(lengths=LENGTHS), weights=weights, rows=rows)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("rows", [24, 48, 72])
def test_shares_are_exact_at_several_lengths(policy, rows):
    loader = by_length(rows).loader(batch_size=8, small_buckets=policy)
    report = by_length(rows).plan(batch_size=8, small_buckets=policy)
    assert (report.steps, report.samples_repeated, report.samples_dropped) == (rows // 8, 0, 0)
    for epoch in range(3):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == loader.remaining() + rows // 8 == rows // 8
        assert firsts(batches) == {2: rows * 2 // 3, 3: rows // 3}
        assert {len(batch["labels"]) for batch in batches} == {8}
        assert {batch["labels"].shape[1] for batch in batches} <= set(LENGTHS)


@pytest.mark.parametrize(("policy", "steps", "served"), [("repeat", 6, 48), ("drop", 5, 40), ("partial", 6, 44)])
def test_only_the_end_of_an_epoch_is_uneven(policy, steps, served):
    ranks = [
        by_length(43).loader(batch_size=4, rank=rank, world_size=2, small_buckets=policy, seed=3) for rank in (0, 1)
    ]
    for epoch in range(3):
        for loader in ranks:
            loader.set_epoch(epoch)
        batches = [list(loader) for loader in ranks]
        assert [len(some) for some in batches] == [len(loader) for loader in ranks] == [steps, steps]
        assert sum(firsts(some).total() for some in batches) == served
        for one, other in zip(*batches, strict=True):
            assert one["labels"].shape == other["labels"].shape


def test_several_lengths_are_used_and_all_rows_come_in_turn():
    loader = by_length(48).loader(batch_size=4)
    seen, shapes = set(), Counter()
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader:
            shapes[batch["labels"].shape[1]] += 1
            seen |= {tuple(row[row != 1].tolist()) for row in batch["input_ids"]}
    assert set(shapes) == set(LENGTHS)
    assert len(seen) == 70


@pytest.mark.parametrize("steps", [0, 3, 8])
@pytest.mark.parametrize("after", [(6, 1, 1), (3, 2, 1), (4, 1, 2), (12, 1, 1)])
def test_a_share_goes_on_with_another_batch_size(steps, after):
    size, world, resumes = after
    passing = iter(one := by_length(48).loader(batch_size=6, seed=5))
    one.set_epoch(2)
    got = [next(passing) for _ in range(steps)]
    state = one.state_dict()
    for _ in range(resumes - 1):  # a second checkpoint in the same epoch
        middle = by_length(48).loader(batch_size=size)
        middle.load_state_dict(state)
        rest = iter(middle)
        got += [next(rest) for _ in range(min(2, middle.remaining()))] if steps < 8 else []
        state = middle.state_dict()
    ranks = [by_length(48).loader(batch_size=size, world_size=world, rank=rank) for rank in range(world)]
    for loader in ranks:
        loader.load_state_dict(state)
        if loader.remaining():
            got += list(loader)
        assert len(loader) == -(-48 // (size * world))
    counts = firsts(got)
    assert counts[2] >= 32
    assert counts[3] >= 16
    assert counts.total() - 48 < 3 * size * world  # what fills no batch of its length
    if (size * world, resumes) == (6, 1):
        assert counts == {2: 32, 3: 16}
    got = []
    for loader in ranks:
        loader.set_epoch(3)
        got += list(loader)
    assert firsts(got) == {2: 32, 3: 16}  # the next epoch is laid out for the new size


def test_workers_and_single_steps_serve_the_same():
    loader = by_length(48).loader(batch_size=6, prefetch=0)
    loader.set_epoch(1)
    expected = [batch["input_ids"].tolist() for batch in loader]
    assert [loader[step]["input_ids"].tolist() for step in range(len(loader))] == expected
    for source in (loader, as_iterable(loader)):
        found = [batch["input_ids"].tolist() for batch in DataLoader(source, batch_size=None, num_workers=2)]
        assert found == expected


def test_a_checkpoint_of_several_lengths_holds_the_shares():
    state = by_length(48).loader(batch_size=6).state_dict()
    for other in (by_length(24), combine_views(views(lengths=LENGTHS))):
        with pytest.raises(PlanError):
            other.loader(batch_size=6).load_state_dict(state)
    with pytest.raises(PlanError, match="other weights"):
        by_length(48, weights=(1, 1)).loader(batch_size=6).load_state_dict(state)


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
