"""Folders for ai-toolkit: what is in them, and what is refused."""

import base64
import hashlib
import json

import pytest
import yaml
from captioned_images import data_and_cache, draw_captioned
from made_pipelines import make_pipeline, tiny_vae
from safetensors.torch import load_file
from small_cache import build

from latentcache import open_cache

LIKE = {"like": "ai-toolkit", "resolutions": (128, 256), "bucket_step": 16, "flip": True}
EXPORT = ("--to", "ai-toolkit", "--architecture", "sdxl")


def hashed(key):
    digest = hashlib.md5(json.dumps(key, sort_keys=True).encode()).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def test_every_size_and_flip_has_a_file_named_by_its_hash(run, tmp_path):
    data, cache, out = data_and_cache(tmp_path, **LIKE)
    done = run("export", cache, out, *EXPORT, "--as", "/sets/run", "--json")
    assert (done.status, done.json["samples"], done.json["architecture"]) == (0, 4, "sdxl")
    loader = open_cache(cache).loader(batch_size=1, seed=None)
    names = set()
    for batch in map(loader.batch, ([row] for row in range(8))):
        (height, width), (top, left) = batch["target_size"][0].tolist(), batch["crop_top_left"][0].tolist()
        image_height, image_width = batch["original_size"][0].tolist()
        scale = max(width / image_width, height / image_height)
        key = {
            "filename": batch["names"][0],
            "scale_to_width": -int(-image_width * scale // 1),
            "scale_to_height": -int(-image_height * scale // 1),
            "crop_x": left,
            "crop_y": top,
            "crop_width": width,
            "crop_height": height,
            "latent_space_version": "sdxl",
            "latent_version": 1,
        }
        stem = batch["names"][0].removesuffix(".png")
        plain, flip = (f"{stem}_{hashed(key | more)}.safetensors" for more in ({}, {"flip_x": True}))
        served = [load_file(out / "images-1x/_latent_cache" / name)["latent"] for name in (plain, flip)]
        assert any((values == batch["latents"][0].float()).all() for values in served)  # the loader draws a flip
        assert (served[0] != served[1]).any()
        names |= {plain, flip}
        assert (out / f"images-1x/{stem}.txt").read_text() == (data / f"{stem}.txt").read_text().replace(", ", ",")
    assert {path.name for path in (out / "images-1x/_latent_cache").iterdir()} == names
    (entry,) = yaml.safe_load((out / "datasets.yaml").read_text())["datasets"]
    assert (entry["folder_path"], entry["resolution"], entry["flip_x"]) == ("/sets/run/images-1x", [128, 256], True)
    assert run("verify", out, "--data", data).status == 0


@pytest.mark.usefixtures("threads")
def test_texts_that_the_trainer_would_make_otherwise_are_refused(run, tmp_path):
    data, out, job = draw_captioned(tmp_path / "cats"), tmp_path / "out", tmp_path / "job.yaml"
    (data / "p1.txt").write_text("one,two [trigger]", "utf-8")
    make_pipeline("StableDiffusionXLPipeline", tmp_path / "model", vae=tiny_vae())
    words = ("--out", tmp_path / "cache", "--model", tmp_path / "model", "--like", "ai-toolkit", "--resolution", "64")
    assert run("build", data, *words).status == 0
    export = ("export", tmp_path / "cache", out, *EXPORT, "--fields", "all", "--json")
    error = run(*export).error
    assert (error["where"], error["why"]) == ("p1.png", "'one,two [trigger]' becomes 'one, two '")
    dataset = {"folder_path": "cats", "resolution": 64, "caption_dropout_rate": 0.05}
    process = {"trigger_word": "ohwx", "model": {"arch": "sdxl"}, "datasets": [dataset]}
    job.write_text(yaml.safe_dump({"config": {"process": [process]}}))
    assert run("build", data, *words, "--trainer-config", job).status == 0
    error = run(*export, "--trainer-config", job).error
    assert "--negative-prompt 'ohwx '" in error["fix"]
    assert run("build", data, *words, "--trainer-config", job, "--negative-prompt", "ohwx ").status == 0
    done = run(*export, "--trainer-config", job)
    assert done.status == 0, done.error
    assert (out / "images-1x/p1.txt").read_text() == "one,two ohwx"
    assert len(list((out / "images-1x/_t_e_cache").iterdir())) == 8


@pytest.mark.parametrize(
    ("options", "words", "expected"),
    [
        ({"like": None, "flip": False, "bucket_step": 16}, EXPORT, "would encode"),
        ({"bucket_step": 32}, EXPORT, "sides of sdxl are multiples of 16 pixels"),
        ({}, (*EXPORT[:3], "flux"), "sides of flux are multiples of 32 pixels"),
        ({}, (*EXPORT[:3], "kandinsky"), "unknown architecture"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(run, tmp_path, options, words, expected):
    build(draw_captioned(tmp_path / "cats"), tmp_path / "cache", **LIKE | options)
    done = run("export", tmp_path / "cache", tmp_path / "out", *words, "--json")
    assert done.status == 2
    assert expected in done.error["what"]
    assert not (tmp_path / "out").exists()
