"""Epochs of tokens: exact, equal on all ranks, resumed in the middle, with several lengths and with workers."""

import json
import pickle
from collections import Counter

import pytest
import torch
from made_tokens import cache_of, texts
from torch.utils.data import DataLoader

from latentcache.errors import EmptyPlanError, PlanError, UsageError
from latentcache.loader.iterable import as_iterable
from latentcache.loader.token_loader import TokenLoader
from latentcache.loader.token_mix import combine_views

TEXTS = [[number + 2, *row[1:]] for number, row in enumerate(texts(41, 60))]  # the first id tells the document


def a_view(**words):
    return cache_of(TEXTS).padded(64, **words)


def rows_of(batches):
    """The documents of each batch."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def test_the_length_is_what_comes_and_every_row_does():
    loader = a_view().loader(batch_size=4, seed=3)
    assert isinstance(loader, TokenLoader)
    epochs = []
    for epoch in (0, 1):
        loader.set_epoch(epoch)
        epochs.append(rows_of(loader))
        assert len(epochs[-1]) == len(loader) == 11
        assert {number for rows in epochs[-1] for number in rows} == {document[0] for document in TEXTS}
    assert epochs[0] != epochs[1]
    assert rows_of(loader) == epochs[1]
    assert (loader.steps(2, grad_accum=4), loader.epoch_at(3, grad_accum=4), loader.epoch_at(4, grad_accum=4)) == (
        6,
        1.0,
        1 + 4 / 11,
    )


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
def test_ranks_have_equal_steps_of_equal_shape(policy, world_size, lengths):
    view = a_view(lengths=lengths)
    words = {"batch_size": 2, "world_size": world_size, "small_buckets": policy}
    report = view.plan(**words)
    ranks = [list(view.loader(rank=rank, **words)) for rank in range(world_size)]
    assert [len(batches) for batches in ranks] == [report.steps] * world_size
    for step in zip(*ranks, strict=True):
        assert len({batch["labels"].shape for batch in step}) == 1
    served = Counter(number for batches in ranks for rows in rows_of(batches) for number in rows)
    assert len(served) == len(TEXTS) - report.samples_dropped
    assert sum(served.values()) == report.samples_used + report.samples_repeated


@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
@pytest.mark.parametrize("steps", [0, 3, 10])
def test_a_resumed_epoch_is_the_rest_of_it(lengths, steps):
    whole = a_view(lengths=lengths).loader(batch_size=4, seed=1)
    whole.set_epoch(2)
    expected = rows_of(whole)
    passing = iter(whole := a_view(lengths=lengths).loader(batch_size=4, seed=1))
    whole.set_epoch(2)
    head = [next(passing) for _ in range(steps)]
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = a_view(lengths=lengths).loader(batch_size=4, seed=99)
    resumed.load_state_dict(state)
    assert (resumed.epoch, resumed.seed, len(resumed), resumed.remaining()) == (
        2,
        1,
        len(expected),
        len(expected) - steps,
    )
    assert rows_of(head) + rows_of(resumed) == expected
    assert rows_of(resumed) == expected


@pytest.mark.parametrize(("before", "after"), [((2, 3), (3, 2)), ((2, 2), (8, 1)), ((4, 1), (1, 3))])
@pytest.mark.parametrize("lengths", [None, [16, 32, 64]])
def test_another_number_of_ranks_goes_on_without_loss(lengths, before, after):
    size, world = before
    ranks = [
        iter(a_view(lengths=lengths).loader(batch_size=size, world_size=world, rank=rank)) for rank in range(world)
    ]
    one = a_view(lengths=lengths).loader(batch_size=size, world_size=world)
    passing = iter(one)
    served = [next(passing) for _ in range(3)]
    served += [next(rank) for rank in ranks[1:] for _ in range(3)]
    state = one.state_dict()
    size, world = after
    for rank in range(world):
        resumed = a_view(lengths=lengths).loader(batch_size=size, world_size=world, rank=rank)
        resumed.load_state_dict(state)
        rest = list(resumed)
        assert len(rest) > 0
        served += rest
    counts = Counter(number for rows in rows_of(served) for number in rows)
    assert set(counts) == {document[0] for document in TEXTS}
    assert sum(counts.values()) - len(counts) < 2 * before[0] * before[1] + 4 * after[0] * after[1]


@pytest.mark.parametrize(("before", "after"), [((4, 1), (6, 1)), ((2, 3), (5, 1)), ((7, 1), (1, 2))])
def test_epochs_after_a_resume_with_other_sizes_are_those_of_the_new_sizes(before, after):
    """The resumed epoch keeps the lengths that it began with; nothing of them is left in the next one."""
    view = a_view(lengths=[16, 32, 64])
    old = view.loader(batch_size=before[0], world_size=before[1], small_buckets="drop")
    words = {"batch_size": after[0], "world_size": after[1], "small_buckets": "drop"}
    fresh, resumed = view.loader(**words), view.loader(**words)
    next(iter(old))
    resumed.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert len(resumed) == len(fresh)
    next(passing := iter(resumed))
    again = view.loader(**words)
    again.load_state_dict(json.loads(json.dumps(resumed.state_dict())))
    assert rows_of(again) == rows_of(passing)
    for loader in (resumed, again):
        for epoch in (1, 2):
            loader.set_epoch(epoch)
            fresh.set_epoch(epoch)
            assert [batch["input_ids"].tolist() for batch in loader] == [b["input_ids"].tolist() for b in fresh]
            assert loader.state_dict() == fresh.state_dict()


def test_a_checkpoint_of_other_rows_is_refused():
    state = a_view().loader(batch_size=4).state_dict()
    for other in (cache_of(TEXTS).padded(65), cache_of(TEXTS[:-1]).padded(64), cache_of(TEXTS).packed(64)):
        with pytest.raises(PlanError, match="another cache"):
            other.loader(batch_size=4).load_state_dict(state)
    with pytest.raises(PlanError, match="another policy"):
        a_view().loader(batch_size=4, small_buckets="drop").load_state_dict(state)


def test_several_lengths_waste_less_and_skip_nothing():
    loader = a_view(lengths=[16, 32, 64]).loader(batch_size=4)
    shapes = Counter(tuple(batch["input_ids"].shape) for batch in loader)
    assert set(shapes) == {(4, 16), (4, 32), (4, 64)}
    assert {number for rows in rows_of(loader) for number in rows} == {document[0] for document in TEXTS}
    assert sum(shapes.values()) == len(a_view().loader(batch_size=4))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_serve_the_same_epoch(workers):
    expected = rows_of(a_view().loader(batch_size=4))
    loader = a_view().loader(batch_size=4, prefetch=0)
    assert rows_of(DataLoader(loader, batch_size=None, num_workers=workers)) == expected
    stream = DataLoader(as_iterable(loader), batch_size=None, num_workers=workers)
    assert (len(stream), rows_of(stream)) == (len(expected), expected)


def test_it_travels_and_closes():
    with a_view().loader(batch_size=4) as loader:
        expected = rows_of(loader)
        assert rows_of(pickle.loads(pickle.dumps(loader))) == expected
        passing = iter(loader)
        next(passing)
        loader.close()
        with pytest.raises(UsageError, match="closed after"):
            list(passing)
    assert rows_of(loader) == expected
    assert loader.sampler is loader


def test_names_of_trainers():
    view = cache_of(TEXTS).packed(64)
    assert set(next(iter(view.loader(batch_size=2, format="transformers")))) == {
        "input_ids",
        "labels",
        "position_ids",
    }
    flat = next(iter(view.loader(batch_size=2, format="flat")))
    assert flat["input_ids"].shape == (1, 128)
    with pytest.raises(UsageError, match="position_ids"):
        a_view().loader(batch_size=2, format="flat")


@pytest.mark.parametrize(
    "words", [{"rank": 1}, {"prefetch": -1}, {"format": "x"}, {"batch_size": 0}, {"small_buckets": "x"}]
)
def test_settings_that_cannot_be(words):
    with pytest.raises(UsageError):
        a_view().loader(**({"batch_size": 2} | words))


def test_an_epoch_of_no_steps_is_refused():
    with pytest.raises(EmptyPlanError, match="batch size 50") as caught:
        a_view().loader(batch_size=50, small_buckets="drop")
    assert "batch_size=41" in caught.value.fix
    loader = a_view().loader(batch_size=2)
    with pytest.raises(IndexError):
        loader[len(loader)]


def test_batches_are_tensors_that_own_their_memory():
    loader = a_view().loader(batch_size=4)
    kept = list(loader)
    again = [batch["labels"].clone() for batch in kept]
    list(loader)
    assert all(torch.equal(batch["labels"], labels) for batch, labels in zip(kept, again, strict=True))


@pytest.mark.parametrize("change", [{"legs": [["x", 1, 0]]}, {"legs": [[0, 1, 0]]}, {"legs": [[4, 1, -1]]}, None])
def test_a_damaged_checkpoint_is_refused_and_changes_nothing(change):
    loader = a_view(lengths=[16, 32, 64]).loader(batch_size=4)
    before = loader.state_dict()
    with pytest.raises(PlanError, match="this checkpoint's position") as caught:
        loader.load_state_dict(None if change is None else {**before, **change})
    assert caught.value.slug == "resume-version"
    assert loader.state_dict() == before


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial", "mask"])
@pytest.mark.parametrize(("before", "after"), [((4, 1), (3, 2)), ((2, 2), (8, 1)), ((3, 1), (2, 1))])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_length_is_skipped_when_sizes_change_in_an_epoch(policy, before, after, weighted):
    """What fills no step of its length at the new size goes with longer rows, at one length on all ranks."""
    view = a_view(lengths=[16, 32, 64])
    if weighted:
        view = combine_views([view], weights=[1], rows=41)  # each row once, by way of weights
    size, world = before
    one = view.loader(batch_size=size, world_size=world, small_buckets=policy, seed=3)
    others = [
        iter(view.loader(batch_size=size, world_size=world, rank=rank, small_buckets=policy, seed=3))
        for rank in range(1, world)
    ]
    passing = iter(one)
    served = [next(rank) for _ in range(3) for rank in (passing, *others)]
    state = json.loads(json.dumps(one.state_dict()))
    size, world = after
    ranks = []
    for rank in range(world):
        resumed = view.loader(batch_size=size, world_size=world, rank=rank, small_buckets=policy)
        resumed.load_state_dict(state)
        ranks.append(list(resumed))
    for step in zip(*ranks, strict=True):
        assert len({batch["labels"].shape for batch in step}) == 1
    shapes = {batch["labels"].shape for batches in ranks for batch in batches}
    assert {shape[1] for shape in shapes} <= {16, 32, 64}
    counts = Counter(
        number
        for batch in [*served, *(batch for batches in ranks for batch in batches)]
        for number, fills in zip(batch["input_ids"][:, 0].tolist(), pads(batch), strict=True)
        if not fills
    )
    missing, more = len(TEXTS) - len(counts), counts.total() - len(counts)
    step_size = size * world
    assert missing < (step_size if policy == "drop" else 1)
    assert more < {"repeat": step_size, "partial": world}.get(policy, 1) + (before[0] * before[1])
    if policy in ("drop", "mask"):
        assert more == 0


def pads(batch):
    return batch["is_pad_row"].tolist() if "is_pad_row" in batch else [False] * len(batch["labels"])


def test_a_second_size_of_an_older_version_is_refused():
    one = a_view(lengths=[16, 32, 64]).loader(batch_size=4)
    state = one.state_dict()
    del state["upward"]
    one.load_state_dict(state)
    with pytest.raises(PlanError, match="cannot be read") as caught:
        one.load_state_dict({**state, "legs": [[4, 1, 2], [2, 1, 1]]})
    assert "other sizes" in caught.value.why
    assert "upward" not in a_view().loader(batch_size=4).state_dict()
