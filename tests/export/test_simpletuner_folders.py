"""Folders for SimpleTuner: what is in them, what is refused, and what later exports change."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from captioned_images import FOUR, data_and_cache, draw_captioned
from made_pipelines import make_pipeline, tiny_vae
from small_cache import build, draw

from latentcache import open_cache

LIKE = {"like": "simpletuner", "resolutions": (256,), "bucket_step": 64}
EXPORT = ("--to", "simpletuner")


@pytest.fixture
def simpletuner(tmp_path):
    """A data folder and its cache with the geometry of SimpleTuner."""
    return data_and_cache(tmp_path, **LIKE)


def read(path):
    return json.loads(path.read_text("utf-8"))


def item(path):
    return torch.load(path, weights_only=True)


def hashed(stem):
    return hashlib.sha256(stem.encode()).hexdigest()


def test_every_file_holds_what_the_cache_holds(run, simpletuner):
    data, cache, out = simpletuner
    done = run("export", cache, out, *EXPORT, "--as", "/sets/run", "--json")
    assert (done.status, done.json["samples"]) == (0, 4)
    loader = open_cache(cache).loader(batch_size=1, seed=None)
    sizes = read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")
    buckets = read(out / "images-1x/aspect_ratio_bucket_indices_images-1x-256.json")["aspect_ratio_bucket_indices"]
    for batch in map(loader.batch, ([row] for row in range(4))):
        stem = batch["names"][0].removesuffix(".png")
        found = item(out / f"vae/images-1x-256/{hashed(stem)}.pt")
        torch.testing.assert_close(found, batch["latents"][0].float(), rtol=0, atol=0)
        entry = sizes[f"/sets/run/images-1x/{stem}.png"]
        assert entry["target_size"][::-1] == batch["target_size"][0].tolist()
        assert entry["crop_coordinates"] == batch["crop_top_left"][0].tolist()
        assert entry["original_size"][::-1] == batch["original_size"][0].tolist()
        assert f"/sets/run/images-1x/{stem}.png" in buckets[str(entry["aspect_ratio"])]
        assert (out / f"images-1x/{stem}.png").samefile(data / f"{stem}.png")
    assert {ratio: len(paths) for ratio, paths in buckets.items()} == {"1.67": 2, "0.6": 1, "1.0": 1}
    images, text = read(out / "multidatabackend.json")
    assert (images["instance_data_dir"], images["repeats"], images["crop"]) == ("/sets/run/images-1x", 0, False)
    assert (images["cache_dir_vae"], text["cache_dir"]) == ("/sets/run/vae/images-1x-256", "/sets/run/text")
    assert read(out / "output/aspect_resolution_map-0.065536.json")["1.67"] == [320, 192]
    assert run("verify", out, "--data", data).status == 0


def test_another_order_or_one_more_image_changes_no_size(run, simpletuner):
    data, cache, out = simpletuner
    run("export", cache, out, *EXPORT)
    before = read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")
    again = run("export", cache, out, *EXPORT, "--json").json
    assert (again["written"], again["deleted"]) == (0, 0)
    draw(data / "a0.png", (405, 240), seed=9)
    (data / "a0.txt").write_text("another", "utf-8")
    assert build(data, cache, **LIKE).encoded == 1
    added = run("export", cache, out, *EXPORT, "--json").json
    assert (added["written"], added["deleted"]) == (5, 0)  # latents, image, caption, both files of sizes
    after = read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")
    assert {path: entry for path, entry in after.items() if path in before} == before


def test_repeats_regularization_and_resolutions_are_backends(run, tmp_path):
    data = draw_captioned(tmp_path / "cats")
    draw_captioned(tmp_path / "reg")
    backends = [
        {"id": "c", "type": "local", "instance_data_dir": "cats", "repeats": 2, "caption_strategy": "textfile"},
        {"id": "r", "type": "local", "instance_data_dir": "reg", "caption_strategy": "textfile"},
    ]
    for backend in backends:
        backend |= {"resolution": 256, "resolution_type": "pixel_area"}
    backends[1]["is_regularisation_data"] = True
    backends.append({**backends[0], "id": "large", "resolution": 320, "repeats": 2})
    config = tmp_path / "multidatabackend.json"
    config.write_text(json.dumps(backends[:2]))
    out, cache = tmp_path / "out", tmp_path / "cache"
    build(config, cache, **LIKE | {"resolutions": (256, 320)})
    done = run("export", cache, out, *EXPORT, "--json")
    assert done.status == 0, done.error
    entries = {entry["id"]: entry for entry in read(out / "multidatabackend.json")}
    assert set(entries) == {"images-3x-256", "images-3x-320", "reg-1x-256", "reg-1x-320", "text"}
    assert (entries["images-3x-256"]["repeats"], entries["images-3x-320"]["resolution"]) == (2, 320)
    assert entries["reg-1x-256"]["is_regularisation_data"] is True
    assert item(next((out / "vae/reg-1x-320").rglob("*.pt"))).ndim == 3
    assert data


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("pipeline", ["StableDiffusionXLPipeline", "FluxPipeline"])
def test_text_is_named_by_the_caption_and_written_once(run, tmp_path, pipeline):
    data, out, model = draw_captioned(tmp_path / "cats", captions=2), tmp_path / "out", tmp_path / "model"
    flux = pipeline == "FluxPipeline"
    make_pipeline(pipeline, model, vae=tiny_vae(16, 0.3611, 0.1159) if flux else tiny_vae())
    options = ("--model", model, "--like", "simpletuner", "--resolution", "64", "--bucket-step", "64", "--prompt-ids")
    assert run("build", data, "--out", tmp_path / "cache", *options).status == 0
    done = run("export", tmp_path / "cache", out, *EXPORT, "--fields", "all", "--json")
    assert done.status == 0, done.error
    family = {"StableDiffusionXLPipeline": "sdxl", "FluxPipeline": "flux"}[pipeline]
    names = {f"{hashlib.md5(f'caption {n}, tag'.encode()).hexdigest()}-{family}.pt" for n in (0, 1)}
    assert {path.name for path in (out / "text").iterdir()} == names
    cache = open_cache(tmp_path / "cache")
    batch = cache.loader(batch_size=1, seed=None, fields=["prompt_embeds", "pooled_prompt_embeds"]).batch([0])
    stem = batch["names"][0].removesuffix(".png")
    caption = (data / f"{stem}.txt").read_text()
    text = item(out / f"text/{hashlib.md5(caption.encode()).hexdigest()}-{family}.pt")
    torch.testing.assert_close(text["prompt_embeds"], batch["prompt_embeds"], rtol=0, atol=0, check_dtype=False)
    torch.testing.assert_close(
        text["pooled_prompt_embeds"], batch["pooled_prompt_embeds"][0], rtol=0, atol=0, check_dtype=False
    )
    length = text["prompt_embeds"].shape[1]
    assert family == "sdxl" or text["attention_masks"].shape == (1, length) == text["time_ids"].shape[:2]


def test_masks_and_control_images_are_data_sets_named_as_their_images(run, tmp_path):
    data, cache = draw_captioned(tmp_path / "cats"), tmp_path / "cache"
    draw(data / "p0.jpg", FOUR[0])
    (data / "p0.png").unlink()
    for number, size in enumerate(FOUR):
        for role in ("mask", "cond"):
            draw(data / f"p{number}-{role}label.png", size, seed=9 + number)
    words = ("build", data, "--out", cache, "--model", "stub", "--like", "simpletuner", "--resolution", "256")
    assert run(*words).status == 0
    assert run("export", cache, tmp_path / "both", *EXPORT).status == 0
    image, mask, control, _ = read(tmp_path / "both/multidatabackend.json")
    assert image["conditioning_data"] == [mask["id"], control["id"]]
    assert (mask["conditioning_type"], control["conditioning_type"]) == ("mask", "reference_strict")
    for start in ("images", "masks", "controls"):
        assert {path.name for path in (tmp_path / f"both/{start}-1x").glob("p*g")} == {
            "p0.jpg", "p1.png", "p2.png", "p3.png",
        }  # fmt: skip
    latents = [item(Path(entry["cache_dir_vae"]) / f"{hashed('p1')}.pt") for entry in (image, control)]
    assert latents[0].shape == latents[1].shape
    assert not torch.equal(*latents)
    (data / "p1-condlabel.png").unlink()
    assert run(*words).status == 1  # an image without a control image is named
    done = run("export", cache, tmp_path / "one", *EXPORT, "--json")
    assert (done.json["samples"], done.json["left_out"]) == (4, 0)
    assert [entry["id"] for entry in read(tmp_path / "one/multidatabackend.json")] == [
        "images-1x-256", "masks-images-1x-256", "text",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "more", "expected"),
    [
        ({"flip": True}, (), "the cache has flips"),
        ({"like": None, "bucket_step": 8}, (), "would encode"),
        ({}, ("--beside",), "not available with --to simpletuner"),
    ],
)
def test_what_it_cannot_have_is_refused_by_name(run, tmp_path, options, more, expected):
    build(draw_captioned(tmp_path / "cats"), tmp_path / "cache", **LIKE | options)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, *more, "--json")
    assert done.status == 2
    assert expected in done.error["what"]
    assert not (tmp_path / "out").exists()


def test_an_image_without_a_caption_is_named(run, simpletuner):
    data, cache, out = simpletuner
    (data / "p2.txt").unlink()
    build(data, cache, **LIKE)
    done = run("export", cache, out, *EXPORT, "--json")
    assert (done.status, "p2.png: has no caption" in done.error["what"]) == (2, True)


@pytest.mark.parametrize(
    ("folder", "image"), [("/sets/", "/sets/images-1x/p0.png"), ("C:\\", "C:\\images-1x\\p0.png")]
)
def test_a_separator_at_the_end_of_a_path_is_not_doubled(run, simpletuner, folder, image):
    _, cache, out = simpletuner
    assert run("export", cache, out, *EXPORT, "--as", folder).status == 0
    assert image in read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")
