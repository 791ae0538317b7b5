"""Caption variants: kohya's shuffling, kept tags, several captions, stable numbers."""

import math
import random

import pytest

from latentcache.errors import UsageError
from latentcache.fields.captions import BETWEEN, CaptionVariants, captions_at_most
from latentcache.fields.prompt_embeds import EMPTY_VARIANT, NEGATIVE_VARIANT, PromptRecipe
from latentcache.fields.strings import Strings

TAGS = ["solo", "red hair", "blue sky", "smile", "tree", "1girl", "long skirt"]


def texts(caption, **settings):
    chosen = CaptionVariants(**settings)
    return [chosen.text(caption, number) for number in range(chosen.count(caption))]


def kohya_parts(caption, *, separator=",", keep=0, keep_separator=""):
    """Split a caption into fixed, flexible and last tags as ``process_caption`` of sd-scripts does."""

    def tags(text):
        return [tag.strip() for tag in text.split(separator) if tag.strip()]

    if keep_separator and keep_separator in caption:
        fixed, flexible = caption.split(keep_separator, 1)
        flexible, _, last = flexible.partition(keep_separator)
        return tags(fixed), tags(flexible), tags(last)
    return tags(caption)[:keep], tags(caption)[keep:], []


@pytest.mark.parametrize("seed", range(30))
def test_variants_are_possible_in_kohya(seed):
    rng = random.Random(seed)
    chosen = [rng.choice(TAGS) for _ in range(rng.randint(0, 7))]
    keep, keep_separator = rng.choice([(0, ""), (1, ""), (3, ""), (0, "|||"), (2, "|||")])
    caption = rng.choice([",", ", ", " ,"]).join(chosen)
    if keep_separator and rng.random() < 0.8:
        for _ in range(rng.randint(1, 2)):
            at = rng.randint(0, len(caption))
            caption = f"{caption[:at]} ||| {caption[at:]}"
    fixed, flexible, last = kohya_parts(caption, keep=0 if keep_separator else keep, keep_separator=keep_separator)
    variants = texts(caption, number=6, reorder=True, keep=keep_separator or str(keep))
    assert variants[0] == ", ".join([*fixed, *flexible, *last]), "variant 0 has the order of the caption"
    for text in variants:
        tags = text.split(", ") if text else []
        assert tags[: len(fixed)] == fixed
        assert tags[len(tags) - len(last) :] == last
        assert sorted(tags) == sorted([*fixed, *flexible, *last])
    assert len(variants) == min(6, math.factorial(len(flexible)))
    if len(set(flexible)) == len(flexible):
        assert len(set(variants)) == len(variants), "orders differ as far as there are so many"


def test_several_captions_are_variants():
    three = BETWEEN.join(["one", "two", "three"])
    assert texts(three, number=250) == ["one", "two", "three"]
    assert texts(three, number=2) == ["one", "two"]
    assert texts(three) == ["one"]
    assert texts("", number=4) == [""]
    several = Strings.of(["", three, "x", BETWEEN.join("ab")])
    assert captions_at_most(several) == 3
    assert captions_at_most(Strings.of(["a", ""])) == captions_at_most(Strings.of([])) == 1


def test_each_of_several_captions_has_equally_many_orders():
    variants = texts(BETWEEN.join(["a, b, c", "d, e, f"]), number=5, reorder=True)
    assert variants[:2] == ["a, b, c", "d, e, f"]
    assert [text[0] in "abc" for text in variants] == [True, False, True, False]
    assert len(set(variants)) == 4


@pytest.mark.parametrize("settings", [{"separator": ""}, {"keep": ""}])
def test_values_that_are_not_allowed(settings):
    with pytest.raises(UsageError, match="must not be empty"):
        CaptionVariants(**settings)


def recipe(**settings):
    about = {"output": "prompt_embeds", "pipeline": "stub", "fingerprint": "", "config": "", "tokenizer": ""}
    return PromptRecipe(**about, width=8, length=77, **settings)


def test_only_variant_texts_change_the_recipe():
    plain = recipe()
    more = recipe(captions=CaptionVariants(number=9), empty_prompt=True, negative_prompt="bad")
    assert plain.recipe_id == more.recipe_id
    assert "captions" not in plain.identity()
    shuffled = [CaptionVariants(reorder=True, number=2, **keys) for keys in ({}, {"keep": "1"}, {"separator": ";"})]
    ids = {recipe(captions=variants).recipe_id for variants in shuffled} | {plain.recipe_id}
    assert len(ids) == 4
    assert recipe(captions=CaptionVariants(reorder=True, number=7)).recipe_id in ids
    for variants_recipe in (plain, more, recipe(captions=shuffled[1])):
        assert PromptRecipe.from_json(variants_recipe.as_json()) == variants_recipe


def test_prompts_have_texts_of_their_own():
    both = recipe(empty_prompt=True, negative_prompt="bad, worse")
    assert both.text("a caption", EMPTY_VARIANT) == ""
    assert both.text("a caption", NEGATIVE_VARIANT) == "bad, worse"
    assert both.text(BETWEEN.join(["one", "two"]), 0) == "one"
