"""Folders for musubi-tuner: what is in them, what is refused, and what later exports change."""

import tomllib

import pytest
from captioned_images import data_and_cache, draw_captioned, files_below
from made_pipelines import tiny_vae
from made_videos import write_video
from safetensors import safe_open
from safetensors.torch import load_file
from small_cache import build, draw

from latentcache import open_cache

LIKE = {"like": "musubi", "resolutions": (256,), "bucket_step": 16}
#: The latents of the stub pass as those of any model.
EXPORT = ("--to", "musubi", "--architecture", "z-image")


@pytest.fixture
def musubi(tmp_path):
    """A data folder and its cache with the geometry of musubi-tuner."""
    return data_and_cache(tmp_path, **LIKE)


def datasets(out):
    return tomllib.loads((out / "dataset.toml").read_text("utf-8"))["datasets"]


def test_every_file_holds_what_the_cache_holds(run, musubi):
    data, cache, out = musubi
    done = run("export", cache, out, *EXPORT, "--as", "/sets/run", "--json")
    assert (done.status, done.json["samples"], done.json["architecture"]) == (0, 4, "z-image")
    loader = open_cache(cache).loader(batch_size=1, seed=None)
    for batch in map(loader.batch, ([row] for row in range(4))):
        stem = batch["names"][0].removesuffix(".png")
        height, width = batch["original_size"][0].tolist()
        path = out / f"cache/images-1x-256x256/{stem}_{width:04d}x{height:04d}_zi.safetensors"
        (name, values), *more = load_file(path).items()
        assert name == f"latents_1x{values.shape[1]}x{values.shape[2]}_float32"
        assert not more
        assert (values == batch["latents"][0].float()).all()
        with safe_open(path, "pt") as file:
            about = {"architecture": "z_image", "width": str(width), "height": str(height), "format_version": "1.0.1"}
            assert file.metadata() == about
        assert (out / f"images-1x/{stem}.png").samefile(data / f"{stem}.png")
    (dataset,) = datasets(out)
    assert dataset == {
        "resolution": [256, 256],
        "image_directory": "/sets/run/images-1x",
        "cache_directory": "/sets/run/cache/images-1x-256x256",
        "num_repeats": 1,
    }
    assert run("verify", out, "--data", data).status == 0
    again = run("export", cache, out, *EXPORT, "--as", "/sets/run", "--json").json
    assert (again["written"], again["deleted"]) == (0, 0)
    run("export", cache, out.parent / "second", *EXPORT, "--as", "/sets/run")
    for path in (out / "cache").rglob("*.safetensors"):
        assert (out.parent / "second" / path.relative_to(out)).read_bytes() == path.read_bytes()


def test_folders_repeats_and_resolutions_of_a_configuration(run, tmp_path):
    draw_captioned(tmp_path / "sets/cats")
    draw(tmp_path / "sets/dogs/p0.JPG", (300, 200))
    (tmp_path / "sets/dogs/p0.txt").write_text("a dog", "utf-8")
    config = tmp_path / "data.toml"
    text = '[general]\nenable_bucket = true\nbatch_size = 4\ncaption_extension = ".txt"\n'
    for folder, repeats in (("cats", 1), ("dogs", 3)):
        for side in (256, 320):
            text += f'[[datasets]]\nimage_directory = "sets/{folder}"\nresolution = {side}\nnum_repeats = {repeats}\n'
    config.write_text(text)
    words = ("--model", "stub", "--trainer-config", config)
    built = run("build", tmp_path / "sets", "--out", tmp_path / "cache", *words)
    assert built.status == 0, built.err
    out = tmp_path / "out"
    done = run("export", tmp_path / "cache", out, *EXPORT, "--trainer-config", config, "--json")
    assert done.status == 0, done.error
    assert tomllib.loads((out / "dataset.toml").read_text())["general"]["batch_size"] == 4
    found = {(entry["image_directory"].rpartition("/")[2], entry["resolution"][0], entry["num_repeats"])
             for entry in datasets(out)}  # fmt: skip
    assert found == {("images-1x", 256, 1), ("images-1x", 320, 1), ("images-3x", 256, 3), ("images-3x", 320, 3)}
    assert (out / "images-3x/dogs_p0.jpg").samefile(tmp_path / "sets/dogs/p0.JPG")
    assert (out / "cache/images-3x-320x320/dogs_p0_0300x0200_zi.safetensors").exists()


