import json
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import RecipeError, UsageError
from latentcache.fields.clips import ClipSettings
from latentcache.fields.latents import (
    EncoderSpec,
    GeometrySettings,
    Latents,
    LatentsRecipe,
    LatentsSettings,
    Normalization,
    PixelProfile,
    geometry_of,
)
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable
from latentcache.geometry.planned import PlannedBucket, PlannedTable, Target
from latentcache.geometry.sizes import Size, unusable
from latentcache.identity.content import entry_key

KIND = Latents()
SPEC = EncoderSpec(family="AutoencoderKL", fingerprint="00" * 16, config="11" * 16, channels=4, factor=8, multiple=8)
RECIPE = LatentsRecipe(geometry=GeometrySettings(), pixels=PixelProfile(), encoder=SPEC)


def encoded(**changes):
    return replace(RECIPE, encoder=replace(SPEC, **changes))


IDENTITY = {
    "pixels": {
        "resample": "lanczos-u8", "decoder": "pillow", "orientation": "none", "icc": "ignore", "alpha": "#000000",
        "deep": "round", "version": 2,
    },
    "encoder": {
        "family": "AutoencoderDC", "fingerprint": "22" * 16, "config": "33" * 16, "channels": 16, "factor": 32,
        "compute_dtype": "bfloat16", "storage_dtype": "float32", "posterior": "moments", "tiling": True,
    },
    "geometry": {"rule": 2, "crop": "top", "crops": 3, "clips": ClipSettings(frames=(5, 9), step=4), "like": "kohya"},
}  # fmt: skip
READ_TIME = {
    "encoder": {"normalization": Normalization(kind="scale-shift", scale=0.18215), "multiple": 16},
    "geometry": {
        "resolutions": (512, 1024), "multiple": 32, "min_side": 256, "max_side": 1536,
        "buckets": (Size(704, 1088),), "flip": True, "upscale": False, "min_pixels": 4096,
        "target": Target(batch=8),
        "planned": (PlannedTable(buckets=(PlannedBucket(size=Size(512, 704), width=3, height=2),)),),
    },
}  # fmt: skip
cases = [(part, name, value) for part, named in IDENTITY.items() for name, value in named.items()]
free_cases = [(part, name, value) for part, named in READ_TIME.items() for name, value in named.items()]


def changed(part, name, value):
    return replace(RECIPE, **{part: replace(getattr(RECIPE, part), **{name: value})})


def test_every_field_is_either_identity_or_read_time():
    for part in ("pixels", "encoder", "geometry"):
        named = {field.name for field in fields(getattr(RECIPE, part))}
        assert named == IDENTITY.get(part, {}).keys() | READ_TIME.get(part, {}).keys()


def test_the_id_is_pinned():
    # A changed id makes every existing cache stale. Change it only together with a rule or format version.
    assert RECIPE.recipe_id.hex() == "783db918498ac0d1228c00ec8446c467"


@pytest.mark.parametrize(("part", "name", "value"), cases + free_cases)
def test_settings_of_bytes_change_the_recipe_id(part, name, value):
    other = changed(part, name, value)
    assert other != RECIPE
    assert (other.recipe_id != RECIPE.recipe_id) is (name in IDENTITY.get(part, {}))
    again = LatentsRecipe.from_json(json.loads(json.dumps(other.as_json())))
    assert (again, again.recipe_id) == (other, other.recipe_id)
    assert again.differences(other) == []
    settings = [row[0] for row in RECIPE.differences(other)]
    assert settings
    assert all(setting == f"{part}.{name}" or setting.startswith(f"{part}.{name}.") for setting in settings)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data.pop("pixels"),
        lambda data: data["encoder"].pop("normalization"),
        lambda data: data["encoder"].update(color="blue"),
        lambda data: data["geometry"].update(buckets=[[0, 64]]),
        lambda data: data.update(encoder=None),
    ],
)
def test_an_unreadable_recipe_is_rejected(damage):
    data = json.loads(json.dumps(RECIPE.as_json()))
    damage(data)
    with pytest.raises(RecipeError, match="cannot be read"):
        LatentsRecipe.from_json(data)


