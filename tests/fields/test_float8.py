"""float8 rows equal torch; one scale per row; one rounding step is noise."""

import numpy as np
import pytest
import torch

from latentcache.fields import dtypes as float8
from latentcache.fields.prompt_embeds import PromptEmbeds, PromptRecipe
from latentcache.loader.values import restored

RECIPE = PromptRecipe(
    output="prompt_embeds", pipeline="stub", fingerprint="", config="", tokenizer="", width=64, length=9,
    trimmed=True, compute_dtype="bfloat16", storage_dtype=float8.FLOAT8,
)  # fmt: skip


def test_values_equal_torch():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    fine = halves[np.isfinite(halves) & (np.abs(halves) <= 448)].astype(np.float32)
    rows = np.concatenate([fine, np.full(-len(fine) % 63, 448, np.float32)]).reshape(-1, 63)
    rows = np.concatenate([rows, np.full((len(rows), 1), 448, np.float32)], axis=1)  # a scale of 1
    stored = float8.quantized(rows)
    expected = torch.from_numpy(rows).to(torch.float8_e4m3fn)
    assert np.array_equal(stored[:, :-4], expected.view(torch.uint8).numpy())
    assert np.array_equal(float8.restored(stored), expected.float().numpy())
    assert torch.equal(restored(torch.from_numpy(stored), torch.float32), expected.float())


def test_each_row_has_a_scale_and_zeros_stay_zeros():
    rows = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32) * 10.0 ** np.arange(-4, 4)[:, None]
    rows = np.concatenate([rows, np.zeros((1, 64), np.float32)]).astype(np.float32)
    stored = float8.quantized(rows)
    assert stored.shape == (9, 68)
    assert stored.dtype == np.uint8
    back = float8.restored(stored)
    assert not back[-1].any()
    assert not float8.restored(np.zeros((2, 68), np.uint8)).any(), "padding"
    np.testing.assert_allclose(np.abs(back).max(axis=1), np.abs(rows).max(axis=1), rtol=1e-6)
    for own in range(8):
        assert 0.02 < float8.relative_error(rows[own], stored[own]) < 0.04


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_values_are_kept(value):
    rows = np.ones((2, 64), np.float32)
    rows[1, 3] = value
    assert PromptEmbeds().check(None, float8.quantized(rows), RECIPE) == "not finite"
    assert PromptEmbeds().check(None, float8.quantized(rows[:1]), RECIPE) == ""


def test_one_rounding_step_is_no_difference():
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(9, 64)).astype(np.float32)
    noisy = rows + draw.normal(size=rows.shape).astype(np.float32) * 0.01
    other = draw.normal(size=rows.shape).astype(np.float32)
    stored, near, far = (float8.quantized(one) for one in (rows, noisy, other))
    assert not np.array_equal(stored, near)
    assert not PromptEmbeds().compare(stored, near, {}, RECIPE).differs
    assert PromptEmbeds().compare(stored, far, {}, RECIPE).differs
    assert PromptEmbeds().compare(stored, far[:4], {}, RECIPE).differs
