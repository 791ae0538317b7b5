"""SimpleTuner, by its own code, takes our folders: nothing is encoded again, all values are equal, and it trains."""

import json
import math
import shutil
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
from captioned_images import TEN, draw_captioned
from checkouts import HERE, checkout, exported, served_by
from made_pipelines import flux_transformer, make_pipeline, sd3_transformer, tiny_unet, tiny_vae
from PIL import Image
from safetensors.torch import load_file
from small_cache import draw

from latentcache import open_cache

pytestmark = pytest.mark.peers


def serve(out, *model):
    """What the trainer served, and its counts; what it said and None, if it stopped."""
    code, python = checkout("SimpleTuner-bc8e6ab", "venv-simpletuner")
    served = out.with_name("served.npz")
    command = [python, HERE / "train_simpletuner.py", code, out, served, *model]
    # It writes lists of files into the folder that it runs in.
    return served_by(command, served, cwd=out.parent)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny pipeline of each family, with denoiser and scheduler."""
    folder = tmp_path_factory.mktemp("models")
    make_pipeline("StableDiffusionXLPipeline", folder / "sdxl", vae=tiny_vae(4, 0.13025))
    tiny_unet(40, 12).save_pretrained(folder / "sdxl/unet")
    diffusers.DDPMScheduler().save_pretrained(folder / "sdxl/scheduler")
    make_pipeline("FluxPipeline", folder / "flux", vae=tiny_vae(16, 0.3611, 0.1159))
    flux_transformer(32, 16).save_pretrained(folder / "flux/transformer")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "flux/scheduler")
    make_pipeline("StableDiffusionPipeline", folder / "sd1x", vae=tiny_vae(4, 0.18215))
    tiny_unet(16).save_pretrained(folder / "sd1x/unet")
    diffusers.DDPMScheduler().save_pretrained(folder / "sd1x/scheduler")
    make_pipeline("StableDiffusion3Pipeline", folder / "sd3", vae=tiny_vae(16, 1.5305, 0.0609))
    sd3_transformer(48, 32).save_pretrained(folder / "sd3/transformer")
    diffusers.FlowMatchEulerDiscreteScheduler().save_pretrained(folder / "sd3/scheduler")
    return folder


def exported_as(family, data, folder, models, *more):
    """The cache of a data set and ``folder/out``, both with text."""
    words = (*(more or ("--resolution", "256")), "--text-storage-dtype", "float32")
    words += ("--prompt-ids",) if family == "flux" else ()
    return exported("simpletuner", data, folder, models / family, *words, export=("--fields", "all"))


@pytest.mark.parametrize("family", ["sdxl", "flux", "sd1x", "sd3"])
def test_every_value_is_equal_and_its_trainer_trains_two_steps(run, ten, models, tmp_path, family):
    cache, out = exported_as(family, ten, tmp_path, models)
    served, counts = serve(out, family, models / family)
    assert counts is not None, served
    assert counts["images"] == 10
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(10):
        batch = loader.batch([row])
        start = f"images-1x-256/{batch['names'][0]}"
        assert served[f"{start}/prompts"].item() == batch["captions"][0]
        np.testing.assert_array_equal(served[f"{start}/latent_batch"], batch["latents"][0].numpy())
        np.testing.assert_array_equal(served[f"{start}/prompt_embeds"], batch["prompt_embeds"][0].numpy())
        if family != "sd1x":
            pooled = batch["pooled_prompt_embeds"][0].numpy()
            np.testing.assert_array_equal(served[f"{start}/add_text_embeds"], pooled)
        times = served[f"{start}/batch_time_ids"]
        if family == "sdxl":
            assert times.reshape(-1).tolist()[2:4] == batch["crop_top_left"][0].tolist()
        elif family == "flux":
            mask = batch["prompt_ids"][0][1, 77:].numpy()
            np.testing.assert_array_equal(served[f"{start}/encoder_attention_mask"].reshape(-1), mask)
    plan = run(
        "plan", ten, "--model", "stub", "--resolution", "256", "--for", "simpletuner", "--batch-size", "2", "--json"
    )
    assert counts["batches"] == {"images-1x-256": plan.json["trainer"]["batches_per_epoch"]}
    assert counts["steps_per_epoch"] == plan.json["trainer"]["steps_per_epoch"]
    assert counts["steps"] == len(counts["losses"]) == 2
    assert all(map(math.isfinite, counts["losses"]))
    lora = load_file(out / "output/pytorch_lora_weights.safetensors")
    assert any(values.any() for name, values in lora.items() if "lora_B" in name or "lora.up" in name)
    assert run("verify", out).status == 0  # the files that the trainer wrote to are not compared


def test_resolutions_repeats_and_regularization_sets_are_backends(run, ten, models, tmp_path):
    listed = [
        {"id": "cats", "type": "local", "instance_data_dir": str(tmp_path / "cats"), "repeats": 1},
        {"id": "reg", "type": "local", "instance_data_dir": str(tmp_path / "reg"), "is_regularisation_data": True},
    ]
    for entry, numbers in zip(listed, ((0, 1, 3, 4, 6), (2, 5, 7, 8, 9)), strict=True):
        entry |= {"resolution": 256, "resolution_type": "pixel_area", "caption_strategy": "textfile"}
        for number in numbers:
            for end in (".png", ".txt"):
                target = Path(entry["instance_data_dir"]) / f"p{number}{end}"
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(ten / f"p{number}{end}", target)
    config = tmp_path / "multidatabackend.json"
    config.write_text(json.dumps(listed))
    _, out = exported_as("sdxl", config, tmp_path, models, "--resolution", "256", "--resolution", "320")
    served, counts = serve(out, "sdxl", models / "sdxl")
    assert counts is not None, served
    names = {f"{start}-{side}": start == "reg-1x" for start in ("images-2x", "reg-1x") for side in (256, 320)}
    assert counts["is_reg"] == names
    assert counts["images"] == 20
    sizes = ("--resolution", "256", "--resolution", "320", "--model", "stub")
    plan = run("plan", config, *sizes, "--for", "simpletuner", "--batch-size", "2", "--json").json["trainer"]
    assert counts["steps_per_epoch"] == plan["steps_per_epoch"] == sum(counts["batches"].values())


def test_captions_that_are_several_or_empty_are_taken(models, tmp_path):
    data = draw_captioned(tmp_path / "data", TEN[:8])
    (data / "p3.txt").unlink()
    for number in (0, 4, 5):
        (data / f"p{number}.txt").write_text(f"first of {number}\nsecond of {number}", "utf-8")
    more = ("--resolution", "256", "--caption-lines", "all", "--default-caption", "")
    cache, out = exported_as("sdxl", data, tmp_path, models, *more)
    served, counts = serve(out, "sdxl", models / "sdxl")
    assert counts is not None, served
    texts, loader = {}, open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=0)
    for epoch in range(20):
        loader.set_epoch(epoch)
        texts |= {batch["captions"][0]: batch["prompt_embeds"][0].numpy() for batch in loader}
    assert len(texts) == 11
    prompts = {number: served[f"images-1x-256/p{number}.png/prompts"].item() for number in range(8)}
    for number, prompt in prompts.items():
        np.testing.assert_array_equal(served[f"images-1x-256/p{number}.png/prompt_embeds"], texts[prompt])
    assert prompts[3] == ""
    assert prompts[0] in ("first of 0", "second of 0")


def test_a_changed_caption_is_encoded_again_and_verify_names_it(run, ten, models, tmp_path):
    _, out = exported_as("sdxl", ten, tmp_path, models)
    (out / "images-1x/p3.txt").unlink()
    (out / "images-1x/p3.txt").write_text("another caption", "utf-8")
    said, counts = serve(out, "sdxl", models / "sdxl")
    assert counts is None
    assert "the trainer encodes again" in said
    changed = {finding["path"] for finding in run("verify", out, "--json").json["findings"]}
    assert changed == {"images-1x/p3.txt"}


def test_control_images_are_a_conditioning_data_set(models, tmp_path):
    data = draw_captioned(tmp_path / "data", TEN)
    for number, size in enumerate(TEN):
        draw(data / f"p{number}-condlabel.png", size, seed=50 + number)
    cache, out = exported_as("flux", data, tmp_path, models)
    served, counts = serve(out, "flux", models / "flux", "kontext")
    assert counts is not None, served
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(10):
        batch = loader.batch([row])
        start = f"images-1x-256/{batch['names'][0]}"
        np.testing.assert_array_equal(served[f"{start}/latent_batch"], batch["latents"][0].numpy())
        np.testing.assert_array_equal(served[f"{start}/conditioning_latents"], batch["control"][0].numpy())
    assert len(counts["losses"]) == 2


def test_sizes_by_the_shorter_side_and_masks(models, tmp_path):
    """``resolution_type = pixel`` without square crops; every image has a mask, a data set of its own."""
    data = draw_captioned(tmp_path / "data", TEN[:8])  # the ninth would be alone in its bucket, at which it stops
    for number, size in enumerate(TEN[:8]):
        draw(data / f"weights/p{number}.png", size, seed=90 + number)
    Image.open(data / "p0.png").save(data / "p0.jpg")
    (data / "p0.png").unlink()
    more = ("--resolution", "256", "--min-side", "256", "--masks", "weights")
    cache, out = exported_as("sdxl", data, tmp_path, models, *more)
    backends = json.loads((out / "multidatabackend.json").read_text())
    assert [entry.get("resolution_type") for entry in backends] == ["pixel", None, None]
    served, counts = serve(out, "sdxl", models / "sdxl")
    assert counts is not None, served
    assert counts["images"] == 8
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(8):
        batch = loader.batch([row])
        start = f"images-1x-256/{batch['names'][0]}"
        np.testing.assert_array_equal(served[f"{start}/latent_batch"], batch["latents"][0].numpy())
        assert min(batch["target_size"][0].tolist()) == 256
    masks = [value for name, value in served.items() if name.endswith("/conditioning_pixel_values")]
    assert {mask.shape[-2:] for mask in masks} == {(256, 448), (448, 256), (256, 256)}
    assert all(0.2 < mask.std() < 0.8 for mask in masks)  # noise, as the masks were drawn
