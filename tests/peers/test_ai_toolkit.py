"""ai-toolkit, by its own code, takes our folders: nothing is encoded again, and all values are equal."""

import diffusers
import numpy as np
import pytest
import torch
import yaml
from captioned_images import TEN, draw_captioned
from checkouts import HERE, checkout, exported, served_by
from made_pipelines import make_pipeline, tiny_vae
from small_cache import draw
from test_musubi import WAN

from latentcache import open_cache

pytestmark = pytest.mark.peers
_FLUX = (16, 0.3611, 0.1159)
#: Architecture -> its name for latents, step of sides, pipeline, VAE.
MODELS = {
    "sd1": ("sd1", 16, "StableDiffusionPipeline", (4, 0.18215)),
    "sdxl": ("sdxl", 16, "StableDiffusionXLPipeline", (4, 0.13025)),
    "sd3": ("sd3", 32, "StableDiffusion3Pipeline", (16, 1.5305, 0.0609)),
    "flux": ("flux1", 32, "FluxPipeline", _FLUX),
    "lumina2": ("lumina2", 16, "Lumina2Pipeline", _FLUX),
    "zimage": ("zimage", 16, "ZImagePipeline", _FLUX),
    "qwen_image": ("qwen_image", 32, "QwenImagePipeline", diffusers.AutoencoderKLQwenImage),
    "wan21": ("wan21", 16, "WanPipeline", diffusers.AutoencoderKLWan),
}


def serve(out, arch, *more):
    """What the trainer served, and its counts; what it said and None, if it stopped."""
    folder, python = checkout("ai-toolkit-27a03a9", "venv-ai-toolkit")
    served = out.with_name("served.npz")
    command = [python, HERE / "serve_ai_toolkit.py", folder, out, served, arch, str(MODELS[arch][1]), *more]
    return served_by(command, served, cwd=out.parent)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny pipeline of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    for name, (_, _, pipeline, vae) in MODELS.items():
        torch.manual_seed(0)
        make_pipeline(pipeline, folder / name, vae=tiny_vae(*vae) if isinstance(vae, tuple) else vae(**WAN))
    return folder


def exported_as(arch, data, folder, model, *more):
    """The cache of a data set and ``folder/out``, both with text."""
    words = ("--bucket-step", MODELS[arch][1], "--resolution", "256", *more)
    return exported("ai-toolkit", data, folder, model, *words, export=("--fields", "all", "--architecture", arch))


@pytest.mark.parametrize("arch", MODELS)
def test_every_image_is_accepted_and_every_value_is_equal(run, ten, models, tmp_path, arch):
    cache, out = exported_as(arch, ten, tmp_path, models / arch, "--resolution", "320")
    served, counts = serve(out, arch)
    assert counts is not None, served
    # One image is smaller than both resolutions, and so has one file for both.
    assert (counts["files"], counts["items"], counts["spaces"]) == ([29, 29], 20, [MODELS[arch][0]])
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(19):
        batch = loader.batch([row])
        height, width = batch["original_size"][0].tolist()
        names = [
            name
            for name in served
            if name.startswith(f"images-1x/{width}x{height}/{batch['names'][0].removesuffix('.png')}/")
        ]
        latents = batch["latents"][0].numpy()
        starts = [name.removesuffix("/latents") for name in names if name.endswith("/latents")]
        start = next(name for name in starts if served[f"{name}/latents"].size == latents.size)
        np.testing.assert_array_equal(served[f"{start}/latents"].reshape(latents.shape), latents)
        assert served[f"{start}/latents"].ndim == (4 if arch == "wan21" else 3)
        assert served[f"{start}/caption"].item() == batch["captions"][0]
        text = batch["prompt_embeds"][0].float().numpy()
        theirs = served[f"{start}/text_embeds"]
        np.testing.assert_array_equal(theirs, text[: len(theirs)])
        assert not text[len(theirs) :].any()
        if "pooled_prompt_embeds" in batch:
            np.testing.assert_array_equal(served[f"{start}/pooled_embeds"], batch["pooled_prompt_embeds"][0].numpy())
        if arch in ("lumina2", "qwen_image"):
            assert served[f"{start}/attention_mask"].tolist() == [1] * len(theirs)
    words = ("--for", "ai-toolkit", "--resolution", "256", "--resolution", "320", "--batch-size", "2", "--json")
    plan = run("plan", ten, "--model", "stub", "--bucket-step", MODELS[arch][1], *words).json["trainer"]
    assert counts["batches"] == plan["batches_per_epoch"]
    assert run("verify", out, "--data", ten).status == 0