@pytest.mark.usefixtures("threads")
def test_videos_have_a_data_set_for_each_length(run, tmp_path):
    import diffusers

    vae = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    diffusers.AutoencoderKLWan(**vae, temperal_downsample=[False, True, True]).save_pretrained(tmp_path / "wan")
    data, out = tmp_path / "data", tmp_path / "out"
    draw(data / "p.png", (64, 64))
    for name, frames in (("a", 9), ("b", 6)):
        write_video(data / f"{name}.mp4", frames, height=64, width=96)
        (data / f"{name}.txt").write_text(f"video {name}", "utf-8")
    words = ("--model", tmp_path / "wan", "--like", "musubi", "--resolution", "64", "--frames", "5", "--frames", "9")
    assert run("build", data, "--out", tmp_path / "cache", *words).status == 0
    done = run("export", tmp_path / "cache", out, "--to", "musubi", "--json")
    assert (done.status, done.json["architecture"], done.json["no_caption"]) == (0, "wan", 1)
    files = [name for name in files_below(out) if name.startswith(("cache/", "videos"))]
    assert files == [
        "cache/images-1x-64x64/p_0064x0064_wan.safetensors",
        "cache/videos-5f-1x-64x64/b_00000-005_0080x0048_wan.safetensors",
        "cache/videos-9f-1x-64x64/a_00000-009_0080x0048_wan.safetensors",
        "videos-5f-1x/b.mp4", "videos-5f-1x/b.txt", "videos-9f-1x/a.mp4", "videos-9f-1x/a.txt",
    ]  # fmt: skip
    (tensor,) = load_file(out / files[2]).values()
    assert tensor.shape == (16, 3, 6, 10)
    assert {(entry.get("video_directory", "/").rpartition("/")[2], *entry.get("target_frames", ()))
            for entry in datasets(out)} == {("",), ("videos-5f-1x", 5), ("videos-9f-1x", 9)}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        ({"flip": True}, EXPORT, "the cache has flips"),
        ({"like": None, "bucket_step": 8}, EXPORT, "would encode"),
        ({}, (*EXPORT[:3], "framepack"), "--architecture=framepack: cannot be exported"),
        ({}, (*EXPORT[:3], "flux-kontext"), "has no latents of control images"),
        ({}, (*EXPORT[:3], "flux"), "unknown architecture"),
        ({}, EXPORT[:2], "no architecture has such latents"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(run, tmp_path, options, words, expected):
    build(draw_captioned(tmp_path / "cats"), tmp_path / "cache", **LIKE | options)
    done = run("export", tmp_path / "cache", tmp_path / "out", *words, "--json")
    assert done.status == 2
    assert expected in done.error["what"]
    assert not (tmp_path / "out").exists()


def test_latents_that_fit_two_models_are_named(run, tmp_path):
    tiny_vae(16, 0.3611, 0.1159).save_pretrained(tmp_path / "vae")
    build(draw_captioned(tmp_path / "cats"), tmp_path / "cache", **LIKE | {"model": str(tmp_path / "vae")})
    done = run("export", tmp_path / "cache", tmp_path / "out", "--to", "musubi", "--json")
    assert "fit z-image and flux-kontext" in done.error["what"]


def test_names_that_meet_and_regularization_are_refused(run, tmp_path):
    draw(tmp_path / "data/a_b.png", (64, 64))
    draw(tmp_path / "data/a/b.png", (64, 64), seed=1)
    build(tmp_path / "data", tmp_path / "cache", **LIKE)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--json")
    assert "would share their files" in done.error["what"]
    draw(tmp_path / "sets/1_cat/a.png", (64, 64))
    draw(tmp_path / "sets/reg/1_cat/b.png", (64, 64), seed=1)
    (tmp_path / "sets/img").mkdir()
    (tmp_path / "sets/1_cat").rename(tmp_path / "sets/img/1_cat")
    build(tmp_path / "sets", tmp_path / "other", **LIKE)
    done = run("export", tmp_path / "other", tmp_path / "out", *EXPORT, "--json")
    assert "is a regularization image" in done.error["what"]
