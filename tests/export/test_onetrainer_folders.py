"""Folders for OneTrainer: what is in them, what is refused, and what later exports change."""

import json
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import trainer_exports
from captioned_images import FOUR, draw_captioned
from made_pipelines import make_pipeline, tiny_vae
from small_cache import build, draw
from trainer_exports import cached, item, still
from trainer_exports import onetrainer_config as config

from latentcache import open_cache
from latentcache.errors import UsageError
from latentcache.export.format import Request, Sample
from latentcache.export.onetrainer import Concept, OneTrainer
from latentcache.geometry.sizes import Size

LIKE = trainer_exports.LIKE["onetrainer"]
EXPORT = trainer_exports.EXPORT["onetrainer"]
INPAINTING = "STABLE_DIFFUSION_XL_10_BASE_INPAINTING"
TEXTS = ("prompt_embeds", "pooled_prompt_embeds", "prompt_ids")
#: Name of the image cache of a concept of ``/sets/cats`` with all defaults but crop jitter, by OneTrainer's code.
CATS = "cache/image/196a810e3c6e660120a9e275ff4266e59a2f542450ab6f4c21a9229a3470d559/variation-0"


def test_names_are_those_of_the_trainer(run, tmp_path):
    _, cache, out = cached(tmp_path, "onetrainer")
    run("export", cache, out, *EXPORT, "--as", "C:\\sets")
    (concept,) = json.loads((out / "concepts.json").read_text())
    assert concept["path"] == "C:\\sets\\images\\cats"
    settings = {**concept, "path": "/sets/cats"}
    assert Concept(settings=settings, first=0, samples=()).folders("image") == [CATS]


def test_text_that_the_trainer_cached_does_not_outlive_another_caption(run, tmp_path):
    """It finds its text by the number of an image, in a folder named by the settings of the concept."""
    data, cache, out = cached(tmp_path, "onetrainer")
    run("export", cache, out, *EXPORT)
    (before,) = json.loads((out / "concepts.json").read_text())
    (data / "p1.txt").write_text("another caption", "utf-8")
    build(data, cache, **LIKE)
    run("export", cache, out, *EXPORT)
    (after,) = json.loads((out / "concepts.json").read_text())
    assert before["text"] != after["text"]
    assert before["image"] == after["image"]


def test_flips_and_resolutions_are_drawn_for_each_variation(run, tmp_path):
    data, cache, out = cached(tmp_path, "onetrainer")
    build(data, cache, **LIKE | {"resolutions": (256, 320), "flip": True})
    concept = {**still(enable_random_flip=True), "path": str(data), "image_variations": 8, "name": "my cats"}
    path = config(tmp_path, concept, resolution="256, 320")
    assert run("export", cache, out, *EXPORT, "--trainer-config", path).status == 0
    (written,) = json.loads((out / "concepts.json").read_text())
    assert (written["name"], written["image_variations"]) == ("my cats", 8)
    path = config(tmp_path, concept, {**still(), "path": "elsewhere"}, resolution="256, 320")
    lines = run("export", cache, tmp_path / "other", *EXPORT, "--trainer-config", path, "--json").json["advice"]
    assert not any("in no concept" in line for line in lines)
    path = config(tmp_path, {**concept, "path": "elsewhere"}, resolution="256, 320")
    lines = run("export", cache, tmp_path / "third", *EXPORT, "--trainer-config", path, "--json").json["advice"]
    assert any("1 folder is in no concept of --trainer-config" in line for line in lines)
    folders = sorted(out.glob("cache/image/*/variation-*"))
    assert len(folders) == 8
    for number in range(4):
        latents = [item(folder / f"{number}.pt")["latent_image"] for folder in folders]
        sizes = [item(folder / "aggregate.pt")[number]["crop_resolution"] for folder in folders]
        assert [(8 * latent.shape[1], 8 * latent.shape[2]) for latent in latents] == sizes
        assert len({latent.numpy().tobytes() for latent in latents}) > 2