def test_flips_triggers_drops_masks_and_regularization_of_a_job(run, models, tmp_path):
    draw_captioned(tmp_path / "sets/cats", TEN[:4])
    draw_captioned(tmp_path / "sets/reg", TEN[4:6])
    (tmp_path / "sets/cats/p1.txt").write_text("a [trigger] runs,sleeps, eats")
    for number in range(4):
        draw(tmp_path / f"sets/masks/p{number}.png", TEN[number], seed=70 + number)
    more = {"resolution": [256, 320], "flip_x": True, "caption_dropout_rate": 0.5}
    datasets = [{"folder_path": "sets/cats", "num_repeats": 2, "mask_path": "sets/masks", **more}]
    datasets += [{"folder_path": "sets/reg", "is_reg": True, **more}]
    process = {"trigger_word": "ohwx", "model": {"arch": "sdxl"}, "train": {"batch_size": 2}, "datasets": datasets}
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({"job": "extension", "config": {"process": [process]}}))
    options = ("--trainer-config", job)
    words, export = ("--negative-prompt", "ohwx ", "--empty-prompt", *options), ("--fields", "all", *options)
    cache, out = exported("ai-toolkit", tmp_path / "sets", tmp_path, models / "sdxl", *words, export=export)
    served, counts = serve(out, "sdxl", "ohwx")
    assert counts is not None, served
    # Images, flips and repeats, at two resolutions; latents, texts, and a dropped text of each image. The last image
    # is smaller than both resolutions.
    assert counts["items"] == 2 * 2 * (4 * 2 + 2)
    assert counts["files"] == [6 * 2 * 2 - 2 + 6 * 2] * 2
    captions = {name: served[name].item() for name in served if name.endswith("/caption")}
    assert {text for name, text in captions.items() if "/cats_p1/" in name and "images-2x" in name} == {
        "a ohwx runs, sleeps, eats"
    }
    assert {text for name, text in captions.items() if "/cats_p0/" in name and "images-2x" in name} == {
        "ohwx caption 0, tag"
    }
    assert {text for name, text in captions.items() if "reg-1x" in name} == {"caption 0, tag", "caption 1, tag"}
    dropped = open_cache(cache).prompt("ohwx ")["prompt_embeds"][0].float().numpy()
    texts = [served[name] for name in served if name.endswith("text_embeds") and "images-2x" in name]
    assert any((text == dropped).all() for text in texts)
    plain, flip = (served[f"images-2x/400x240/cats_p0/256{end}/latents"] for end in ("", "/flip"))
    assert (plain != flip).any()
    assert {name.partition("/")[0] for name in served if name.endswith("/mask")} == {"images-2x"}


def test_another_caption_or_size_is_encoded_again_and_verify_names_it(run, ten, models, tmp_path):
    _, out = exported_as("sdxl", ten, tmp_path, models / "sdxl")
    text = (out / "images-1x/p3.txt").read_text()
    assert text == "caption 3,tag"  # the trainer puts a blank behind the comma
    (out / "images-1x/p3.txt").unlink()
    (out / "images-1x/p3.txt").write_text("caption 3, tag", "utf-8")
    said, counts = serve(out, "sdxl")
    assert counts is None
    assert "the trainer encodes again" in said
    assert {entry["path"] for entry in run("verify", out, "--json").json["findings"]} == {"images-1x/p3.txt"}
    said, counts = serve(out, "flux")  # other sides, and another name of the model
    assert counts is None
