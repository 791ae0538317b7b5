import pickle

import pytest
import torch
from made_tokens import cache_of, texts

from latentcache.errors import UsageError
from latentcache.loader.token_formats import TokenCollator, segments, together, token_formatted

VIEW = cache_of(texts()).packed(40)
PLAIN = VIEW.batch([0, 1, 2])


def test_for_transformers_nothing_hides_where_documents_begin():
    found = token_formatted(PLAIN, "transformers")
    assert list(found) == ["input_ids", "labels", "position_ids"]
    padded = cache_of(texts()).padded(40).batch([0])
    assert set(token_formatted(padded, "transformers")) == {"input_ids", "attention_mask", "labels"}


def test_one_long_row():
    flat = token_formatted(PLAIN, "flat")
    ends = flat["cu_seq_lens_q"]
    assert (
        flat["input_ids"].shape
        == flat["labels"].shape
        == flat["position_ids"].shape
        == flat["seq_idx"].shape
        == (1, 120)
    )
    assert (ends.dtype, flat["seq_idx"].dtype) == (torch.int32, torch.int32)
    assert (ends[0], ends[-1]) == (0, 120)
    assert torch.equal(ends, flat["cu_seq_lens_k"])
    assert flat["max_length_q"] == flat["max_length_k"] == ends.diff().max()
    for number, (first, last) in enumerate(zip(ends.tolist(), ends[1:].tolist(), strict=False)):
        assert flat["position_ids"][0, first:last].tolist() == list(range(last - first))
        assert set(flat["seq_idx"][0, first:last].tolist()) == {number}
        assert flat["labels"][0, first] == -100


def test_segments_count_the_filling():
    ends, longest = segments(torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]]))
    assert (ends.tolist(), longest) == ([0, 2, 4, 5, 8], 3)


def test_collators_give_what_loaders_give():
    rows = VIEW.__getitems__([0, 1, 2])
    for form in ("plain", "transformers", "flat"):
        collator = pickle.loads(pickle.dumps(TokenCollator(form)))
        found, expected = collator(rows), token_formatted(PLAIN, form)
        assert set(found) == set(expected)
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value))


def test_rows_that_are_not_a_whole_batch_are_copied():
    base = torch.arange(12).reshape(3, 4).clone()  # no view itself
    assert together([base[0], base[1], base[2]]) is base
    for rows in (
        [base[0], base[1]],
        [base[1], base[0], base[2]],
        [base[0, :2], base[1, :2], base[2, :2]],
        [base[0].clone()],
    ):
        found = together(rows)
        assert found is not base
        assert found.tolist() == [row.tolist() for row in rows]


def test_forms_that_cannot_be():
    with pytest.raises(UsageError, match="unknown"):
        TokenCollator("wide")
    with pytest.raises(UsageError, match="position_ids"):
        TokenCollator("flat")(cache_of(texts()).padded(40).__getitems__([0]))
