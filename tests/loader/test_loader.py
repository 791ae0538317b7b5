import gc
import math
import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from small_cache import build, damage_payload, draw

from latentcache.encoders.stub import StubEncoder
from latentcache.errors import CorruptEntryError, LatentcacheError, MissingEntryError
from latentcache.geometry.placement import place
from latentcache.geometry.sizes import Size
from latentcache.loader.cache import open_cache
from latentcache.pipeline.decode import decode
from latentcache.pipeline.resize import resize_crop
from latentcache.plan.batches import plan_report
from latentcache.recipe import Normalisation

SHAPES = [(96, 64), (64, 96), (80, 80)]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A cache of 17 pictures in three buckets of 6, 6 and 5."""
    folder = tmp_path_factory.mktemp("many")
    for number in range(17):
        draw(folder / "data" / f"p{number:02}.png", SHAPES[number % 3], seed=number)
        (folder / "data" / f"p{number:02}.txt").write_text(f"caption {number}")
    build(folder / "data", folder / "cache")
    return folder


@pytest.fixture
def opened(many):
    return open_cache(many / "cache")


def by_key(loader):
    """Every entry that a loader serves: key -> latents of that entry."""
    return {key: latents for batch in loader for key, latents in zip(batch["keys"], batch["latents"], strict=True)}


def test_what_a_batch_holds(opened):
    for batch in opened.loader(batch_size=3):
        assert set(batch) == {
            "latents", "keys", "names", "captions", "original_size", "crop_top_left", "target_size"
        }  # fmt: skip
        assert batch["latents"].shape[:2] == (3, 4)
        for name in ("original_size", "crop_top_left", "target_size"):
            assert (batch[name].shape, batch[name].dtype) == ((3, 2), torch.int64)
        height, width = batch["target_size"][0].tolist()
        assert batch["latents"].shape[2:] == (height // 8, width // 8)
        assert all(isinstance(batch[name], list) and len(batch[name]) == 3 for name in ("keys", "names", "captions"))


def test_latents_are_those_of_the_picture(opened, many):
    """The whole way, for every sample: file, place, decode, cut, encode."""
    (table,) = opened.recipe.geometry.tables()
    for batch in opened.loader(batch_size=1):
        raw = (many / "data" / batch["names"][0]).read_bytes()
        picture = decode(raw, opened.recipe.pixels, max_pixels=10**6)
        placement = place(Size(*picture.shape[:2]), table)
        pixels = resize_crop(picture, placement, opened.recipe.pixels.resample)
        expected = StubEncoder().encode(pixels[None]).latents
        assert np.array_equal(batch["latents"].numpy(), expected)
        crop = placement.crop
        assert batch["original_size"].tolist() == [list(picture.shape[:2])]
        assert batch["crop_top_left"].tolist() == [[crop.top, crop.left]]
        assert batch["target_size"].tolist() == [[placement.bucket.height, placement.bucket.width]]
        assert batch["captions"] == [f"caption {int(batch['names'][0][1:3])}"]


def test_the_original_size_is_after_orientation(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "data").mkdir()
    Image.new("RGB", (96, 64)).save(tmp_path / "data" / "turned.jpg", exif=exif)
    build(tmp_path / "data", tmp_path / "cache")
    (batch,) = open_cache(tmp_path / "cache").loader(batch_size=1)
    assert batch["original_size"].tolist() == [[96, 64]]
    assert batch["target_size"][0, 0] > batch["target_size"][0, 1]


@pytest.mark.parametrize("policy", ["repeat", "drop", "partial"])
@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (4, 1), (2, 2), (5, 3)])
def test_the_length_is_exact_and_shapes_are_equal_on_all_ranks(opened, policy, batch_size, world_size):
    loaders = [
        opened.loader(batch_size=batch_size, rank=rank, world_size=world_size, small_buckets=policy, seed=3)
        for rank in range(world_size)
        if opened.plan(batch_size=batch_size, world_size=world_size, small_buckets=policy).steps
    ]
    if not loaders:
        return
    epochs = [list(loader) for loader in loaders]
    assert {len(loader) for loader in loaders} == {len(epoch) for epoch in epochs}
    assert len({len(loader) for loader in loaders}) == 1
    for step in zip(*epochs, strict=True):
        assert len({batch["latents"].shape for batch in step}) == 1
    served = {key for epoch in epochs for batch in epoch for key in batch["keys"]}
    report = loaders[0].report
    assert len(served) == report.samples_used
    if policy != "drop":
        assert len(served) == len(opened) == 17
    assert sum(len(batch["keys"]) for epoch in epochs for batch in epoch) == (
        report.samples_used + report.samples_repeated
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    policy=st.sampled_from(["repeat", "partial"]),
    seed=st.integers(-(2**63), 2**64),
    epoch=st.integers(0, 2**40),
)
def test_every_sample_is_on_some_rank(opened, batch_size, world_size, policy, seed, epoch):
    served = set()
    for rank in range(world_size):
        loader = opened.loader(
            batch_size=batch_size, world_size=world_size, rank=rank, small_buckets=policy, seed=seed
        )
        loader.set_epoch(epoch)
        plan = loader._position.whole()
        served |= {row for step in range(len(plan)) for row in plan.batch(step, rank).tolist()}
    assert served == set(range(17))


def test_an_epoch_repeats_until_it_is_set(opened):
    loader = opened.loader(batch_size=2, seed=5)
    first = [batch["keys"] for batch in loader]
    assert [batch["keys"] for batch in loader] == first
    loader.set_epoch(1)
    second = [batch["keys"] for batch in loader]
    assert second != first
    assert {key for keys in second for key in keys} == {key for keys in first for key in keys}
    loader.set_epoch(0)
    assert [batch["keys"] for batch in loader] == first
    assert [batch["keys"] for batch in opened.loader(batch_size=2, seed=5)] == first
    assert [batch["keys"] for batch in opened.loader(batch_size=2, seed=6)] != first


def test_set_epoch_does_not_move_an_iteration_that_has_begun(opened):
    loader = opened.loader(batch_size=1, seed=5)
    whole = [batch["keys"] for batch in loader]
    iterator = iter(loader)
    seen = [next(iterator)["keys"]]
    loader.set_epoch(9)
    assert seen + [batch["keys"] for batch in iterator] == whole


def test_one_step_is_one_item(opened):
    loader = opened.loader(batch_size=2, seed=1)
    for step, batch in enumerate(loader):
        assert loader[step]["keys"] == batch["keys"]
    for step in (-1, len(loader)):
        with pytest.raises(IndexError, match=f"step {step} of an epoch of {len(loader)}"):
            loader[step]


def test_tensors_are_owned_and_writeable(many):
    opened = open_cache(many / "cache")
    loader = opened.loader(batch_size=2)
    batches = list(loader)
    before = [batch["latents"].clone() for batch in batches]
    pointers = {batch["latents"].data_ptr() for batch in batches}
    assert len(pointers) == len(batches)
    batches[0]["latents"].zero_()
    assert torch.equal(batches[1]["latents"], before[1])
    assert not torch.equal(next(iter(loader))["latents"], batches[0]["latents"])
    del loader, opened
    gc.collect()
    for batch, kept in zip(batches[1:], before[1:], strict=True):
        assert torch.equal(batch["latents"], kept)
        batch["latents"] += 1


def test_tensors_outlive_the_cache(tmp_path, data):
    build(data, tmp_path / "cache")
    batches = list(open_cache(tmp_path / "cache").loader(batch_size=1))
    before = [batch["latents"].clone() for batch in batches]
    shutil.rmtree(tmp_path / "cache")
    assert all(torch.equal(batch["latents"], kept) for batch, kept in zip(batches, before, strict=True))


@pytest.mark.parametrize("storage", ["float16", "bfloat16", "float32"])
def test_each_storage_type_comes_back_as_it_is(data, tmp_path, storage):
    build(data, tmp_path / "cache", storage_dtype=storage)
    opened = open_cache(tmp_path / "cache")
    kind = getattr(torch, storage)
    exact = by_key(opened.loader(batch_size=1, dtype=torch.float64))
    for key, latents in by_key(opened.loader(batch_size=1)).items():
        assert latents.dtype == kind
        assert torch.equal(latents.double(), exact[key])
        assert latents.abs().max() <= 1


def normalised(opened, **facts):
    """The same cache with facts of normalisation, as a model would bring them."""
    recipe = opened.recipe.with_encoder(normalisation=Normalisation(**facts))
    generation = type(opened.generation)(
        **{name: getattr(opened.generation, name) for name in opened.generation.__dataclass_fields__}
        | {"recipe": recipe}
    )
    return type(opened)(opened.layout, generation)


def test_scaled_raw_and_type(opened):
    cache = normalised(opened, kind="scale-shift", scale=0.5, shift=0.25)
    raw = by_key(cache.loader(batch_size=1, scaled=False))
    scaled = by_key(cache.loader(batch_size=1))
    exact = by_key(cache.loader(batch_size=1, dtype=torch.float32))
    for key, latents in raw.items():
        assert torch.equal(latents, by_key(opened.loader(batch_size=1))[key])
        expected = (latents.float() - 0.25) * 0.5
        assert torch.equal(exact[key], expected)
        assert torch.equal(scaled[key], expected.half())
        break


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["none", "scale-shift"])
def test_every_batch_of_an_epoch_may_be_kept_whatever_is_computed(opened, kind, dtype):
    """Computed in the memory that was read into, or in other memory that is used again."""
    cache = normalised(opened, kind=kind, scale=0.5, shift=0.25)
    stored = by_key(cache.loader(batch_size=1, scaled=False))
    loader = cache.loader(batch_size=2, dtype=dtype, prefetch=1)
    kept = [*loader, *loader]
    assert len({batch["latents"].data_ptr() for batch in kept}) == len(kept)
    for batch in kept:
        for key, latents in zip(batch["keys"], batch["latents"], strict=True):
            expected = stored[key] if kind == "none" else (stored[key].float() - 0.25) * 0.5
            assert torch.equal(latents, expected.to(dtype or torch.float16))


def test_patches_change_the_shape(opened):
    cache = normalised(opened, kind="batch-norm", mean=(0.0,) * 16, std=(1.0,) * 16, patch=2)
    for batch in cache.loader(batch_size=1):
        height, width = batch["target_size"][0].tolist()
        if height % 16 or width % 16:
            continue
        assert batch["latents"].shape == (1, 16, height // 16, width // 16)


# damage


def test_a_damaged_entry_is_named(cache):
    name = damage_payload(cache, row=1)
    with pytest.raises(CorruptEntryError) as caught:
        list(open_cache(cache).loader(batch_size=1))
    assert caught.value.sample == name
    assert name in caught.value.what
    assert len(bytes.fromhex(caught.value.key)) == 32
    assert "latentcache verify --full" in caught.value.fix
    assert "payload checksum" in caught.value.why
    assert "data.mdb:" in caught.value.where


def test_the_other_entries_are_served(cache):
    name = damage_payload(cache)
    loader = open_cache(cache).loader(batch_size=1)
    good, damaged = set(), set()
    for step in range(len(loader)):
        try:
            good |= set(loader[step]["names"])
        except CorruptEntryError as error:
            damaged.add(error.sample)
    assert (len(good), damaged) == (3, {name})


@pytest.mark.parametrize("part", ["", "data.mdb"])
def test_a_shard_that_is_gone_is_named_with_the_sample(cache, part):
    opened = open_cache(cache)
    (shard,) = (cache / "shards").iterdir()
    shutil.rmtree(shard) if not part else (shard / part).unlink()
    with pytest.raises(MissingEntryError) as caught:
        next(iter(opened.loader(batch_size=1)))
    assert caught.value.what.startswith("the entry of p")
    assert caught.value.where.endswith(f"{shard.name}/data.mdb")
    assert "latentcache build" in caught.value.fix


@pytest.mark.parametrize("keep", [0, 100, 9000])
def test_a_shard_that_was_cut_is_an_error_and_no_signal(cache, keep):
    loader = open_cache(cache).loader(batch_size=1)
    next(iter(loader))
    (data,) = (cache / "shards").glob("*/data.mdb")
    data.chmod(0o644)
    with data.open("r+b") as file:
        file.truncate(keep)
    with pytest.raises(LatentcacheError):
        list(loader)


# processes


def test_pickling(opened):
    loader = opened.loader(batch_size=2, seed=4, rank=1, world_size=2, dtype=torch.float32)
    loader.set_epoch(3)
    expected = [batch["keys"] for batch in loader]
    copy = pickle.loads(pickle.dumps(loader))
    assert [batch["keys"] for batch in copy] == expected
    assert (len(copy), copy.epoch, copy.rank) == (len(loader), 3, 1)
    assert next(iter(copy))["latents"].dtype == torch.float32


def test_without_workers_a_data_loader_is_the_loader(opened):
    loader = opened.loader(batch_size=3, seed=2)
    there = list(torch.utils.data.DataLoader(loader, batch_size=None))
    assert [batch["keys"] for batch in there] == [batch["keys"] for batch in loader]


def test_reading_needs_no_model_library(many, capfd):
    """In a fresh interpreter, because this one has imported everything."""
    import subprocess

    code = (
        "import sys; from latentcache import open_cache\n"
        f"print(sum(len(b['keys']) for b in open_cache({str(many / 'cache')!r}).loader(batch_size=1)))\n"
        "print([m for m in ('diffusers', 'transformers', 'latentcache.encoders', 'latentcache.pipeline', 'PIL')"
        " if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "17\n[]\n"


def test_the_report_is_that_of_the_plan(opened):
    loader = opened.loader(batch_size=4)
    rows = opened.generation.rows
    assert loader.report == plan_report(rows.bucket, opened.generation.buckets, loader.report.batches)


# progress


def transformers_counts(length, epochs, grad_accum):
    """``Trainer.set_initial_training_values`` of transformers 5.23, in its words."""
    per_epoch = max(length // grad_accum + int(length % grad_accum > 0), 1)
    return math.ceil(epochs * per_epoch)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 7), st.integers(1, 9), st.integers(0, 5))
def test_steps_are_those_of_transformers(opened, batch_size, grad_accum, epochs):
    loader = opened.loader(batch_size=batch_size)
    assert loader.steps(epochs, grad_accum) == transformers_counts(len(loader), epochs, grad_accum)
    assert loader.steps(epochs / 2, grad_accum) == transformers_counts(len(loader), epochs / 2, grad_accum)
    assert loader.epoch_at(loader.steps(epochs, grad_accum), grad_accum) == epochs


@pytest.mark.parametrize("grad_accum", [1, 2, 4, 6, 7, 50])
def test_epochs_count_batches_that_were_trained_on(opened, grad_accum):
    """As a training loop counts: a step after every ``grad_accum`` batches and at the end of an epoch."""
    loader = opened.loader(batch_size=3)
    step = 0
    for epoch in range(2):
        for served in range(1, len(loader) + 1):
            if served % grad_accum == 0 or served == len(loader):
                step += 1
                assert loader.epoch_at(step, grad_accum) == pytest.approx(epoch + served / len(loader))
    assert step == loader.steps(2, grad_accum)


def test_what_trainers_look_for(opened):
    """Lightning wants a sampler; an attribute of a DataLoader would invite accelerate or Lightning to shard again."""
    loader = opened.loader(batch_size=3)
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    assert not isinstance(loader, torch.utils.data.DataLoader)
    assert [name for name in ("batch_size", "batch_sampler", "dataset", "drop_last") if hasattr(loader, name)] == []