def table(sizes, files=None):
    sizes = np.array(sizes, dtype=np.uint32).reshape(-1, 2)
    content = 1 + np.arange(len(sizes)).astype(np.uint8).repeat(16).reshape(-1, 16)
    names = Strings.of(f"{number}.png" for number in range(len(sizes)))
    file = np.arange(len(sizes), dtype=np.int32) if files is None else np.array(files, dtype=np.int32)
    empty = np.zeros((len(sizes), 6), dtype=np.uint64)
    return SampleTable(
        names=names,
        files=Files(names=names, stat=empty, content=content),
        inputs={"image": Input(content=content, file=file)},
        columns={"original_size": sizes},
    )


sides = st.integers(16, 4000)


@given(st.lists(st.tuples(sides, sides), max_size=20), st.booleans())
def test_batched_and_single_plans_agree(sizes, flip):
    recipe = replace(RECIPE, geometry=GeometrySettings(resolutions=(256, 512), flip=flip))
    plan, keys = keyed_plan(table(sizes), recipe)
    expected, rejected = [], []
    for row, size in enumerate(sizes):
        image = Size(*size)
        buckets = {
            grid.nearest(image) for grid in recipe.geometry.tables() if not unusable(image, grid.nearest(image))
        }
        expected += [(row, b, v) for b in sorted(buckets, key=lambda b: (-b.area, b.width)) for v in range(1 + flip)]
        rejected += [row] * (not buckets)
    labels = [plan.groups[group].label for group in plan.group]
    items = list(zip(plan.sample.tolist(), labels, plan.variant.tolist(), strict=True))
    assert items == [(row, str(bucket), variant) for row, bucket, variant in expected]
    assert [row for row, _ in plan.rejected] == rejected
    assert plan.cost.tolist() == [bucket.area for _, bucket, _ in expected]
    for key, (row, bucket, variant) in zip(keys, expected, strict=True):
        dims, content = (1, bucket.height, bucket.width), bytes([row + 1]) * 16
        wanted = entry_key(kind=0, variant=variant, dims=dims, content=content, recipe=recipe.recipe_id[:8])
        assert key.tobytes() == wanted


def test_samples_without_a_size_give_no_item():
    plan = KIND.plan(table([(0, 0), (512, 512), (512, 512), (8, 512)], files=[0, 1, -1, 2]), RECIPE)
    assert plan.sample.tolist() == [1]
    assert [(row, note.reason, note.target) for row, note in plan.rejected] == [(3, "extreme-aspect", "latents")]
    assert plan.groups[0].shape == (4, 64, 64)
    assert KIND.plan(table([]), RECIPE).groups == ()


def test_planning_uses_little_memory():
    """Ten million samples: a build may use 2 GB."""
    sizes = np.random.default_rng(0).choice([384, 512, 640], (1 << 17, 2))
    samples = table(sizes)
    tracemalloc.start()
    try:
        plan = KIND.plan(samples, RECIPE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(plan.sample) == len(sizes)
    assert peak < 72 * len(sizes)


def keyed_plan(samples, recipe):
    plan = KIND.plan(samples, recipe)
    return plan, plan.keys(KIND, KIND.content(samples), recipe)


@pytest.mark.parametrize(
    ("settings", "cached", "expected"),
    [
        ({}, {}, ("center", 1)),
        ({"crop": "random"}, {}, ("random", 4)),
        ({"crop": "random", "crop_variants": 2}, {}, ("random", 2)),
        ({}, {"crop": "random", "crops": 7}, ("random", 7)),
        ({"crop_variants": 2}, {"crop": "random", "crops": 7}, ("random", 2)),
        ({"crop": "top"}, {"crop": "random", "crops": 7}, ("top", 1)),
    ],
)
def test_crops_that_were_not_given_follow_the_cache(settings, cached, expected):
    chosen = geometry_of(LatentsSettings(**settings), replace(RECIPE, geometry=GeometrySettings(**cached)), 8)
    assert (chosen.crop, chosen.crops) == expected


@pytest.mark.parametrize("settings", [{"crop_variants": 2}, {"crop": "top", "crop_variants": 2}])
def test_several_crops_must_be_random(settings):
    with pytest.raises(UsageError, match=r"crop_variants=2: not with crop (center|top)") as caught:
        geometry_of(LatentsSettings(**settings), None, 8)
    assert caught.value.fix == "--crop=random --crop-variants=2"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, ((512,), 64)),
        ({"resolutions": (768, 768)}, ((768,), 64)),
        ({"bucket_step": 48}, ((512,), 48)),
        ({"buckets": (Size(704, 1088),)}, ((), 8)),
    ],
)
def test_sizes_that_were_not_given_follow_the_cache(settings, expected):
    geometry = geometry_of(LatentsSettings(**settings), RECIPE, 8)
    assert (geometry.resolutions, geometry.multiple) == expected


