from fractions import Fraction
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError
from latentcache.geometry.planned import Target, planned_table
from latentcache.geometry.sizes import Size, bucket_table

SIZES = bucket_table(resolution=512, multiple=64).sizes
SIDES = st.integers(64, 1024)
IMAGES = st.dictionaries(st.builds(Size, SIDES, SIDES), st.integers(1, 9), min_size=1, max_size=6)


def planned(images, sizes, target):
    """The table for images given as size -> samples."""
    sides = np.array([(image.height, image.width) for image in images]).reshape(-1, 2)
    return planned_table(sides, np.array([*images.values()]), sizes, target)


def lost(image, bucket):
    first, second = image.width * bucket.height, bucket.width * image.height
    return 1_000_000 - min(first, second) * 1_000_000 // max(first, second)


def score(images, table, batch):
    """(repeats, buckets, cut) of a table."""
    counts, cut = {}, 0
    for image, number in images.items():
        bucket = table.nearest(image)
        counts[bucket] = counts.get(bucket, 0) + number
        cut += number * lost(image, bucket)
    return sum(-number % batch for number in counts.values()), len(counts), cut


def brute_force(images, target):
    """The best score of every way to cut the ratios into runs, with every bucket for each run."""
    aspects = sorted({Fraction(image.width, image.height) for image in images})
    groups = [[image for image in images if Fraction(image.width, image.height) == aspect] for aspect in aspects]
    allowed = {image: max(target.max_crop * 10_000, min(lost(image, bucket) for bucket in SIZES)) for image in images}
    best = None
    for number in range(len(groups)):
        for ends in combinations(range(1, len(groups)), number):
            bounds = [0, *ends, len(groups)]
            total = (0, 0, 0)
            for low, high in pairwise(bounds):
                run = [image for group in groups[low:high] for image in group]
                fitting = [bucket for bucket in SIZES if all(lost(image, bucket) <= allowed[image] for image in run)]
                if not fitting:
                    break
                cut = min(sum(images[image] * lost(image, bucket) for image in run) for bucket in fitting)
                repeats = -sum(images[image] for image in run) % target.batch
                total = (total[0] + repeats, total[1] + 1, total[2] + cut)
            else:
                if not target.max_buckets or total[1] <= target.max_buckets:
                    best = total if best is None else min(best, total)
    return best


@given(images=IMAGES, batch=st.integers(1, 9), max_crop=st.sampled_from([0, 5, 15, 60]))
def test_no_other_cut_of_the_ratios_is_better(images, batch, max_crop):
    target = Target(batch=batch, max_crop=max_crop)
    table = planned(images, SIZES, target)
    repeats, _, cut = score(images, table, batch)
    assert (repeats, len(table.buckets), cut) == brute_force(images, target)


@given(images=IMAGES, batch=st.integers(1, 9), most=st.integers(1, 3))
def test_a_limit_on_buckets_is_kept(images, batch, most):
    table = planned(images, SIZES, Target(batch=batch, max_crop=5, max_buckets=most))
    assert len(table.buckets) <= most


@given(images=IMAGES, batch=st.integers(1, 9))
def test_the_same_sizes_give_the_same_table_in_any_order(images, batch):
    target = Target(batch=batch)
    table = planned(images, SIZES, target)
    assert planned(dict(reversed(images.items())), SIZES[::-1], target) == table
    for image in images:
        assert table.nearest(Size(image.height, image.width)) in {bucket.size for bucket in table.buckets}


def test_every_batch_is_full_where_trainers_lose_images():
    """54 images of a LoRA: three shapes, whose buckets would hold 30, 15 and 9."""
    images = {Size(1200, 800): 30, Size(1000, 1000): 15, Size(820, 1180): 9}
    table = planned(images, SIZES, Target(batch=8, max_crop=25))
    assert score(images, table, 8)[0] == -54 % 8


def test_an_extreme_image_does_not_loosen_the_limit_of_the_others():
    images = {Size(64, 1024): 1, Size(1024, 1024): 8, Size(1000, 800): 8}
    table = planned(images, SIZES, Target(batch=8, max_crop=8))
    assert lost(Size(1000, 800), table.nearest(Size(1000, 800))) <= 80_000
    assert table.nearest(Size(64, 1024)) == Size(256, 1024)


def test_a_million_ratios_are_binned():
    images = {Size(1000 + number % 997, 1000 + number // 997): 1 for number in range(100_000)}
    table = planned(images, bucket_table(resolution=512, multiple=16).sizes, Target(batch=64))
    assert score(images, table, 64)[0] == -100_000 % 64


@pytest.mark.parametrize(("images", "sizes"), [({}, SIZES), ({Size(1, 1): 1}, ())])
def test_nothing_to_plan(images, sizes):
    with pytest.raises(RecipeError, match="cannot be planned without images"):
        planned(images, sizes, Target(batch=1))
