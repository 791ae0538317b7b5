"""sd-scripts and lora-scripts, by their own code, take our folders: nothing is encoded again, values are equal."""

import os

import numpy as np
import pytest
import torch
import transformers
from captioned_images import TEN
from checkouts import CHECKOUTS, HERE, SCALES, checkout, exported, said_by, served_by
from made_pipelines import clip, clip_tokenizer, make_pipeline, tiny_vae
from safetensors.torch import load_file

from latentcache import open_cache
from latentcache.geometry.like.kohya import KohyaTable, KohyaTrainer, letterbox
from latentcache.geometry.sizes import Size
from latentcache.plan.trainers import TrainerRun

pytestmark = pytest.mark.peers
FORMS = [
    ("sd", "lora-scripts-fdefba9"), ("sdxl", "lora-scripts-fdefba9"),
    ("sd", "sd-scripts-48d368f"), ("sdxl", "sd-scripts-48d368f"), ("sd3", "sd-scripts-48d368f"),
    ("flux", "sd-scripts-48d368f"), ("lumina", "sd-scripts-48d368f"), ("hunyuan-image", "sd-scripts-48d368f"),
    ("sd", "sd-scripts-58f7b4c"), ("sdxl", "sd-scripts-58f7b4c"), ("flux", "sd-scripts-58f7b4c"),
]  # fmt: skip


def exported_for(name, architecture, data, folder, model, *words, export=()):
    """The cache of a data set and ``folder/out``, in the form that a checkout reads."""
    sides = ("--resolution", "256", "--min-side", "128", "--max-side", "512")
    words = words if "--trainer-config" in words else (*sides, *words)
    export = ("--architecture", architecture, *export)
    export += ("--release", CHECKOUTS[name]["release"]) if architecture in ("sd", "sdxl") else ()
    return exported("kohya", data, folder, model, *words, export=export)


def serve(name, out, architecture, *more, draw="1"):
    """One epoch by the trainer: what it served, and its counts; ``draw`` 0 flips every image."""
    code, python = checkout(name)
    served = out.with_name("served.npz")
    command = [python, HERE / "serve_sd_scripts.py", code, out / "dataset.toml", served, architecture, *more]
    return served_by(command, served, env={**os.environ, "DRAW": draw})


@pytest.mark.parametrize(("architecture", "name"), FORMS)
def test_every_image_is_accepted_and_every_value_is_equal(sets, vaes, tmp_path, architecture, name):
    model = vaes / ("flux" if architecture == "lumina" else architecture)
    cache, out = exported_for(name, architecture, sets, tmp_path, model, "--flip")
    served, counts = serve(name, out, architecture)
    assert counts is not None, served
    assert counts["images"] == 10
    loader = (
        open_cache(cache)
        .read(scaled=architecture in ("flux", "lumina"), augment=False, repeats=False, dtype=torch.float32)
        .loader(batch_size=1, seed=None)
    )
    for row in range(10):
        batch = loader.batch([row])
        name_of = batch["names"][0].rpartition("/")[2]
        item = {key.partition("/")[2]: value for key, value in served.items() if key.startswith(f"{name_of}@")}
        np.testing.assert_array_equal(item["latents"], batch["latents"][0].numpy())
        assert item["caption"].item() == batch["captions"][0]
        assert item["original_sizes_hw"].tolist() == batch["original_size"][0].tolist()
        cells = 4 if architecture == "hunyuan-image" else 1  # it counts 8 pixels for a cell, which has 32
        assert (item["target_sizes_hw"] * cells).tolist() == batch["target_size"][0].tolist()
        left, top, *_ = letterbox(Size(*batch["original_size"][0].tolist()), Size(*batch["target_size"][0].tolist()))
        assert item["crop_top_lefts"].tolist() == [int(top), int(left)]
    run = TrainerRun(
        trainer=KohyaTrainer(),
        tables=(KohyaTable(resolution=Size(256, 256), min_side=128, max_side=512),),
        upscale=True,
        batch=2,
    )
    sizes = {(1, Size(height, width)): 2 if number < 6 else 1 for number, (width, height) in enumerate(TEN)}
    assert counts["batches"] == run.plan([sizes]).batches


