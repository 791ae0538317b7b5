"""A configuration of sd-scripts decides captions, repeats, sets and sizes, from the build to the exported folder."""

import tomllib

import numpy as np
import pytest
from PIL import Image
from small_cache import build, draw

from latentcache import open_cache
from latentcache.errors import LatentcacheError

SAME = {"resolutions": None, "bucket_step": None}
EXPORT = ("--to", "kohya", "--architecture", "sdxl", "--release", "suffixed")
GENERAL = (
    "[general]\nenable_bucket = true\nmin_bucket_reso = 128\nmax_bucket_reso = 512\ncaption_extension = '.cap'\n"
)


@pytest.fixture
def data(tmp_path):
    """Three folders: cats and dogs to train, cats of regularization; one image without a caption."""
    for number, name in enumerate(["cats/a", "cats/b", "dogs/a", "reg/r"]):
        draw(tmp_path / f"data/{name}.png", (300, 240), seed=number)
    (tmp_path / "data/cats/a.cap").write_text("first\nsecond", "utf-8")
    (tmp_path / "data/cats/a.txt").write_text("of another trainer", "utf-8")
    return tmp_path / "data"


def configured(data, text):
    path = data.parent / "dataset.toml"
    path.write_text(text.replace("DATA", str(data)), "utf-8")
    return path


def subset(folder, *more):
    return "\n".join(["[[datasets.subsets]]", f"image_dir = 'DATA/{folder}'", *more, ""])


THREE = (
    subset("cats", "num_repeats = 3", "class_tokens = 'sks cat'", "caption_prefix = 'photo of'")
    + subset("dogs")
    + subset("reg", "is_reg = true", "class_tokens = 'cat'")
)


def test_captions_repeats_and_regularization_sets(run, data, tmp_path):
    config = configured(data, f"{GENERAL}[[datasets]]\nresolution = 256\n{THREE}")
    built = run("build", data, "--out", tmp_path / "cache", "--model", "stub", "--trainer-config", config)
    assert "caption_extension .cap, " in built.err + built.out
    assert "resolution = 256 (" not in built.err + built.out
    samples = open_cache(tmp_path / "cache").snapshots[0].samples
    names = [samples.names[number] for number in range(len(samples))]
    assert names == ["cats/a.png", "cats/b.png", "dogs/a.png", "reg/r.png"]
    assert list(samples.inputs["caption"].text) == ["photo of first", "photo of sks cat", "", "cat"]
    assert np.asarray(samples.columns["repeats"]).tolist() == [3, 3, 1, 7]
    out = tmp_path / "out"
    done = run("export", tmp_path / "cache", out, *EXPORT, "--trainer-config", config, "--json")
    assert (done.status, done.json["no_caption"]) == (0, 1)
    assert (out / "3_cats/a.txt").read_text("utf-8") == "photo of first"
    assert not (out / "1_dogs/a.txt").exists()
    (dataset,) = tomllib.loads((out / "dataset.toml").read_text("utf-8"))["datasets"]
    assert dataset["subsets"] == [
        {"image_dir": f"{out}/1_dogs", "num_repeats": 1, "class_tokens": "dogs"},
        {"image_dir": f"{out}/3_cats", "num_repeats": 3, "class_tokens": "sks cat"},
        {"image_dir": f"{out}/reg/1_reg", "num_repeats": 1, "class_tokens": "cat", "is_reg": True},
    ]
    assert run("verify", out, "--data", data).status == 0
    stable = run("export", tmp_path / "cache", tmp_path / "stable", *EXPORT[:4], "--release", "stable")
    assert f"reg_data_dir: {tmp_path}/stable/reg/" in stable.out
    assert "caption_extension: .txt" in stable.out


def test_a_configuration_is_read_from_anywhere_and_may_move(run, data, tmp_path, monkeypatch):
    config = configured(
        data, f"{GENERAL}[[datasets]]\nresolution = 256\n[[datasets.subsets]]\nimage_dir = 'data/cats'\n"
    )
    (tmp_path / "settings").mkdir()
    config = config.rename(tmp_path / "settings/set.toml")
    monkeypatch.chdir(tmp_path)
    build(data, tmp_path / "cache", trainer_config="settings/set.toml", **SAME)
    monkeypatch.chdir("/")
    assert run("verify", tmp_path / "cache").status == 0
    config.rename(tmp_path / "moved.toml")
    error = run("verify", tmp_path / "cache", "--json").error
    assert "is gone" in error["what"]
    assert "--trainer-config FILE" in error["fix"]
    monkeypatch.chdir(tmp_path)
    assert build(data, tmp_path / "cache", trainer_config="moved.toml", **SAME).encoded == 0
    assert run("verify", tmp_path / "cache").status == 0


def test_an_empty_caption_that_was_chosen_has_a_line(run, data, tmp_path):
    source = {"default_caption": ""}
    build(data, tmp_path / "cache", like="kohya", resolutions=(256,), source=source)
    assert run("export", tmp_path / "cache", tmp_path / "out", *EXPORT).status == 0
    assert (tmp_path / "out/1_dogs/a.txt").read_text("utf-8") == "\n"


def test_several_resolutions_of_unequal_sides(run, data, tmp_path):
    sizes = "".join(f"[[datasets]]\nresolution = {value}\n{THREE}" for value in ("[192, 320]", 256))
    config = configured(data, GENERAL + sizes)
    build(data, tmp_path / "cache", trainer_config=config, **SAME)
    geometry = open_cache(tmp_path / "cache").recipe().geometry
    assert [str(side) for side in geometry.resolutions] == ["320x192", "256"]
    assert {size.area for table in geometry.tables() for size in table.sizes} <= set(range(256 * 256 + 1))
    assert build(data, tmp_path / "cache", **SAME).encoded == 0  # the recipe is read again as it was written
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--trainer-config", config)
    assert done.status == 0
    datasets = tomllib.loads((tmp_path / "out/dataset.toml").read_text("utf-8"))["datasets"]
    assert [dataset["resolution"] for dataset in datasets] == [[192, 320], [256, 256]]
    assert [len(dataset["subsets"]) for dataset in datasets] == [3, 3]


