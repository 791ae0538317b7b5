import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from made_corpora import corpus_of, documents, learned_columns, rows_of

from latentcache.plan.row_kinds import block_rows, packed_rows, padded_rows
from latentcache.plan.runs import label_runs, learned_of_pieces


@given(documents(), st.integers(2, 20), st.sampled_from(["padded", "packed", "blocks", "islands"]))
def test_what_is_learned_is_what_the_documents_say(made, max_length, kind):
    corpus = corpus_of(made)
    if kind in ("padded", "packed"):
        plan = (padded_rows if kind == "padded" else packed_rows)(corpus, max_length, overflow="split")
    else:
        plan = block_rows(corpus, max_length, crossing=kind == "blocks")
    runs = label_runs(corpus, plan)
    start = 0
    for row, end, learned in zip(rows_of(plan), runs.ends.tolist(), runs.learned().tolist(), strict=True):
        parts = zip(runs.first[start:end].tolist(), runs.last[start:end].tolist(), strict=True)
        columns = [column for first, last in parts for column in range(first, last)]
        assert sorted(columns) == columns
        assert set(columns) == learned_columns(made, row, crossing=kind == "blocks")
        assert len(columns) == learned
        start = end


def test_a_piece_alone_does_not_learn_its_first_token():
    corpus = corpus_of([(6, [(0, 2), (4, 2)])])
    pieces = [np.array(column) for column in ([0, 0, 0, 0], [0, 1, 3, 4], [6, 3, 3, 1])]
    assert learned_of_pieces(corpus, *pieces).tolist() == [3, 0, 2, 0]
