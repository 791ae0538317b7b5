import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.fields.input_ids import InputIds, InputIdsRecipe, parse_option
from latentcache.fields.protocol import Group
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable

KIND = InputIds()


def a_recipe(**changes):
    return InputIdsRecipe(**({"tokenizer": "ab" * 16, "num_ids": 32000, "eos_id": 2} | changes))


@given(st.booleans(), st.booleans(), st.integers(1, 1 << 20), st.lists(st.tuples(st.text(), st.text())))
def test_json_round_trip(bos, split, num_ids, options):
    recipe = a_recipe(add_bos=bos, split_control=split, num_ids=num_ids, template_options=tuple(options))
    again = InputIdsRecipe.from_json(recipe.as_json())
    assert again == recipe
    assert again.recipe_id == recipe.recipe_id


def test_the_id_is_pinned():
    assert a_recipe().recipe_id.hex() == "7f1ed5c278159dc40ad194e0c1c2d12e"


@pytest.mark.parametrize(
    "change",
    [{"tokenizer": "cd" * 16}, {"num_ids": 32001}, {"chat_template": "00"}, {"loss": "assistant"}, {"add_bos": True},
     {"add_eos": False}, {"split_control": False}, {"eos_id": 3}, {"template_options": (("tools", "[]"),)}],
)  # fmt: skip
def test_settings_of_ids_and_labels_change_the_recipe_id(change):
    assert a_recipe(**change).recipe_id != a_recipe().recipe_id
    assert [name for name, _, _ in a_recipe().differences(a_recipe(**change))] == list(change)


def test_tokenizer_differences_are_listed_by_part():
    parts, other_parts = {"vocab": "1", "merges": "2"}, {"vocab": "1", "merges": "3", "normalizer": "4"}
    pair = a_recipe(), a_recipe(tokenizer="cd" * 16, loss="assistant")
    loss, whole = ("loss", "all", "assistant"), ("tokenizer", "ab" * 16, "cd" * 16)
    differences = pair[0].differences(pair[1], ({"parts": parts}, {"parts": other_parts}))
    assert differences == [("merges", "2", "3"), ("normalizer", None, "4"), loss]
    assert pair[0].differences(pair[1], ({}, {"parts": other_parts})) == pair[0].differences(pair[1]) == [whole, loss]
    assert pair[0].differences(pair[1], ({"parts": parts}, {"parts": parts})) == [whole, loss]
    assert pair[0].differences(pair[0], ({"parts": parts}, {"parts": other_parts})) == []


def test_the_padding_token_is_not_in_the_recipe_id():
    assert a_recipe(pad_id=0).recipe_id == a_recipe().recipe_id
    assert a_recipe(pad_id=0).differences(a_recipe()) == []


@pytest.mark.parametrize(("num_ids", "dtype"), [(1, "uint16"), (65536, "uint16"), (65537, "uint32")])
def test_the_type_of_ids(num_ids, dtype):
    assert a_recipe(num_ids=num_ids).dtype == dtype


def table(contents, **columns):
    content = np.array(contents, np.uint8).repeat(16).reshape(-1, 16)
    names = Strings.of(f"t.jsonl:{line}" for line in range(1, len(contents) + 1))
    files = Files(
        names=Strings.of(["t.jsonl"]), stat=np.zeros((1, 6), np.uint64), content=np.zeros((1, 16), np.uint8)
    )
    record = Input(content=content, file=np.zeros(len(contents), np.int32), line=np.arange(1, len(contents) + 1))
    return SampleTable(names=names, files=files, inputs={"record": record}, columns=columns)


def test_every_record_is_one_item_with_a_key():
    samples, recipe = table([7, 8, 7], characters=np.array([1, 20, 1], np.int64)), a_recipe()
    plan = KIND.plan(samples, recipe)
    keys = plan.keys(KIND, KIND.content(samples), recipe)
    assert plan.sample.tolist() == [0, 1, 2]
    assert plan.cost.tolist() == [2, 21, 2]
    assert keys[0].tobytes() == keys[2].tobytes() != keys[1].tobytes()
    assert keys[0, 8:24].tobytes() == bytes([7]) * 16
    assert plan.groups == (Group(label="", shape=(-1,)),)
    assert len(KIND.plan(table([]), a_recipe()).sample) == 0


def test_ids_outside_the_vocabulary_fail_the_check():
    for ids in ([0, 31999], []):
        assert KIND.check(np.array(ids, np.uint16), a_recipe()) is None
    failure = KIND.check(np.array([32000], np.uint16), a_recipe())
    assert failure.detail == "token id 32000 is outside the vocabulary of 32000"


def test_other_ids_are_different():
    ids = np.arange(5, dtype=np.uint16)
    assert not KIND.compare(ids, ids.copy(), {}, a_recipe()).differs
    assert KIND.compare(ids, ids[:4], {}, a_recipe()).differs


def test_template_options_are_json_or_text():
    assert parse_option("a=false") == ("a", "false")
    assert parse_option("a=x=y") == ("a", '"x=y"')
    with pytest.raises(UsageError, match="no value"):
        parse_option("a")
