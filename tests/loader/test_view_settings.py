import numpy as np
import pytest

from latentcache.loader.view_settings import ViewSettings

TOKENS = np.array([3, 16, 17, 60])


def test_a_batch_is_as_wide_as_the_smallest_length_that_holds_its_rows():
    settings = ViewSettings(max_length=64, lengths=(16, 32, 64), pad_id=0)
    found = [settings.width_of(lambda: TOKENS, np.array(rows, dtype=int)) for rows in ([0, 1], [0, 2], [3], [])]
    assert found == [16, 32, 64, 64]


def test_one_length_needs_no_tokens():
    settings = ViewSettings(max_length=64, lengths=(64,), pad_id=0)
    assert settings.width_of(lambda: pytest.fail("asked"), np.array([0])) == 64


def test_documents_that_are_kept_apart_say_where_they_begin():
    settings = ViewSettings(max_length=8, lengths=(8,), pad_id=0)
    assert settings.columns == ("input_ids", "attention_mask", "labels")
    apart = ViewSettings(max_length=8, lengths=(8,), pad_id=0, isolated=True)
    assert apart.columns == (*settings.columns, "position_ids", "seq_idx")
