import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError
from latentcache.geometry.buckets import bucket_table
from latentcache.geometry.sizes import Size
from latentcache.identity.key import RECIPE_BYTES, EntryKey
from latentcache.recipe import (
    EncoderSpec,
    GeometrySettings,
    Normalisation,
    PixelProfile,
    Recipe,
    differences,
    flat,
)

SPEC = EncoderSpec(family="AutoencoderKL", fingerprint="00" * 16, config="11" * 16, channels=4, factor=8, multiple=8)
RECIPE = Recipe(geometry=GeometrySettings(), pixels=PixelProfile(), encoder=SPEC)

IDENTITY = {
    "pixels": {
        "resample": "lanczos-u8",
        "decoder": "pillow",
        "orientation": "none",
        "icc": "ignore",
        "alpha": "#000000",
        "deep": "round",
        "version": 2,
    },
    "encoder": {
        "family": "AutoencoderDC",
        "fingerprint": "22" * 16,
        "config": "33" * 16,
        "channels": 16,
        "factor": 32,
        "compute_dtype": "bfloat16",
        "storage_dtype": "float32",
        "posterior": "moments",
        "tiling": True,
    },
    "geometry": {"rule": 2},
}
READ_TIME = {
    "encoder": {
        "normalisation": Normalisation(kind="scale-shift", scale=0.18215),
        "generic": True,
        "multiple": 16,
    },
    "geometry": {
        "resolutions": (512, 1024),
        "multiple": 32,
        "min_side": 256,
        "max_side": 1536,
        "buckets": (Size(704, 1088),),
        "flip": True,
    },
}
cases = [(part, name, value) for part, named in IDENTITY.items() for name, value in named.items()]
free_cases = [(part, name, value) for part, named in READ_TIME.items() for name, value in named.items()]

finite = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=8)
counts = st.integers(1, 4096)
recipes = st.builds(
    Recipe,
    geometry=st.builds(
        GeometrySettings,
        resolutions=st.lists(counts, max_size=3).map(tuple),
        multiple=counts,
        min_side=st.none() | counts,
        max_side=st.none() | counts,
        buckets=st.lists(st.builds(Size, counts, counts), max_size=3).map(tuple),
        flip=st.booleans(),
    ),
    pixels=st.builds(PixelProfile, resample=words, icc=words, alpha=words, version=counts),
    encoder=st.builds(
        EncoderSpec,
        family=words,
        fingerprint=words,
        config=words,
        channels=counts,
        factor=counts,
        multiple=counts,
        tiling=st.booleans(),
        generic=st.booleans(),
        normalisation=st.builds(
            Normalisation,
            kind=words,
            scale=finite,
            shift=finite,
            mean=st.lists(finite, max_size=3).map(tuple),
            std=st.lists(finite, max_size=3).map(tuple),
        ),
    ),
)


def changed(part, name, value):
    return replace(RECIPE, **{part: replace(getattr(RECIPE, part), **{name: value})})


def test_every_field_is_either_identity_or_read_time():
    for part in ("pixels", "encoder", "geometry"):
        named = {field.name for field in fields(getattr(RECIPE, part))}
        assert named == IDENTITY.get(part, {}).keys() | READ_TIME.get(part, {}).keys()


@pytest.mark.parametrize(("part", "name", "value"), cases)
def test_a_field_that_moves_the_bytes_changes_the_id(part, name, value):
    assert changed(part, name, value).recipe_id != RECIPE.recipe_id
    assert changed(part, name, value).key_part != RECIPE.key_part


@pytest.mark.parametrize(("part", "name", "value"), free_cases)
def test_a_field_that_does_not_move_the_bytes_keeps_the_id(part, name, value):
    other = changed(part, name, value)
    assert other != RECIPE
    assert other.recipe_id == RECIPE.recipe_id


def test_all_changes_give_different_ids():
    ids = {changed(*case).recipe_id for case in cases}
    assert len(ids) == len(cases)


def test_the_id_is_pinned():
    # A different id makes every cache in the world stale. Change it only together with a rule or a version.
    assert RECIPE.recipe_id.hex() == "88a061ca4ae9d9c4f7ed3d3d03233d79"


def test_the_key_takes_the_first_bytes_of_the_id():
    assert RECIPE.recipe_id[:RECIPE_BYTES] == RECIPE.key_part
    EntryKey(content=bytes(16), bucket=Size(512, 512), recipe=RECIPE.key_part).pack()


@given(recipes)
def test_json_and_back_gives_an_equal_recipe(recipe):
    again = Recipe.from_json(json.loads(json.dumps(recipe.as_json())))
    assert again == recipe
    assert again.recipe_id == recipe.recipe_id
    assert differences(again, recipe) == []


@given(recipes, recipes)
def test_differences_are_the_fields_that_differ(first, second):
    found = {name: (mine, theirs) for name, mine, theirs in differences(first, second)}
    mine, theirs = flat(first), flat(second)
    assert found == {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}
    assert bool(found) == (first != second)


@pytest.mark.parametrize(("part", "name", "value"), cases + free_cases)
def test_one_changed_field_is_one_named_difference(part, name, value):
    assert [row[0] for row in differences(RECIPE, changed(part, name, value))] == [f"{part}.{name}"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("pixels"),
        lambda data: data["encoder"].pop("normalisation"),
        lambda data: data["encoder"].pop("family"),
        lambda data: data["encoder"].update(colour="blue"),
        lambda data: data["geometry"].update(buckets=[[0, 64]]),
        lambda data: data["geometry"].update(buckets=[64]),
        lambda data: data["geometry"].update(resolutions=None),
        lambda data: data.update(encoder=None),
        lambda data: data.update(pixels=[]),
    ],
)
def test_a_recipe_that_cannot_be_read_is_refused(damage):
    data = json.loads(json.dumps(RECIPE.as_json()))
    damage(data)
    with pytest.raises(RecipeError, match="cannot be read"):
        Recipe.from_json(data)


def test_with_encoder_replaces_only_what_is_named():
    other = RECIPE.with_encoder(storage_dtype="bfloat16")
    assert other.encoder == replace(SPEC, storage_dtype="bfloat16")
    assert (other.geometry, other.pixels) == (RECIPE.geometry, RECIPE.pixels)


def test_tables_come_one_per_resolution():
    settings = GeometrySettings(resolutions=(512, 1024), multiple=64, max_side=1536)
    assert settings.tables() == tuple(
        bucket_table(resolution=r, multiple=64, max_side=1536) for r in settings.resolutions
    )


def test_explicit_buckets_are_one_table():
    (table,) = GeometrySettings(buckets=(Size(704, 1088), Size(704, 1152)), resolutions=(512,)).tables()
    assert table.sizes == (Size(704, 1088), Size(704, 1152))


def test_no_resolution_is_refused_with_the_option_to_give():
    with pytest.raises(RecipeError, match="no resolution") as caught:
        GeometrySettings(resolutions=()).tables()
    assert "--resolution" in caught.value.fix
