import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError
from latentcache.token_recipe import TokenRecipe, token_differences


def a_recipe(**changes):
    return TokenRecipe(**({"tokenizer": "ab" * 16, "num_ids": 32000, "eos_id": 2} | changes))


@given(st.booleans(), st.booleans(), st.integers(1, 1 << 20), st.lists(st.tuples(st.text(), st.text())))
def test_json_round_trip(bos, split, num_ids, options):
    recipe = a_recipe(add_bos=bos, split_control=split, num_ids=num_ids, template_options=tuple(options))
    again = TokenRecipe.from_json(recipe.as_json())
    assert again == recipe
    assert again.recipe_id == recipe.recipe_id


def test_the_id_that_every_cache_of_version_one_has():
    assert a_recipe().recipe_id.hex() == "297f20eb880016f44a83bc1ef304ac6f"


@pytest.mark.parametrize(
    "change",
    [{"tokenizer": "cd" * 16}, {"num_ids": 32001}, {"chat_template": "00"}, {"loss": "assistant"}, {"add_bos": True},
     {"add_eos": False}, {"split_control": False}, {"eos_id": 3}, {"template_options": (("tools", "[]"),)}],
)  # fmt: skip
def test_what_moves_ids_or_labels_moves_the_id(change):
    assert a_recipe(**change).recipe_id != a_recipe().recipe_id
    assert [name for name, _, _ in token_differences(a_recipe(), a_recipe(**change))] == list(change)


def test_a_tokenizer_that_differs_is_given_by_its_parts_where_both_are_known():
    mine, theirs = {"vocab": "1", "merges": "2"}, {"vocab": "1", "merges": "3", "normalizer": "4"}
    pair = a_recipe(), a_recipe(tokenizer="cd" * 16, loss="assistant")
    loss = ("loss", "all", "assistant")
    found = token_differences(*pair, cached_parts=mine, parts=theirs)
    assert found == [("merges", "2", "3"), ("normalizer", "", "4"), loss]
    whole = [("tokenizer", "ab" * 16, "cd" * 16), loss]
    assert token_differences(*pair, cached_parts={}, parts=theirs) == token_differences(*pair, parts=theirs) == whole
    assert token_differences(*pair, cached_parts=mine, parts=mine) == whole
    assert token_differences(pair[0], pair[0], cached_parts=mine, parts=theirs) == []


def test_the_filling_is_a_matter_of_reading():
    assert a_recipe(pad_id=0).recipe_id == a_recipe().recipe_id
    assert token_differences(a_recipe(pad_id=0), a_recipe()) == []


@pytest.mark.parametrize(("num_ids", "dtype"), [(1, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_type_of_ids(num_ids, dtype):
    assert a_recipe(num_ids=num_ids).dtype == dtype


@pytest.mark.parametrize("change", [{"unknown": 1}, {"template_options": 3}])
def test_a_recipe_of_another_version_is_refused(change):
    with pytest.raises(RecipeError):
        TokenRecipe.from_json(a_recipe().as_json() | change)
