import hashlib
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from made_caches import documents, images, latents_of, opened, texts
from torch.utils.data import DataLoader

from latentcache import combine, open_cache
from latentcache.errors import PlanError, UsageError
from latentcache.loader.loader import BatchIndex

WAYS = pytest.mark.parametrize("prefetch", [0, 2])


def digests(batches):
    """Hash the names and bytes of each batch of samples or rows."""
    first = lambda batch: batch["latents"] if "latents" in batch else batch["input_ids"]  # noqa: E731
    return [
        (batch.get("names"), hashlib.blake2b(first(batch).contiguous().view(-1).numpy().tobytes()).hexdigest())
        for batch in batches
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    root = documents(tmp_path_factory.mktemp("rows") / "t", texts(40, 60))
    return opened(root).rows(pad=64)


#: Sources of loaders, with a start method; a spawned child imports torch, which takes seconds.
CHILDREN = [("samples", "fork"), ("rows", "fork"), ("samples", "spawn")]


@pytest.fixture(params=["samples", "rows"])
def source(request, many, rows):
    return many if request.param == "samples" else rows


def test_a_batch_equals_the_stored_items(many):
    stored = latents_of(many)
    sizes = ["original_size", "crop_top_left", "target_size"]
    for batch in many.loader(batch_size=3):
        assert list(batch) == ["latents", "names", "captions", *sizes, "keys"]
        assert batch["latents"].dtype == torch.float16
        assert (batch["keys"]["latents"].shape, batch["keys"]["latents"].dtype) == ((3, 32), torch.uint8)
        for position, name in enumerate(batch["names"]):
            number = int(name[:2])
            latents = next(array for (sample, _, _), array in stored.items() if sample == number)
            assert np.array_equal(batch["latents"][position].numpy(), latents)
            assert batch["captions"][position] == f"caption of {name}"
            height, width = batch["target_size"][position].tolist()
            assert batch["original_size"][position].tolist() == [height + 3, width + 5]
            assert batch["crop_top_left"][position].tolist() == [number, 0]
            assert latents.shape[1:] == (height // 8, width // 8)
            key = many.snapshots[0].fields["latents"].row_keys(np.array([number]))[0]
            assert batch["keys"]["latents"][position].tolist() == key.tolist()


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial", "pad"])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (2, 2), (5, 3)])
def test_lengths_are_exact_and_shapes_equal_on_all_ranks(source, policy, batch_size, world_size):
    report = source.plan(batch_size=batch_size, world_size=world_size, remainder=policy)
    if not report.steps:
        return
    options = {"batch_size": batch_size, "world_size": world_size, "remainder": policy, "seed": 3}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a bucket of 5 at 15 samples a step
        loaders = [source.loader(rank=rank, **options) for rank in range(world_size)]
    epochs = [list(loader) for loader in loaders]
    assert {len(loader) for loader in loaders} == {len(epoch) for epoch in epochs} == {report.steps}
    first = "latents" if "latents" in epochs[0][0] else "input_ids"
    for step in zip(*epochs, strict=True):
        assert len({batch[first].shape for batch in step}) == 1
    served = sum(len(batch[first]) for epoch in epochs for batch in epoch)
    assert served == report.samples_used + report.samples_repeated + sum(part.padded for part in report.buckets)


def test_padding_of_samples_is_marked_and_never_given_to_a_trainer_format(many):
    batches = list(many.loader(batch_size=4, remainder="pad"))
    assert sum(int(batch["is_pad"].sum()) for batch in batches) == 6 * 4 - 17
    assert sorted(
        name for batch in batches for name, pad in zip(batch["names"], batch["is_pad"], strict=True) if not pad
    ) == [f"{number:02}.png" for number in range(17)]
    with pytest.raises(UsageError, match="remainder='pad': not with format"):
        many.loader(batch_size=4, remainder="pad", format="diffusers-sd", fields=["latents"])


@WAYS
def test_an_epoch_repeats_until_it_is_set(source, prefetch):
    loader = source.loader(batch_size=2, seed=5, prefetch=prefetch)
    first = digests(loader)
    assert digests(loader) == first
    loader.set_epoch(1)
    assert digests(loader) != first
    loader.set_epoch(0)
    assert digests(loader) == first == digests(source.loader(batch_size=2, seed=5))
    assert digests(source.loader(batch_size=2, seed=6)) != first


def test_mixed_resolutions_reuse_memory(tmp_path):
    """At most 2 % of the batches use fresh memory."""
    sizes = [(side, side + step) for side in (64, 96, 128, 160, 192) for step in (0, 32)]
    cache = opened(images(tmp_path / "c", [size for size in sizes for _ in range(2)], captions=False))
    loader = cache.loader(batch_size=2, fields=["latents"], prefetch=2)
    batches = 0
    for epoch in range(120):
        loader.set_epoch(epoch)
        batches += sum(1 for _ in loader)
    assert loader._pool.fresh <= 0.02 * batches


# resume


@pytest.mark.parametrize("done", [1, 4, 7])
def test_a_state_resumes_with_the_next_batch(source, done):
    loader = source.loader(batch_size=2, seed=4)
    loader.set_epoch(2)
    whole = digests(loader)
    iterator = iter(loader)
    head = digests([next(iterator) for _ in range(done)])
    state = pickle.loads(pickle.dumps(loader.state_dict()))
    assert (loader.remaining(), len(loader)) == (len(whole) - done, len(whole))
    iterator.close()
    other = source.loader(batch_size=2, seed=77, prefetch=0)
    other.load_state_dict(state)
    assert (other.epoch, other.seed, other.remaining(), len(other)) == (2, 4, len(whole) - done, len(whole))
    assert head + digests(other) == whole
    assert digests(other) == whole


@pytest.mark.parametrize("sizes", [(2, 1), (3, 2)], ids=["same sizes", "other sizes"])
@pytest.mark.parametrize("kind", ["samples", "rows", "mixture"])
def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next_epoch(many, rows, kind, sizes):
    mixture = combine(many.split(0.3), weights=[2, 1])
    view = {"samples": many, "rows": rows, "mixture": mixture}[kind]
    loader = view.loader(batch_size=2, seed=4)
    loader.set_epoch(2)
    assert len(list(loader)) == len(loader)
    make = lambda: view.loader(batch_size=sizes[0], rank=0, world_size=sizes[1], seed=4)  # noqa: E731
    other, expected = make(), make()
    other.load_state_dict(loader.state_dict())
    assert (other.epoch, other.remaining()) == (3, len(other))
    expected.set_epoch(3)
    assert digests(other) == digests(expected)
    other.load_state_dict(loader.state_dict())
    assert digests(DataLoader(other.dataset, sampler=other.sampler, batch_size=None)) == digests(expected)
    other.load_state_dict(loader.state_dict())
    other.set_epoch(2)  # a finished epoch that is named is served again
    expected.set_epoch(2)
    assert digests(other) == digests(expected)


def test_the_state_counts_delivered_batches(source):
    loader = source.loader(batch_size=2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.set_epoch(0)  # a trainer that resumes sets the epoch again
    assert loader.remaining() == len(loader) - 2
    loader.set_epoch(1)
    next(iterator)
    assert (loader.epoch, loader.remaining()) == (1, len(loader))


def test_a_data_loader_serves_the_rest_of_a_loaded_epoch_once(source):
    loader = source.loader(batch_size=2)
    iterator = iter(loader)
    next(iterator), next(iterator)
    loader.load_state_dict(loader.state_dict())
    batches = DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None)
    assert [len(list(batches)) for _ in range(3)] == [len(loader) - 2, len(loader), len(loader)]


def test_a_state_of_another_cache_is_rejected(many, rows, tmp_path):
    state = many.loader(batch_size=2).state_dict()
    for other in (rows.loader(batch_size=2), many.split(0.5)[0].loader(batch_size=2)):
        with pytest.raises(PlanError, match="belongs to another cache"):
            other.load_state_dict(state)
    many.read(scaled=False).loader(batch_size=2).load_state_dict(state)


# workers and foreign loaders


@pytest.mark.parametrize(("source", "method"), CHILDREN, indirect=["source"])
def test_data_loader_workers_serve_the_same_batches(source, method):
    loader = source.loader(batch_size=2, seed=3)
    kept = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": method}
    workers = DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None, **kept)
    assert len(workers) == len(loader)
    for epoch in (0, 5):
        loader.sampler.set_epoch(epoch)
        batches = digests(workers)
        assert batches == digests(loader)
    batches = iter(workers)
    next(batches)
    with pytest.raises(UsageError, match="which batches a DataLoader delivered"):
        loader.state_dict()
    loader.set_epoch(6)
    assert loader.state_dict()["epoch"] == 6


def test_an_index_of_a_foreign_sampler_is_rejected_with_the_fix(source):
    loader = source.loader(batch_size=2)
    for read in (
        lambda: loader.dataset[0],
        lambda: list(DataLoader(loader.dataset, batch_size=4)),
    ):
        with pytest.raises(UsageError, match="asked for by index") as caught:
            read()
        assert "DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None)" in caught.value.fix
    index = next(iter(loader.sampler))
    assert isinstance(index, BatchIndex)
    assert (index.epoch, index.step, len(index.rows)) == (0, 0, 2)
    assert digests([loader.dataset[pickle.loads(pickle.dumps(index))]]) == digests(loader)[:1]
    for other in ({"rows": index.rows + 1000}, {"bucket": index.bucket + 1}):
        with pytest.raises(UsageError, match="by the sampler of other samples"):
            loader.dataset[replace(index, **other)]


def test_a_loader_in_a_data_loader_has_a_length_and_is_rejected_in_workers(source):
    loader = source.loader(batch_size=2, seed=1)
    batches = DataLoader(loader, batch_size=None)
    assert len(batches) == len(loader)
    batches.dataset.set_epoch(3)
    expected = digests(batches)
    loader.set_epoch(3)
    assert digests(loader) == expected
    with pytest.raises(UsageError, match="worker of a DataLoader"):
        list(DataLoader(loader, batch_size=None, num_workers=1))


def test_pickled_loaders_are_small(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 400, captions=True, seal_every=100))
    loader = cache.loader(batch_size=2, seed=3)
    next(iter(loader))
    assert len(pickle.dumps(loader)) < 4096
    assert len(pickle.dumps(loader.dataset)) < 4096
    assert digests(pickle.loads(pickle.dumps(loader))) == digests(loader)


