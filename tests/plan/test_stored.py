import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_corpora import corpus_of, documents

from latentcache.plan.row_kinds import block_rows, packed_rows
from latentcache.plan.rows import Left, RowPlan
from latentcache.plan.stored import as_columns, from_columns


def same(one, other):
    for name in RowPlan.__dataclass_fields__:
        mine, theirs = getattr(one, name), getattr(other, name)
        if isinstance(mine, Left):
            assert (mine.documents.tolist(), mine.tokens) == (theirs.documents.tolist(), theirs.tokens)
            mine, theirs = mine.documents, theirs.documents
        assert np.array_equal(mine, theirs)
        assert getattr(mine, "dtype", int) == getattr(theirs, "dtype", int)


@given(documents(), st.integers(2, 20), st.sampled_from(["drop", "split", "truncate_left", "blocks"]))
def test_what_is_kept_comes_back(made, max_length, kind):
    corpus = corpus_of(made)
    crossing = kind == "blocks"
    plan = block_rows(corpus, max_length) if crossing else packed_rows(corpus, max_length, overflow=kind)
    columns = {name: column.astype("<u4") for name, column in as_columns(plan).items()}
    same(from_columns(columns, max_length, crossing=crossing), plan)


def test_counts_beyond_32_bits_and_columns_that_are_missing():
    empty = np.empty(0, dtype=np.int64)
    many = Left(tokens=(1 << 40) + 7)
    plan = RowPlan(max_length=8, ends=empty, document=empty, start=empty, length=empty, cut=many)
    columns = as_columns(plan)
    assert from_columns(columns, 8).cut.tokens == (1 << 40) + 7
    with pytest.raises(KeyError):
        from_columns({name: column for name, column in columns.items() if name != "start"}, 8)
