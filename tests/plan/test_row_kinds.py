import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_corpora import corpus_of, documents, learned_columns, rows_of

from latentcache.errors import PlanError
from latentcache.plan.row_kinds import block_rows, packed_rows, padded_rows

CUTTING = ["drop", "truncate_right", "truncate_left", "split"]


@given(documents(), st.integers(2, 20), st.sampled_from(CUTTING), st.sampled_from([padded_rows, packed_rows]))
def test_no_row_is_too_long_and_every_row_teaches(made, max_length, overflow, kind):
    plan = kind(corpus_of(made), max_length, overflow=overflow)
    rows = rows_of(plan)
    assert all(sum(length for _, _, length in row) <= max_length for row in rows)
    assert all(learned_columns(made, row) for row in rows)
    assert all(len(row) == 1 for row in rows) or kind is packed_rows
    assert plan.tokens + plan.tokens_dropped == sum(length for length, _ in made)


@given(documents(most=20), st.integers(3, 20))
def test_split_packs_every_token_that_is_in_a_row_that_teaches(made, max_length):
    made = [(length, [(0, length)]) for length, _ in made if length]
    plan = packed_rows(corpus_of(made), max_length, overflow="split")
    assert plan.tokens + plan.tokens_dropped == sum(length for length, _ in made)
    assert all(made[number][0] == 1 for number in plan.idle.documents.tolist())


def test_padded_rows_are_in_the_order_of_the_documents():
    made = [(3, [(0, 3)]), (9, [(0, 9)]), (4, [(1, 2)])]
    assert rows_of(padded_rows(corpus_of(made), 8, overflow="split")) == [
        [(0, 0, 3)], [(1, 0, 7)], [(1, 7, 2)], [(2, 0, 4)],
    ]  # fmt: skip


def test_a_packed_row_holds_the_longest_first():
    made = [(3, [(0, 3)]), (5, [(0, 5)]), (8, [(0, 8)])]
    assert rows_of(packed_rows(corpus_of(made), 8, overflow="error")) == [[(2, 0, 8)], [(1, 0, 5), (0, 0, 3)]]


@given(documents(), st.integers(2, 20), st.booleans(), st.booleans())
def test_blocks_are_the_string_cut_into_rows(made, max_length, keep_tail, crossing):
    plan = block_rows(corpus_of(made), max_length, keep_tail=keep_tail, crossing=crossing)
    string = [(d, n) for d, (length, runs) in enumerate(made) if runs for n in range(length)]
    expected = [string[start : start + max_length] for start in range(0, len(string), max_length)]
    if expected and len(expected[-1]) < max_length and not keep_tail:
        assert plan.tail.tokens == len(expected.pop())
    found = [[(d, n) for d, start, length in row for n in range(start, start + length)] for row in rows_of(plan)]
    kept = [
        row for row in expected if learned_columns(made, [(d, n, 1) for d, n in row], crossing=True) or not crossing
    ]
    if crossing:
        assert found == kept
    else:
        assert all(row in expected for row in found)
        assert all(learned_columns(made, row) for row in rows_of(plan))
    assert plan.tokens + plan.tokens_dropped == sum(length for length, _ in made)


@pytest.mark.parametrize(
    ("kind", "made", "words"),
    [
        (packed_rows, [(1, [(0, 1)])], {"overflow": "split"}),
        (padded_rows, [(4, [(0, 1)])], {"overflow": "split"}),
        (block_rows, [(6, [(0, 1)])], {}),
        (block_rows, [(2, [])], {}),
    ],
)
def test_rows_that_teach_nothing_are_an_error_where_that_is_asked(kind, made, words):
    assert len(kind(corpus_of(made), 4, **words)) == 0
    with pytest.raises(PlanError, match="1 document would teach nothing") as caught:
        kind(corpus_of(made), 4, idle="error", **words)
    assert "made.jsonl:1" in caught.value.where


@pytest.mark.parametrize("made", [[], [(3, [])]], ids=["nothing", "nothing to learn"])
def test_nothing_makes_no_row(made):
    corpus = corpus_of(made)
    assert len(padded_rows(corpus, 8, overflow="error")) == 0
    assert len(packed_rows(corpus, 8, overflow="error")) == 0
    assert len(block_rows(corpus, 8)) == len(block_rows(corpus, 8, keep_tail=False)) == 0


def test_a_part_of_the_documents():
    made = [(3, [(0, 3)])] * 4
    corpus = corpus_of(made, chosen=np.array([1, 3], dtype=np.int32))
    assert rows_of(block_rows(corpus, 4)) == [[(1, 0, 3), (3, 0, 1)], [(3, 1, 2)]]