def test_large_columns_are_read_by_position(many, monkeypatch):
    expected = list(many.loader(batch_size=2))
    monkeypatch.setattr("latentcache.loader.sample_reader._RESIDENT_BYTES", 0)
    for batch, other in zip(expected, many.loader(batch_size=2), strict=True):
        assert (batch["names"], batch["captions"]) == (other["names"], other["captions"])
        assert torch.equal(batch["keys"]["latents"], other["keys"]["latents"])
        assert torch.equal(batch["original_size"], other["original_size"])


# the end


def test_closing_ends_an_iteration_and_can_be_repeated(source):
    loader = source.loader(batch_size=1)
    whole = digests(loader)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(UsageError, match="the loader was closed after 1"):
        list(iterator)
    loader.close()
    with loader:
        assert digests(loader) == whole


def test_buckets_that_are_mostly_repeats_are_reported_with_names(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 64 + [(64, 96)]))
    with pytest.warns(UserWarning, match=r"bucket 64x96 has 1 sample \(64.png\) and repeats it 64 times") as caught:
        cache.loader(batch_size=64)
    assert len(caught) == 1
    assert "remainder='partial' or 'drop', a smaller batch_size" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.loader(batch_size=64, remainder="partial")
        cache.loader(batch_size=4)  # at most four times