def test_masks_are_exported_beside_latents(run, tmp_path):
    data = draw_captioned(tmp_path / "cats")
    draw(data / "p0-masklabel.png", FOUR[0], seed=5)
    words = ("--model", "stub", "--like", "onetrainer", "--resolution", "256")
    assert run("build", data, "--out", tmp_path / "cache", *words).status == 0
    path = config(tmp_path, still(), masked_training=True)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--trainer-config", path)
    assert done.status == 0
    (folder,) = (tmp_path / "out").glob("cache/image/*/variation-0")
    mask, full = item(folder / "0.pt")["latent_mask"], item(folder / "1.pt")["latent_mask"]
    assert tuple(mask.shape) == (1, 24, 40)
    assert 0.3 < mask.mean() < 0.7
    assert (full == 1).all()
    assert (tmp_path / "out/images/cats/p0-masklabel.png").exists()


def test_conditioning_images_are_exported_for_a_model_that_takes_them(run, tmp_path):
    data = draw_captioned(tmp_path / "cats")
    for number in range(3):
        draw(data / f"p{number}-condlabel.png", FOUR[number], seed=5 + number)
    words = ("--model", "stub", "--like", "onetrainer", "--resolution", "256")
    assert run("build", data, "--out", tmp_path / "cache", *words).status == 1  # one image has none
    path = config(tmp_path, still(), model_type=INPAINTING, custom_conditioning_image=True)
    for name, options, keys in (
        ("inpainting", ("--trainer-config", path), {"latent_conditioning_image", "latent_mask"}),
        ("other", (), set()),
    ):
        out = tmp_path / name
        done = run("export", tmp_path / "cache", out, *EXPORT, *options, "--json")
        assert (done.status, done.json["samples"], done.json["left_out"]) == (0, 3 if keys else 4, 1 if keys else 0)
        (folder,) = out.glob("cache/image/*/variation-0")
        latents = item(folder / "0.pt")
        assert set(latents) == {"latent_image", "original_resolution", "crop_offset", *keys}
        if keys:
            assert (latents["latent_mask"] == 1).all()
            assert latents["latent_conditioning_image"].shape == latents["latent_image"].shape
            assert not torch.equal(latents["latent_conditioning_image"], latents["latent_image"])


@pytest.mark.usefixtures("threads")
def test_each_variation_has_the_text_of_the_caption_that_is_drawn(run, tmp_path):
    data, model, out = draw_captioned(tmp_path / "cats"), tmp_path / "model", tmp_path / "out"
    (data / "p1.txt").write_text("one\ntwo\nthree\n", "utf-8")
    make_pipeline("StableDiffusionPipeline", model, vae=tiny_vae())
    words = ("--model", model, "--like", "onetrainer", "--resolution", "64", "--bucket-step", "64")
    more = ("--fields", "latents,prompt_embeds,prompt_ids", "--caption-lines", "all")
    assert run("build", data, "--out", tmp_path / "cache", *words, *more).status == 0
    values = {"resolution": "64", "text_encoder": {"train": False}, "text_encoder_2": {"train": False}}
    for variations in (1, 5):
        path = config(tmp_path, {**still(), "path": str(data), "text_variations": variations}, **values)
        done = run("export", tmp_path / "cache", out, *EXPORT, "--fields", "all", "--trainer-config", path)
        assert done.status == 0, done.err
        assert len(list(out.glob("cache/text/*/variation-*"))) == variations
    assert (out / "images/cats/p1.txt").read_text("utf-8") == "one\ntwo\nthree"
    for variation in range(5):
        ids = item(next(out.glob(f"cache/text/*/variation-{variation}/1.pt")))["tokens"]
        letters = random.Random(hash((42, 11, variation, 1))).choice(["one", "two", "three"])
        assert int((ids > 1).sum()) == len(letters)


def test_a_concept_keeps_the_settings_of_its_release_and_of_its_text(run, tmp_path):
    data, cache, out = cached(tmp_path, "onetrainer")
    concept = {"path": str(data), "image": {"__version": 1, "enable_crop_jitter": False, "a_new_setting": 0.5}}
    concept |= {"text": {"enable_tag_shuffling": True, "prompt_source": "filename"}, "text_variations": 3}
    path = config(tmp_path, concept)
    assert run("export", cache, out, *EXPORT, "--trainer-config", path).status == 0
    (written,) = json.loads((out / "concepts.json").read_text())
    image = written["image"]
    assert (image["a_new_setting"], image["__version"], written["text_variations"]) == (0.5, 1, 3)
    assert (written["text"]["enable_tag_shuffling"], written["text"]["prompt_source"]) == (True, "filename")


