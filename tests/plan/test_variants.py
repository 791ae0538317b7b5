"""Variant draws depend on seed, epoch, sample and occurrence only."""

import numpy as np

from latentcache.plan.shuffle import drawn_of_samples

SAMPLES = np.arange(600)


def test_name_seed_epoch_and_occurrence_change_the_draw():
    first, ones = drawn_of_samples("image", SAMPLES, (0, 0)), np.ones(len(SAMPLES), dtype=np.uint32)
    assert len(set(first.tolist())) == len(SAMPLES)
    for name, turn, occurrence in (
        ("image", (1, 0), None),
        ("image", (0, 1), None),
        ("image", (0, 0), ones),
        ("caption", (0, 0), None),
    ):
        assert not (drawn_of_samples(name, SAMPLES, turn, occurrence) == first).any()
    assert (drawn_of_samples("image", SAMPLES, (0, 0), 0 * ones) == first).all()


def test_draws_never_change():
    """xxh3-64 of name, seed, epoch and sample (8 bytes each), and the occurrence from 1 on."""
    many = drawn_of_samples("image", np.arange(12), (3, -5), np.arange(12) % 3)
    assert (many % np.uint64(8)).tolist() == [4, 5, 6, 7, 6, 0, 6, 4, 5, 3, 3, 7]