PIPELINES = {
    "sdxl": "StableDiffusionXLPipeline",
    "flux": "FluxPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "lumina": "Lumina2Pipeline",
}
TEXTS = [("sdxl", "lora-scripts-fdefba9"), *((name, "sd-scripts-58f7b4c") for name in PIPELINES)]


def exported_with_text(data, folder, architecture, name):
    """A tiny pipeline, its cache, and ``folder/out`` for a checkout."""
    channels, scale, shift = SCALES["flux" if architecture == "lumina" else architecture]
    torch.manual_seed(0)
    parts = {"vae": tiny_vae(channels, scale, shift)}
    if architecture == "sdxl":  # its two encoders are told apart by their widths
        second = clip(transformers.CLIPTextModelWithProjection, hidden=1280, projection=1280)
        parts |= {"text_encoder": clip(hidden=768), "text_encoder_2": second}
    pipe = make_pipeline(PIPELINES[architecture], folder / "model", **parts)
    dtype, fields = ("--text-storage-dtype", "float32"), ("--fields", "all")
    return pipe, exported_for(name, architecture, data, folder, folder / "model", *dtype, export=fields)[0]


@pytest.mark.parametrize(("architecture", "name"), TEXTS)
def test_text_is_taken_and_every_value_is_equal(sets, tmp_path, architecture, name):
    pipe, cache = exported_with_text(sets, tmp_path, architecture, name)
    encoder = [tmp_path / "model", pipe.system_prompt] if architecture == "lumina" else []
    served, counts = serve(name, tmp_path / "out", architecture, "text", *encoder)
    assert counts is not None, served
    loader = open_cache(cache).read(repeats=False, dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(10):
        batch = loader.batch([row])
        start = f"{batch['names'][0].rpartition('/')[2]}@"
        item = [served[key] for key in sorted(served) if key.startswith(start) and "/text" in key]
        for values, expected in zip(item, expected_text(architecture, batch), strict=True):
            np.testing.assert_array_equal(values, expected)
        for order, values in enumerate(item if encoder else ()):
            theirs, mask = (served[f"{batch['captions'][0]}/own{part}"] for part in (order, 2))
            np.testing.assert_allclose(values[mask > 0], theirs[mask > 0], atol=1e-5)


def expected_text(architecture, batch):
    """What the trainer loads, in its order."""
    embeds, (ids, mask) = batch["prompt_embeds"][0].numpy(), batch["prompt_ids"][0].numpy()
    if architecture == "lumina":
        return [embeds, ids, mask]
    pooled = batch["pooled_prompt_embeds"][0].numpy()
    if architecture == "sdxl":
        return [embeds[:, :768], embeds[:, 768:], pooled]
    if architecture == "flux":
        return [pooled, embeds, np.zeros((len(embeds), 3)), mask[77:]]
    return [embeds[:77, : len(pooled)], embeds[77:], pooled, mask[:77], mask[77:154], mask[154:]]


def test_the_form_of_another_release_is_encoded_again(sets, vaes, tmp_path):
    for written, name in [
        ("sd-scripts-58f7b4c", "sd-scripts-48d368f"),
        ("sd-scripts-48d368f", "lora-scripts-fdefba9"),
    ]:
        _, out = exported_for(written, "sdxl", sets, tmp_path / written, vaes / "sdxl")
        _, counts = serve(name, out, "sdxl")
        assert counts is None


def test_sd_scripts_trains_two_steps_of_a_lora_of_sdxl(sets, tmp_path):
    """Its training script, with the UNet of SDXL in bfloat16: 7 GB of memory, and 2 to 5 minutes on two cores."""
    exported_with_text(sets, tmp_path, "sdxl", "sd-scripts-48d368f")
    for name in ("openai_clip-vit-large-patch14", "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k"):
        clip_tokenizer().save_pretrained(tmp_path / "tokenizers" / name)
    code, python = checkout("sd-scripts-48d368f")
    folders = [tmp_path / "out/dataset.toml", tmp_path / "lora", tmp_path / "tokenizers"]
    command = [python, HERE / "train_sd_scripts.py", code, *folders]
    losses = said_by(command)["losses"]
    assert len(losses) == 2
    assert np.isfinite(losses).all()
    lora = load_file(tmp_path / "lora/lora.safetensors")
    assert all(weights.any() for name, weights in lora.items() if "lora_up" in name), "zero before the first step"
