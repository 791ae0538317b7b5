"""Data sets, texts, masks and videos of a configuration, as SimpleTuner, musubi-tuner and ai-toolkit need them."""

import hashlib
import json
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from captioned_images import FOUR, draw_captioned, files_below
from made_pipelines import make_pipeline, tiny_vae
from made_videos import write_video
from safetensors.torch import load_file
from small_cache import build, draw
from trainer_exports import EXPORT, LIKE, cached, hashed, item

from latentcache import open_cache


def read(path):
    return json.loads(path.read_text("utf-8"))


def test_another_order_or_one_more_image_changes_no_size(run, tmp_path):
    data, cache, out = cached(tmp_path, "simpletuner")
    run("export", cache, out, *EXPORT["simpletuner"])
    before = read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")
    again = run("export", cache, out, *EXPORT["simpletuner"], "--json").json
    assert (again["written"], again["deleted"]) == (0, 0)
    draw(data / "a0.png", (405, 240), seed=9)
    (data / "a0.txt").write_text("another", "utf-8")
    assert build(data, cache, **LIKE["simpletuner"]).encoded == 1
    added = run("export", cache, out, *EXPORT["simpletuner"], "--json").json
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
    build(config, cache, **LIKE["simpletuner"] | {"resolutions": (256, 320)})
    done = run("export", cache, out, *EXPORT["simpletuner"], "--json")
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
    done = run("export", tmp_path / "cache", out, *EXPORT["simpletuner"], "--fields", "all", "--json")
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
    assert run("export", cache, tmp_path / "both", *EXPORT["simpletuner"]).status == 0
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
    done = run("export", cache, tmp_path / "one", *EXPORT["simpletuner"], "--json")
    assert (done.json["samples"], done.json["left_out"]) == (4, 0)
    assert [entry["id"] for entry in read(tmp_path / "one/multidatabackend.json")] == [
        "images-1x-256", "masks-images-1x-256", "text",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("folder", "image"), [("/sets/", "/sets/images-1x/p0.png"), ("C:\\", "C:\\images-1x\\p0.png")]
)
def test_a_separator_at_the_end_of_a_path_is_not_doubled(run, tmp_path, folder, image):
    _, cache, out = cached(tmp_path, "simpletuner")
    assert run("export", cache, out, *EXPORT["simpletuner"], "--as", folder).status == 0
    assert image in read(out / "images-1x/aspect_ratio_bucket_metadata_images-1x-256.json")


def datasets(out):
    return tomllib.loads((out / "dataset.toml").read_text("utf-8"))["datasets"]


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
    done = run("export", tmp_path / "cache", out, *EXPORT["musubi"], "--trainer-config", config, "--json")
    assert done.status == 0, done.error
    assert tomllib.loads((out / "dataset.toml").read_text())["general"]["batch_size"] == 4
    written = {(entry["image_directory"].rpartition("/")[2], entry["resolution"][0], entry["num_repeats"])
             for entry in datasets(out)}  # fmt: skip
    assert written == {("images-1x", 256, 1), ("images-1x", 320, 1), ("images-3x", 256, 3), ("images-3x", 320, 3)}
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


def test_regularization_images_are_refused_for_musubi_tuner(run, tmp_path):
    draw(tmp_path / "sets/1_cat/a.png", (64, 64))
    draw(tmp_path / "sets/reg/1_cat/b.png", (64, 64), seed=1)
    (tmp_path / "sets/img").mkdir()
    (tmp_path / "sets/1_cat").rename(tmp_path / "sets/img/1_cat")
    build(tmp_path / "sets", tmp_path / "other", **LIKE["musubi"])
    done = run("export", tmp_path / "other", tmp_path / "out", *EXPORT["musubi"], "--json")
    assert "is a regularization image" in done.error["what"]


@pytest.mark.usefixtures("threads")
def test_texts_that_the_trainer_would_make_otherwise_are_refused(run, tmp_path):
    data, out, job = draw_captioned(tmp_path / "cats"), tmp_path / "out", tmp_path / "job.yaml"
    (data / "p1.txt").write_text("one,two [trigger]", "utf-8")
    make_pipeline("StableDiffusionXLPipeline", tmp_path / "model", vae=tiny_vae())
    words = ("--out", tmp_path / "cache", "--model", tmp_path / "model", "--like", "ai-toolkit", "--resolution", "64")
    assert run("build", data, *words).status == 0
    export = ("export", tmp_path / "cache", out, *EXPORT["ai-toolkit"], "--fields", "all", "--json")
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
