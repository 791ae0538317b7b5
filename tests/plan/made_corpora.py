"""Documents with runs of loss, made by hypothesis, and what rows of them must be, worked out token by token."""

import numpy as np
from hypothesis import strategies as st

from latentcache.plan.rows import Corpus, begins


@st.composite
def documents(draw, most=9, longest=14):
    """[(length, [(first, number), ...])], runs rising and not touching."""
    made = []
    for length in draw(st.lists(st.integers(0, longest), max_size=most)):
        loss = draw(st.one_of(st.just([True] * length), st.lists(st.booleans(), min_size=length, max_size=length)))
        made.append((length, runs_of(loss)))
    return made


def runs_of(flags):
    runs, start = [], None
    for place, flag in enumerate([*flags, False]):
        if flag and start is None:
            start = place
        elif not flag and start is not None:
            runs.append((start, place - start))
            start = None
    return runs


def corpus_of(made, chosen=None):
    return Corpus(
        length=np.array([length for length, _ in made], dtype=np.uint32),
        span_ends=np.cumsum([len(runs) for _, runs in made], dtype=np.int64),
        spans=np.array([run for _, runs in made for run in runs], dtype=np.uint32).reshape(-1, 2),
        where=lambda number: f"made.jsonl:{number + 1}",
        chosen=chosen,
    )


def with_loss(made, document):
    """The numbers of the tokens of a document that carry loss."""
    return {place for first, number in made[document][1] for place in range(first, first + number)}


def rows_of(plan):
    """[[(document, start, length), ...], ...]"""
    pieces = list(zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True))
    return [pieces[first:last] for first, last in zip(begins(plan.ends).tolist(), plan.ends.tolist(), strict=True)]


def learned_columns(made, row, crossing=False):
    """The columns of a row that are learned, from the documents alone."""
    columns, place = set(), 0
    for document, start, length in row:
        for token in range(start, start + length):
            alone = place == 0 if crossing else token == start
            if token in with_loss(made, document) and not alone:
                columns.add(place)
            place += 1
    return columns
