"""Rows of documents: every token is in a row or counted; labels come from loss spans."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import corpus_of, documents, rows_of, tokens_of

from latentcache.errors import PlanError
from latentcache.plan.documents import best_fit, loss_spans, plan_rows

THREE = [[True] * 5, [True] * 9, [token == 7 for token in range(12)]]


@pytest.mark.parametrize(
    ("overflow", "expected", "left"),
    [
        ("drop", [(0, 0, 5)], {"too_long": ([1, 2], 21)}),
        ("truncate_right", [(0, 0, 5), (1, 0, 8), (2, 0, 8)], {"truncated": ([1, 2], 5)}),
        ("truncate_left", [(0, 0, 5), (1, 1, 8), (2, 4, 8)], {"truncated": ([1, 2], 5)}),
        ("split", [(0, 0, 5), (1, 0, 7), (1, 7, 2), (2, 0, 8)], {"no_loss": ([2], 4)}),
    ],
)
def test_the_policies_for_long_documents(overflow, expected, left):
    plan = plan_rows(corpus_of(THREE), "pad", 8, overflow=overflow)
    assert [piece for row in rows_of(plan) for piece in row] == expected
    for reason, (numbers, tokens) in left.items():
        assert (plan.dropped[reason].documents.tolist(), plan.dropped[reason].tokens) == (numbers, tokens)


def test_an_error_names_file_line_and_length():
    with pytest.raises(PlanError, match="2 documents longer than 8 tokens") as caught:
        plan_rows(corpus_of(THREE), "pad", 8, overflow="error")
    assert caught.value.where == "made.jsonl:2 (9 tokens), made.jsonl:3 (12 tokens)"
    assert "rows of 12 tokens" in caught.value.fix
    with pytest.raises(PlanError) as caught:
        plan_rows(corpus_of([[True] * 9] * 7), "pack", 8, overflow="error")
    assert caught.value.where.endswith("made.jsonl:5 (9 tokens) and 2 more")


def test_documents_without_loss_are_left_out_or_rejected():
    corpus = corpus_of([[False] * 4, [], [False, True, True], [False] * 9 + [True] * 3])
    for kind in ("pad", "pack"):
        plan = plan_rows(corpus, kind, 8, overflow="truncate_right")
        assert (plan.dropped["no_loss"].documents.tolist(), plan.dropped["no_loss"].tokens) == ([0, 1, 3], 12)


def views(corpus, length, overflow):
    yield plan_rows(corpus, "pad", length, overflow=overflow)
    yield plan_rows(corpus, "pack", length, overflow=overflow)
    yield from (
        plan_rows(corpus, "chunk", length, last_chunk=last, cross_document=cross)
        for last in ("keep", "drop")
        for cross in (True, False)
    )


@given(documents, st.integers(2, 9), st.sampled_from(["drop", "truncate_right", "truncate_left", "split"]))
def test_every_token_is_in_one_row_or_counted_and_labels_are_those_of_the_spans(documents, length, overflow):
    corpus = corpus_of(documents)
    for plan in views(corpus, length, overflow):
        rows = [tokens_of(row) for row in rows_of(plan)]
        assert plan.tokens + sum(part.tokens for part in plan.dropped.values()) == sum(map(len, documents))
        assert all(len(row) <= length for row in rows)
        tokens = list(chain.from_iterable(rows))
        if overflow != "split":  # a rest of one token may follow the previous token
            assert len(tokens) == len(set(tokens))
        spans, begin = loss_spans(corpus, plan), 0
        for row, pieces, end in zip(rows, rows_of(plan), spans.ends.tolist(), strict=True):
            starts = {(document, start) for document, start, _ in pieces}
            alone = row[:1] if plan.cross_document else starts
            learned = {column for column, (document, token) in enumerate(row)
                       if documents[document][token] and (document, token) not in alone}  # fmt: skip
            bounds = zip(spans.first[begin:end].tolist(), spans.last[begin:end].tolist(), strict=True)
            assert set(chain.from_iterable(range(first, last) for first, last in bounds)) == learned
            assert learned  # a row without loss tokens would give nan
            begin = end


@given(documents, st.integers(2, 9))
def test_splitting_keeps_every_token_of_documents_with_loss(documents, length):
    plan = plan_rows(corpus_of(documents), "pack", length, overflow="split")
    tokens = {token for row in rows_of(plan) for token in tokens_of(row)}
    left = set(plan.dropped["no_loss"].documents.tolist())
    for number, learned in enumerate(documents):
        if any(learned) and number not in left:
            assert tokens.issuperset((number, token) for token in range(len(learned)))


def test_chunks_are_cut_from_the_concatenation():
    corpus = corpus_of([[True] * 5, [True] * 4, [True] * 3])
    assert rows_of(plan_rows(corpus, "chunk", 8)) == [[(0, 0, 5), (1, 0, 3)], [(1, 3, 1), (2, 0, 3)]]
    dropped = plan_rows(corpus, "chunk", 8, last_chunk="drop")
    assert (len(dropped), dropped.dropped["last_chunk"].tokens, dropped.dropped["last_chunk"].documents.tolist()) == (
        1,
        4,
        [1, 2],
    )


def best_fit_one_by_one(lengths, capacity):
    """Compute row loads: each piece, longest first, goes into the fullest row with room."""
    loads = []
    for length in sorted(lengths, reverse=True):
        fits = [number for number, load in enumerate(loads) if load + length <= capacity]
        if fits:
            loads[max(fits, key=lambda number: loads[number])] += length
        else:
            loads.append(length)
    return sorted(loads)


@given(st.integers(1, 40).flatmap(lambda most: st.tuples(st.lists(st.integers(1, most), max_size=60), st.just(most))))
def test_rows_are_those_of_best_fit_decreasing(case):
    lengths, capacity = case
    order, ends = best_fit(np.array(lengths, dtype=np.int64), capacity)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    rows = np.split(np.array(lengths, dtype=np.int64)[order], ends[:-1]) if len(ends) else []
    assert all(len(row) for row in rows)
    assert sorted(int(row.sum()) for row in rows) == best_fit_one_by_one(lengths, capacity)
    assert all(row.tolist() == sorted(row.tolist(), reverse=True) for row in rows)


def test_long_rows_are_packed():
    order, ends = best_fit(np.array([70_000, 30_000, 1, 100_000]), 100_000)
    assert (order.tolist(), ends.tolist()) == ([3, 0, 1, 2], [1, 3, 4])