def test_a_concept_with_subfolders_stays_one(run, tmp_path):
    """Balancing counts samples of a concept: a concept for each folder would train more of them."""
    data = tmp_path / "data"
    for number, name in enumerate(["cats/b/z", "cats/b-a/y", "cats/x", "dogs/w"]):
        draw(data / f"{name}.png", FOUR[number], seed=number)
    build(data, tmp_path / "cache", **LIKE)
    cats = {**still(), "path": str(data / "cats"), "include_subdirectories": True, "balancing": 2.0}
    path = config(tmp_path, {**cats, "balancing_strategy": "SAMPLES"}, {**still(), "path": str(data / "dogs")})
    options = ("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--json", "--trainer-config")
    assert run(*options, path).status == 0
    concepts = json.loads((tmp_path / "out/concepts.json").read_text())
    assert [(concept["name"], concept["include_subdirectories"]) for concept in concepts] == [
        ("cats", True), ("dogs", False),
    ]  # fmt: skip
    listed = [item(file) for file in (tmp_path / "out").glob("cache/image/*/variation-0/aggregate.pt")]
    (paths,) = [[entry["image_path"] for entry in entries] for entries in listed if len(entries) == 3]
    assert paths == sorted(paths)
    path = config(tmp_path, cats, {**still(), "path": str(data / "cats/b")})
    assert "is in 2 concepts" in run(*options, path).error["what"]


def test_settings_that_change_pixels_have_their_names(run, tmp_path):
    _, cache, out = cached(tmp_path, "onetrainer")
    path = config(tmp_path, {"name": "cats"})
    error = run("export", cache, out, *EXPORT, "--trainer-config", path, "--json").error
    assert error["why"] == "concept cats: enable_crop_jitter = true"


@pytest.mark.parametrize("label", ["masklabel", "condlabel"])
def test_an_image_that_looks_like_a_mask_by_its_name_gets_another(label):
    sample = Sample(name="a", target=f"cats/a-{label}.png", size=Size(8, 8), caption="")
    form = OneTrainer.__new__(OneTrainer)
    form.request = SimpleNamespace(root=Path("/data"))
    assert form.target(sample) == f"images/data/cats/a_{label}.png"


@pytest.mark.parametrize(
    ("pipeline", "fields", "lengths", "expected"),
    [
        ("SanaPipeline", ("prompt_embeds", "prompt_ids"), (300,), "text of a SanaPipeline cannot be exported"),
        ("StableDiffusionPipeline", ("prompt_embeds",), (), "prompt_ids: the cache has no such field"),
        ("FluxPipeline", ("prompt_embeds", "prompt_ids"), (), "pooled_prompt_embeds: the cache has no such field"),
        ("StableDiffusion3Pipeline", TEXTS, (77, 77, 256), "256 tokens of T5, and OneTrainer has 77"),
        ("StableDiffusion3Pipeline", TEXTS, (77, 77, 77), ""),
        ("FluxPipeline", TEXTS, (77, 512), ""),
    ],
)
def test_text_that_it_cannot_take_is_named(tmp_path, pipeline, fields, lengths, expected):
    _, cache, _ = cached(tmp_path, "onetrainer")
    recipe = open_cache(cache).recipe()
    recipes = {name: SimpleNamespace(pipeline=pipeline, lengths=lengths) for name in fields} | {"latents": recipe}
    request = Request(recipes=recipes, geometry=recipe.geometry, wanted=fields, root=cache, folder="/out")
    with pytest.raises(UsageError, match=expected) if expected else nullcontext():
        OneTrainer(request)


def test_regularization_images_are_counted(run, tmp_path):
    draw_captioned(tmp_path / "cats")
    draw_captioned(tmp_path / "reg")
    backends = [
        {"id": name, "type": "local", "instance_data_dir": name, "caption_strategy": "textfile", "resolution": 256}
        for name in ("cats", "reg")
    ]
    backends[1]["is_regularisation_data"] = True
    listing = tmp_path / "multidatabackend.json"
    listing.write_text(json.dumps([backend | {"resolution_type": "pixel_area"} for backend in backends]))
    build(listing, tmp_path / "cache", **LIKE)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--json")
    assert done.status == 0, done.error
    assert any("4 regularization images are ordinary ones here" in line for line in done.json["advice"])