def test_options_of_a_command_line_say_how_captions_are_read(run, data, tmp_path):
    options = (
        'train_data_dir = "elsewhere"\nresolution = "256,256"\ncaption_extension = ".cap"\ncaption_suffix = "end"\n'
    )
    config = configured(data, options)
    command = ("build", data, "--out", tmp_path / "cache", "--model", "stub", "--trainer-config", config)
    built = run(*command)
    assert "the first line of a file is its caption, not read: train_data_dir, DATA has the" in built.err + built.out
    samples = open_cache(tmp_path / "cache").snapshots[0].samples
    assert list(samples.inputs["caption"].text) == ["first end", "", "", ""]
    configured(data, 'resolution = "256,256"')
    assert "caption_extension .caption (default)" in run(*command).err
    run(*command, "--caption-ext", ".txt")
    samples = open_cache(tmp_path / "cache").snapshots[0].samples
    assert samples.inputs["caption"].text[0] == "of another trainer"


def test_masks_in_files_are_files_beside_the_images(run, data, tmp_path):
    for name in ("cats/a", "cats/b", "dogs/a"):
        mask = Image.new("L", (300, 240), 255)
        (data / "weights" / name).parent.mkdir(parents=True, exist_ok=True)
        mask.save(data / "weights" / f"{name}.png")
    build(data, tmp_path / "cache", like="kohya", resolutions=(256,), min_side=128, source={"masks": "weights"})
    out = tmp_path / "out"
    assert run("export", tmp_path / "cache", out, *EXPORT).status == 0
    assert (out / "masks/1_cats/a.png").samefile(data / "weights/cats/a.png")
    datasets = tomllib.loads((out / "dataset.toml").read_text("utf-8"))["datasets"]
    with_masks = [entry for dataset in datasets for entry in dataset["subsets"] if "conditioning_data_dir" in entry]
    assert with_masks == [
        {"image_dir": f"{out}/1_{name}", "num_repeats": 1, "conditioning_data_dir": f"{out}/masks/1_{name}"}
        for name in ("cats", "dogs")
    ]
    (data / "weights/cats/b.png").unlink()
    build(data, tmp_path / "cache", **SAME)
    done = run("export", tmp_path / "cache", out, *EXPORT)
    assert "conditioning_data_dir needs one for each image" in done.out
    assert not (out / "masks/1_cats/b.png").exists()


REFUSED = [
    ("[[datasets]]\nresolution = 256\n" + subset("../data"), "names folders outside"),
    ("[[datasets]]\nresolution = 256\n" + subset("birds"), "does not exist"),
    ("resolution = 256\ndataset_config = 'other.toml'", "has its data sets in another file"),
    (
        f"[[datasets]]\nresolution = 256\n{subset('cats')}[[datasets]]\nresolution = 512\n{subset('dogs')}",
        "several values of image_dir",
    ),
]


@pytest.mark.parametrize(("text", "expected"), REFUSED, ids=[expected for _, expected in REFUSED])
def test_what_a_cache_cannot_follow_is_named(data, tmp_path, text, expected):
    config = configured(data, text)
    with pytest.raises(LatentcacheError, match=expected):
        build(data / "cats" if "outside" in expected else data, tmp_path / "cache", trainer_config=config)
    assert not (tmp_path / "cache").exists()


def test_buckets_of_unequal_sides_are_those_of_a_trainer(data, tmp_path):
    from latentcache.geometry.sizes import Size

    with pytest.raises(LatentcacheError, match="not without like"):
        build(data, tmp_path / "cache", resolutions=(Size(256, 320),))


def test_masks_from_transparency_are_arrays_of_pixels(run, tmp_path):
    (tmp_path / "images").mkdir()
    for number in range(2):
        Image.new("RGBA", (300, 300), (255, 0, 0, 100 * number)).save(tmp_path / f"images/{number}.png")
    Image.new("RGB", (300, 300)).save(tmp_path / "images/2.png")
    config = tmp_path / "lora.toml"
    config.write_text("resolution = 256\nenable_bucket = true\nalpha_mask = true\n")
    cache, out = tmp_path / "cache", tmp_path / "out"
    build = ("build", tmp_path / "images", "--out", cache, "--model", "stub", "--trainer-config", config)
    export = ("export", cache, out, *EXPORT[:4], "--release", "stable", "--trainer-config", config, "--json")
    assert run(*build, "--masks", "none").status == 0
    assert "the cache has no masks" in run(*export).error["what"]
    assert run(*build).status == 0
    done = run(*export)
    assert done.json["partners_left_out"] == 0
    masks = [np.load(out / f"1_images/{number}.npz")["alpha_mask"] for number in range(3)]
    assert [(mask.shape, mask.dtype.name) for mask in masks] == [((256, 256), "float32")] * 3
    np.testing.assert_allclose([mask.mean() for mask in masks], [0, 100 / 255, 1], atol=0.01)
    (dataset,) = tomllib.loads((out / "dataset.toml").read_text("utf-8"))["datasets"]
    (subset,) = dataset["subsets"]
    assert subset["alpha_mask"] is True
    assert "alpha_mask: true" in " ".join(done.json["advice"])
