import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_corpora import corpus_of, documents, with_loss

from latentcache.errors import PlanError, UsageError
from latentcache.plan.pieces import cut_pieces, without_idle

THREE = [(5, [(0, 5)]), (9, [(0, 9)]), (12, [(7, 1)])]


def pieces_of(pieces):
    return list(zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True))


@pytest.mark.parametrize(
    ("overflow", "expected", "left"),
    [
        ("drop", [(0, 0, 5)], {"too_long": ([1, 2], 21), "cut": ([], 0), "idle": ([], 0)}),
        ("truncate_right", [(0, 0, 5), (1, 0, 8), (2, 0, 8)], {"cut": ([1, 2], 5), "idle": ([], 0)}),
        ("truncate_left", [(0, 0, 5), (1, 1, 8), (2, 4, 8)], {"cut": ([1, 2], 5), "idle": ([], 0)}),
        ("split", [(0, 0, 5), (1, 0, 7), (1, 7, 2), (2, 0, 8), (2, 8, 4)], {"cut": ([], 0), "idle": ([], 0)}),
    ],
)
def test_the_policies(overflow, expected, left):
    pieces = cut_pieces(corpus_of(THREE), 8, overflow=overflow)
    assert pieces_of(pieces) == expected
    for reason, (numbers, tokens) in left.items():
        found = getattr(pieces, reason)
        assert (found.documents.tolist(), found.tokens) == (numbers, tokens)


def test_an_error_names_file_line_and_length():
    with pytest.raises(PlanError, match="2 documents are longer than max_length=8") as caught:
        cut_pieces(corpus_of(THREE), 8, overflow="error")
    assert caught.value.where == "made.jsonl:2 (9 tokens), made.jsonl:3 (12 tokens)"
    assert "max_length=12" in caught.value.fix
    with pytest.raises(PlanError, match="1 document is"):
        cut_pieces(corpus_of(THREE), 9, overflow="error")
    assert len(pieces_of(cut_pieces(corpus_of(THREE), 12, overflow="error"))) == 3


def test_an_error_names_five_and_counts_the_rest():
    with pytest.raises(PlanError) as caught:
        cut_pieces(corpus_of([(9, [(0, 9)])] * 7), 8, overflow="error")
    assert caught.value.where.endswith("made.jsonl:5 (9 tokens) and 2 more")


def test_what_is_cut_until_it_teaches_nothing_is_left_out_or_refused():
    corpus = corpus_of([(5, [(0, 5)]), (12, [(9, 3)])])
    pieces = cut_pieces(corpus, 8, overflow="truncate_right")
    assert pieces_of(pieces) == [(0, 0, 5)]
    assert (pieces.cut.tokens, pieces.idle.documents.tolist(), pieces.idle.tokens) == (4, [1], 8)
    with pytest.raises(PlanError, match="1 document would teach nothing") as caught:
        cut_pieces(corpus, 8, overflow="truncate_right", idle="error")
    assert caught.value.where == "made.jsonl:2 (12 tokens)"


def test_documents_without_loss_are_left_out_or_refused():
    corpus = corpus_of([(4, []), (0, []), (3, [(1, 2)])])
    pieces = cut_pieces(corpus, 8, overflow="error")
    assert pieces_of(pieces) == [(2, 0, 3)]
    assert (pieces.idle.documents.tolist(), pieces.idle.tokens) == ([0, 1], 4)
    with pytest.raises(PlanError):
        cut_pieces(corpus, 8, overflow="error", idle="error")


@given(documents(), st.integers(2, 9), st.sampled_from(["drop", "truncate_right", "truncate_left", "split"]))
def test_every_token_is_in_a_piece_or_counted(made, max_length, overflow):
    corpus = corpus_of(made)
    pieces = cut_pieces(corpus, max_length, overflow=overflow)
    assert pieces.length.max(initial=0) <= max_length
    assert pieces.length.min(initial=1) >= 1
    left = pieces.too_long.tokens + pieces.cut.tokens + pieces.idle.tokens
    assert pieces.length.sum() + left == sum(length for length, _ in made)
    tokens = [(document, n) for document, start, length in pieces_of(pieces) for n in range(start, start + length)]
    assert len(tokens) == len(set(tokens))
    assert all(n < made[document][0] for document, n in tokens)
    if overflow == "split":
        assert set(tokens) == {(d, n) for d, (length, runs) in enumerate(made) if runs for n in range(length)}
        assert max_length == 2 or 1 not in [
            length for document, _, length in pieces_of(pieces) if made[document][0] > 1
        ]


@given(documents(), st.integers(2, 9))
def test_pieces_that_stand_alone_teach_something(made, max_length):
    corpus = corpus_of(made)
    pieces = without_idle(cut_pieces(corpus, max_length, overflow="split"), corpus, "drop")
    for document, start, length in pieces_of(pieces):
        assert with_loss(made, document) & set(range(start + 1, start + length))


def test_only_chosen_documents_in_their_order():
    pieces = cut_pieces(corpus_of(THREE, chosen=np.array([2, 0], dtype=np.int32)), 12, overflow="error")
    assert pieces_of(pieces) == [(2, 0, 12), (0, 0, 5)]


@pytest.mark.parametrize("words", [{"max_length": 1}, {"overflow": "cut"}, {"idle": "keep"}])
def test_settings_that_cannot_be(words):
    with pytest.raises(UsageError):
        cut_pieces(corpus_of(THREE), **({"max_length": 8, "overflow": "drop"} | words))
