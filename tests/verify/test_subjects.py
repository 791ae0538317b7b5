import numpy as np
import pytest
from small_tokens import build, opened, texts, write_texts

from latentcache.store.generation import load_generation
from latentcache.verify.selection import Depth, Selection
from latentcache.verify.subjects import (
    choose,
    chosen_by,
    count_samples,
    every,
    field_of,
    rows_with,
    samples_of,
    samples_with,
    stated,
)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    build(write_texts(folder / "a.jsonl", texts(200, longest=4000)), folder / "cache")
    return opened(folder / "cache")[0]


def test_a_document_stands_behind_its_block(tokens):
    inside = np.flatnonzero(tokens.documents.block == 1).tolist()
    assert (field_of(tokens), count_samples(tokens), samples_of(tokens, 1)) == ("input_ids", 200, inside)
    one = np.zeros(200, dtype=bool)
    one[inside[0]] = True
    assert np.flatnonzero(rows_with(tokens, one)).tolist() == [1]
    assert np.flatnonzero(samples_with(tokens, rows_with(tokens, one))).tolist() == inside


def test_a_sample_stands_behind_its_entry(shared):
    generation = load_generation(shared[1])
    assert (field_of(generation), count_samples(generation)) == ("latents", 4)
    for row in range(4):
        (sample,) = samples_of(generation, row)
        only = np.arange(4) == sample
        assert np.flatnonzero(rows_with(generation, only)).tolist() == [row]
        assert (samples_with(generation, np.arange(4) == row) == only).all()


def test_slices_of_tokens_part_the_blocks(tokens):
    parts = [choose(tokens, Selection(slice_number=number, slices=3)) for number in (1, 2, 3)]
    assert sum(parts).tolist() == [1] * 200
    assert all((samples_with(tokens, rows_with(tokens, part)) == part).all() for part in parts)
    assert int(choose(tokens, Selection(number=7)).sum()) == 7


def test_all_is_not_written_down(tokens):
    assert chosen_by(tokens, None) == (None, None)
    assert (len(every(tokens, None)), every(tokens, None).all()) == (200, True)
    some, rows = chosen_by(tokens, Selection(number=1))
    assert (int(some.sum()), int(rows.sum())) == (1, 1)
    own = every(tokens, some)
    own[:] = False
    assert int(some.sum()) == 1


def test_only_a_draw_that_was_read_to_its_end_says_something(tokens):
    some, everything = choose(tokens, Selection(number=7)), every(tokens, None)
    drawn, timed = Depth(selection=Selection(number=7)), Depth(full=True, max_duration_s=1.0)
    assert stated(tokens, drawn, some, some).startswith("7 clean: 95 % sure")
    fewer = some.copy()
    fewer[np.flatnonzero(some)[0]] = False
    assert stated(tokens, drawn, some, fewer) == ""
    assert stated(tokens, timed, None, some) == ""
    assert stated(tokens, timed, None, everything) == "200 clean: that is all of them"
    assert stated(tokens, Depth(full=True), None, everything) == ""
