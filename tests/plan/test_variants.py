"""Variants are drawn by seed, epoch, content and occurrence, and by nothing else."""

from collections import Counter

import numpy as np
import pytest

from latentcache.plan.variants import drawn_variants

KEYS = np.random.default_rng(0).integers(0, 256, (600, 32), dtype=np.uint8)


def drawn(keys=KEYS, turn=(0, 0), stored=4, crops=True, flips=True, **more):
    return drawn_variants(keys, turn, stored=stored, crops=crops, flips=flips, **more)


@pytest.mark.parametrize(
    ("stored", "crops", "flips", "expected"),
    [
        (1, False, True, {0, 1}),
        (4, True, False, {0, 1, 2, 3}),
        (4, True, True, set(range(8))),
        (4, False, True, {0, 4}),
        (3, False, False, {0}),
    ],
)
def test_every_stored_variant_comes_equally_often(stored, crops, flips, expected):
    counts = Counter(drawn(stored=stored, crops=crops, flips=flips).tolist())
    assert set(counts) == expected
    assert min(counts.values()) > 0.6 * len(KEYS) / len(expected)


def test_seed_epoch_and_occurrence_change_the_draw():
    first = drawn()
    for other in (drawn(turn=(1, 0)), drawn(turn=(0, 1)), drawn(occurrence=np.ones(len(KEYS), dtype=np.uint32))):
        assert 0.75 < np.mean(other != first) < 0.97
    assert (drawn(occurrence=np.zeros(len(KEYS), dtype=np.uint32)) == first).all()


def test_the_draws_of_crops_and_flips_never_change():
    """Values of the rule: xxh3-64 of "flip", seed and epoch (8 bytes each), content, and the occurrence from 1 on."""
    many = drawn(KEYS[:12], turn=(3, -5), occurrence=np.arange(12) % 3)
    assert many.tolist() == [1, 1, 0, 5, 7, 1, 4, 7, 5, 4, 2, 0]
