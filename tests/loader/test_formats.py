import pytest
import torch
from small_cache import build, draw

from latentcache.errors import UsageError
from latentcache.loader.cache import open_cache
from latentcache.loader.formats import FORMATS, formatted

PLAIN = {"latents", "keys", "names", "captions", "original_size", "crop_top_left", "target_size"}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Pictures that are cropped, beside their captions."""
    folder = tmp_path_factory.mktemp("formats")
    for number, size in enumerate([(97, 64), (98, 64), (64, 101), (64, 99)]):
        draw(folder / "data" / f"{number}.png", size, seed=number)
        (folder / "data" / f"{number}.txt").write_text(f"caption {number}")
    build(folder / "data", folder / "cache", bucket_step=16, min_side=32)
    return open_cache(folder / "cache")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (None, PLAIN),
        ("plain", PLAIN),
        ("diffusers-sd", {"latents", "prompts", "keys", "names"}),
        (
            "diffusers-sdxl",
            {"latents", "prompts", "keys", "names", "time_ids", "original_sizes", "crop_top_lefts", "target_sizes"},
        ),
        ("diffusers-flux", {"latents", "prompts", "keys", "names", "img_ids"}),
    ],
)
def test_a_batch_has_the_names_of_its_trainer(opened, name, expected):
    assert set(next(iter(opened.loader(batch_size=2, format=name)))) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_only_names_change(opened, name):
    plain = opened.loader(batch_size=2, seed=5)
    named = opened.loader(batch_size=2, seed=5, format=name)
    for before, after in zip(plain, named, strict=True):
        assert torch.equal(before["latents"], after["latents"])
        assert (before["captions"], before["keys"]) == (after["prompts"], after["keys"])


def test_time_ids_are_original_size_crop_and_target_in_this_order(opened):
    rows = opened.generation.rows
    crops = set()
    for step, batch in enumerate(opened.loader(batch_size=2, format="diffusers-sdxl")):
        plain = opened.loader(batch_size=2)[step]
        assert (batch["time_ids"].shape, batch["time_ids"].dtype) == ((2, 6), torch.int64)
        for row, ids in enumerate(batch["time_ids"].tolist()):
            parts = [plain[name][row].tolist() for name in ("original_size", "crop_top_left", "target_size")]
            assert ids == parts[0] + parts[1] + parts[2]
            crops.add(tuple(ids[2:4]))
    assert crops == {tuple(crop) for crop in rows.crop.tolist()}
    assert crops != {(0, 0)}


def test_image_ids_are_row_and_column_of_each_patch():
    batch = {"latents": torch.zeros(2, 16, 4, 6), "captions": [], "keys": [], "names": []}
    ids = formatted(batch, "diffusers-flux")["img_ids"]
    assert (ids.shape, ids.dtype) == ((6, 3), torch.float32)
    assert ids.tolist() == [[0, row, column] for row in range(2) for column in range(3)]


def test_an_unknown_format_is_refused_before_anything_is_read(opened):
    with pytest.raises(UsageError, match="unknown batch format 'kohya-sdxl'") as caught:
        opened.loader(batch_size=2, format="kohya-sdxl")
    assert "diffusers-sdxl" in caught.value.fix