def test_samples_that_are_served_without_a_caption_are_said(tmp_path):
    def caption_warnings(root, **more):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            open_cache(root).loader(batch_size=1, **more)
        assert all(warning.filename == __file__ for warning in caught)
        return [str(warning.message) for warning in caught if "caption" in str(warning.message)]

    first = images(tmp_path / "first", [(64, 64)] * 3, texts=["a", "", ""])
    (message,) = caption_warnings(first)
    assert message.startswith("2 of 3 samples of first are without captions, the first is 01.png: batches have ''")
    assert caption_warnings(first, fields=["latents"]) == []
    assert "all samples of second" in caption_warnings(images(tmp_path / "second", [(64, 64)], texts=[""]))[0]
    assert caption_warnings(images(tmp_path / "third", [(64, 64)])) == []
    assert caption_warnings(images(tmp_path / "fourth", [(64, 64)], captions=False)) == []
    left_out = images(tmp_path / "fifth", [(64, 64)] * 3, texts=["a", "", "b"], edges=[3, None, 3])
    assert caption_warnings(left_out) == []


@pytest.mark.parametrize(
    "bad",
    [
        {"batch_size": 0},
        {"batch_size": 1, "seed": 1.5},
        {"batch_size": 1, "prefetch": -1},
        {"batch_size": 1, "format": "sd"},
        {"batch_size": 1, "on_error": "skip"},
        {"batch_size": 1, "remainder": "mask"},
    ],
)
def test_options_that_are_not_allowed_are_named(source, bad):
    with pytest.raises(UsageError) as caught:
        source.loader(**bad)
    assert f"{list(bad)[-1]}=" in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize(
    ("named", "fix"),
    [
        ({"shuffle": True}, "seed and set_epoch"),
        ({"drop_last": True}, "remainder='drop'"),
        ({"num_workers": 2}, "DataLoader(loader.dataset, sampler=loader.sampler, batch_size=None"),
        ({"size": 2}, "use some of batch_size, batch_pixels,"),
    ],
)
def test_arguments_of_other_loaders_are_an_error_with_the_right_way(source, named, fix):
    with pytest.raises(TypeError) as caught:
        source.loader(batch_size=2, **named)
    assert isinstance(caught.value, UsageError)
    assert fix in caught.value.fix


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_path_that_is_none_is_an_error_with_an_example(path):
    with pytest.raises(UsageError, match=f"path={path!r}: must be a cache folder") as caught:
        open_cache(path)
    assert caught.value.fix == "open_cache('images.latentcache')"


@pytest.mark.parametrize("indices", [[-1], [99], [], [0.5], "ab", 3])
def test_rows_that_do_not_exist_are_rejected(source, indices):
    with pytest.raises(UsageError, match="rows="):
        source.loader(batch_size=2).batch(indices)


def test_samples_of_two_buckets_are_rejected(many):
    with pytest.raises(UsageError, match="samples of 2 buckets"):
        many.loader(batch_size=2).batch([0, 1])
    assert many.loader(batch_size=2).batch([0, 3])["names"] == ["00.png", "03.png"]


def test_attributes_for_trainers(source):
    """Lightning needs a sampler; attributes of a DataLoader would make accelerate shard again."""
    loader = source.loader(batch_size=3)
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    assert not isinstance(loader, DataLoader)
    assert [name for name in ("batch_size", "batch_sampler", "drop_last") if hasattr(loader, name)] == []


def test_a_loader_without_the_compiled_reader_says_how_to_get_it(many, each_way):
    shown = repr(many.loader(batch_size=3))
    assert ("\n  slow reader: " in shown) == (each_way == "python")
    assert ("make native" in shown or "LATENTCACHE_NATIVE" in shown) == (each_way == "python")
