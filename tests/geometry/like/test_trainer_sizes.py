"""Sizes of other trainers: vectors of their own code, and what holds for all of them."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainer_vectors import compare

from latentcache.errors import RecipeError
from latentcache.geometry.like.kohya import KohyaTable
from latentcache.geometry.like.musubi import MusubiTable
from latentcache.geometry.like.onetrainer import OneTrainerTable
from latentcache.geometry.like.simpletuner import SimpleTunerTable
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.sizes import Size

#: By trainer, as ``compare`` takes them. Printed by ``BucketManager`` of sd-scripts 48d368f, ``AspectBucketing`` of
#: mgds 3a6994a, ``TrainingSample.calculate_target_size`` of SimpleTuner bc8e6ab with the map of our table,
#: ``BucketSelector`` and ``resize_image_to_bucket`` of musubi-tuner 30c658c, and ``get_bucket_for_image_size`` of
#: ai-toolkit 27a03a9, which resizes in another function.
VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text("utf-8"))
IMAGES = st.builds(Size, st.integers(64, 4096), st.integers(64, 4096))
SQUARE = Size(512, 512)


@pytest.mark.parametrize("trainer", TRAINERS)
def test_sizes_are_those_of_its_own_code(trainer):
    compare(trainer, VECTORS[trainer])


@pytest.mark.parametrize("trainer", TRAINERS)
@given(image=IMAGES, step=st.sampled_from([8, 16, 32, 64]), buckets=st.booleans(), upscale=st.booleans())
def test_the_resized_image_covers_its_bucket(trainer, image, step, buckets, upscale):
    step = 16 if trainer == "musubi" else step
    table = TRAINERS[trainer].table(resolution=SQUARE, step=step, buckets=buckets)
    upscale = upscale or not buckets or trainer not in ("kohya", "musubi")
    bucket = table.nearest(image) if upscale else table.within(image)
    if bucket is not None:
        assert bucket.fits(table.resized(image, bucket, upscale=upscale))
        assert bucket.height % step == bucket.width % step == 0
        assert buckets or bucket == SQUARE


@given(image=IMAGES, side=st.integers(256, 2048), step=st.sampled_from([8, 16, 32, 64]))
def test_a_ratio_of_simpletuner_has_one_size_whatever_other_images_there_are(image, side, step):
    table = SimpleTunerTable(resolution=Size(side, side), step=step)
    bucket = table.nearest(image)
    assert table.size_of_ratio.get(round(bucket.width / bucket.height, 2), bucket) == bucket


@given(samples=st.integers(1, 99), batch=st.integers(1, 9), ranks=st.integers(1, 4))
def test_every_sample_is_in_a_batch_or_dropped(samples, batch, ranks):
    for trainer in TRAINERS.values():
        batches, short, dropped = trainer.batches(samples, batch, ranks)
        assert batches * batch - short + dropped == samples
        assert not (short and dropped)


def test_small_images_and_small_resolutions():
    assert KohyaTable(resolution=Size(384, 512), buckets=False).sizes == (Size(384, 512),)
    assert MusubiTable(resolution=SQUARE).within(Size(100, 70)) == Size(96, 64)
    assert MusubiTable(resolution=SQUARE).within(Size(100, 15)) is None
    assert OneTrainerTable(resolution=Size(64, 64)).nearest(Size(64, 400)) == Size(64, 128)
    with pytest.raises(RecipeError, match="SimpleTuner enlarges"):
        SimpleTunerTable(resolution=SQUARE).within(Size(64, 64))


OBLONG = Size(512, 768)


@pytest.mark.parametrize(
    ("trainer", "options", "expected"),
    [
        ("kohya", {"resolutions": (1536,)}, "sides are 256 to 1024"),
        ("onetrainer", {"min_side": 128}, "OneTrainer has no shortest side"),
        ("onetrainer", {"resolutions": (OBLONG,)}, "one number as a resolution"),
        ("simpletuner", {"max_side": 256}, "no longest"),
        ("simpletuner", {"min_side": 256}, "the shortest side is the resolution"),
        ("simpletuner", {"buckets": (OBLONG,)}, "one number as a resolution"),
        ("musubi", {"step": 64}, "rounds sides to 16"),
        ("musubi", {"max_side": 256}, "no longest"),
        ("musubi", {"resolutions": (16,)}, "no buckets"),
        ("ai-toolkit", {"min_side": 256}, "no shortest side"),
        ("ai-toolkit", {"buckets": (OBLONG,)}, "one number as a resolution"),
    ],
)
def test_sizes_that_it_has_no_setting_for_are_named(trainer, options, expected):
    with pytest.raises(RecipeError, match=expected) as error:
        TRAINERS[trainer].tables(**{"resolutions": (512,), "step": 16} | options)
    assert ("--bucket=512x768" in error.value.fix) == (trainer == "onetrainer" and "resolutions" in options)
