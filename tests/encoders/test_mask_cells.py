"""Masks are rounded means of cells."""

import numpy as np

from latentcache.encoders.masks import cell_means


def test_cells_are_rounded_means():
    pixels = np.zeros((8, 16, 3), dtype=np.uint8)
    pixels[:4, :8] = 255
    pixels[0, 8] = 64
    assert cell_means(pixels, 8).tolist() == [[[128, 1]]]
