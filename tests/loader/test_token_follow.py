"""Views of a build of tokens that has been announced, and of which all or nothing has come."""

import numpy as np
import pytest
import torch
from made_coming import announced, seal
from small_tokens import build, write_texts

from latentcache import combine_views, open_tokens
from latentcache.errors import NotYetEncodedError, PlanError, UsageError

TEXTS = [f"text {number} " + "word " * (number % 7) for number in range(24)]
CHAT = '{"messages": [{"role": "user", "content": "a longer question"}, {"role": "assistant", "content": "yes"}]}'


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(write_texts(folder / "a.jsonl", TEXTS), folder / "cache")
    return folder / "cache"


@pytest.fixture
def coming(built, tmp_path):
    """The cache to be, of which nothing is there yet."""
    announced(built, tmp_path / "cache")
    return open_tokens(tmp_path / "cache", follow=True, timeout_s=0)


def rows_of(cache, length=16, overflow="truncate_right", **more):
    return cache.padded(length, overflow=overflow, idle="error", **more)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("overflow", ["truncate_right", "truncate_left"])
def test_rows_are_those_of_the_finished_cache(built, coming, side, overflow):
    seal(built, coming.store.layout)
    expected = rows_of(open_tokens(built), overflow=overflow, padding_side=side)
    view = rows_of(coming, overflow=overflow, padding_side=side)
    for rows in ([3], [5, 0, 23, 6], range(24)):
        found, wanted = view.batch(rows), expected.batch(rows)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_number_of_rows_is_exact_before_anything_has_come(coming):
    view = rows_of(coming)
    assert (len(coming), len(view), len(view.loader(batch_size=4)), coming.under_way) == (24, 24, 6, True)
    assert view.plan(batch_size=4).steps == view.steps(1, batch_size=4) == 6
    assert coming.sources == {"a.jsonl": 24}
    train, held = coming.split(0.5)
    assert 0 < len(rows_of(train)) < 24
    assert len(combine_views([rows_of(train), rows_of(held)])) == 24
    mixed = combine_views([rows_of(train), rows_of(held)], weights=[1, 1], rows=10)
    assert len(mixed.loader(batch_size=5)) == 2
    with pytest.raises(NotYetEncodedError):
        view.batch([0])


@pytest.mark.parametrize(
    "ask",
    [
        lambda cache: cache.packed(64),
        lambda cache: cache.blocks(64),
        lambda cache: cache.padded(64),
        lambda cache: cache.padded(64, overflow="truncate_right"),
        lambda cache: rows_of(cache, 64, lengths=[16, 64]),
        lambda cache: cache.tokens,
        lambda cache: rows_of(cache).tokens,
        lambda cache: rows_of(cache).left,
        lambda cache: combine_views([rows_of(cache)], weights=[1], by="tokens"),
    ],
)
def test_what_depends_on_lengths_is_refused_with_what_can_be_had(coming, ask):
    with pytest.raises(UsageError, match="not known while the build is under way") as caught:
        ask(coming)
    assert "overflow='truncate_right', idle='error'" in caught.value.fix


def test_a_checkpoint_fits_the_finished_cache(built, coming):
    state = rows_of(coming).loader(batch_size=4, seed=1).state_dict()
    finished = open_tokens(built)
    rows_of(finished).loader(batch_size=4, seed=1).load_state_dict(state)
    finished.padded(16, overflow="truncate_right").loader(batch_size=4, seed=1).load_state_dict(state)
    other = finished.padded(16, overflow="truncate_left").loader(batch_size=4, seed=1)
    with pytest.raises(PlanError, match="another cache"):
        other.load_state_dict(state)
    rows_of(finished, 512, "error").loader(batch_size=4, seed=1).load_state_dict(
        rows_of(coming, 512).loader(batch_size=4, seed=1).state_dict()
    )


def test_a_document_that_makes_no_row_is_named_when_it_comes(built, coming, tmp_path):
    seal(built, coming.store.layout)
    with pytest.raises(PlanError, match=r"longer than max_length=16.*a\.jsonl:7"):
        rows_of(coming, overflow="error").batch([0, 6])
    (tmp_path / "chat.jsonl").write_text(CHAT + "\n")
    build(tmp_path / "chat.jsonl", tmp_path / "chats")
    layout, _ = announced(tmp_path / "chats", tmp_path / "coming")
    seal(tmp_path / "chats", layout)
    view = rows_of(open_tokens(tmp_path / "coming", follow=True))
    with pytest.raises(PlanError, match=r"chat\.jsonl:1"):  # what would be learned is cut off
        view.batch([0])


def test_the_tokenizer_is_compared(coming, built, tmp_path):
    recipe = coming.recipe
    assert len(open_tokens(tmp_path / "cache", recipe.tokenizer, follow=True)) == 24
    assert not open_tokens(built, follow=True).under_way


def test_the_reader_alone_does_not_wait(built):
    with pytest.raises(UsageError, match="finished build"):
        open_tokens(built).store.ready(np.array([0]))