def test_the_grid_fits_the_model():
    assert geometry_of(LatentsSettings(bucket_step=24), None, 16).multiple == 48


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_values_that_are_not_finite_fail_the_check(dtype):
    recipe, group = encoded(storage_dtype=dtype), RECIPE.group(Size(64, 64))
    payload = np.zeros(group.shape, dtype=np.uint16 if dtype == "bfloat16" else dtype)
    assert KIND.check(payload, recipe) is None
    payload[0, 0, 0] = 0x7F80 if dtype == "bfloat16" else np.inf
    assert KIND.check(payload, recipe).reason == "non-finite"


EXACT = {"devices": ["cpu"], "largest": 0.0, "mean": 0.0, "device": "cpu"}


@pytest.mark.parametrize(
    ("shift", "noise", "dtype", "differs"),
    [
        (0.05, EXACT, "float32", False),
        (0.2, EXACT, "float32", True),
        (0.2, EXACT | {"largest": 0.05, "mean": 0.05}, "float32", False),
        (0.2, EXACT | {"device": "cuda"}, "float32", True),
        (0.2, EXACT | {"device": "cuda"}, "bfloat16", False),
        (0.2, {}, "bfloat16", False),
    ],
)
def test_a_difference_beyond_the_noise_is_found(shift, noise, dtype, differs):
    recipe = encoded(compute_dtype=dtype, storage_dtype="float32")
    stored = np.random.default_rng(0).standard_normal((4, 32, 32)).astype(np.float32)
    again = stored.copy()
    again[:, ::7, ::7] += shift  # few values: the mean stays small
    difference = KIND.compare(stored, again, noise, recipe)
    assert difference.differs is differs
    assert difference.largest == pytest.approx(shift / stored.std(), rel=0.01)
    assert bool(difference.detail) is differs


def test_differences_use_the_recorded_noise():
    """The unit is the test image for means and logvars, plus two storage roundings."""
    flat, floats = np.full((4, 8, 8), 0.1, np.float32), encoded(storage_dtype="float32")
    assert KIND.compare(flat, flat + 0.01, EXACT, floats).differs
    assert not KIND.compare(flat, flat + 0.01, EXACT | {"scale": 1.0}, floats).differs
    both = encoded(posterior="moments", storage_dtype="float32")
    draw = np.random.default_rng(0).standard_normal((8, 8, 8)).astype(np.float32)
    draw[4:] *= 1000
    again = draw.copy()
    again[0] += 10.0
    assert KIND.compare(draw, again, EXACT, both).differs
    assert KIND.compare(draw, again, EXACT, both).largest == pytest.approx(10, rel=0.1)
    stored = np.full((4, 8, 8), 0x3F80, np.uint16)
    assert not KIND.compare(stored, stored + np.uint16(1), EXACT, encoded(storage_dtype="bfloat16")).differs
