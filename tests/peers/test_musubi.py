"""musubi-tuner, by its own code, takes our folders: nothing is encoded again or deleted, and all values are equal."""

import diffusers
import numpy as np
import pytest
import torch
from captioned_images import TEN, draw_captioned
from checkouts import HERE, checkout, exported, served_by
from made_pipelines import make_pipeline, tiny_vae
from made_videos import write_video
from small_cache import draw

from latentcache import open_cache

pytestmark = pytest.mark.peers
WAN = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
}
#: Architecture -> code, type of the latents, pipeline, tensors of its text by field.
MODELS = {
    "qwen-image": ("qi", "bfloat16", "QwenImagePipeline", {"vl_embed": "prompt_embeds"}),
    "wan": ("wan", "bfloat16", "WanPipeline", {"t5": "prompt_embeds"}),
    "z-image": ("zi", "float32", "ZImagePipeline", {"llm_embed": "prompt_embeds"}),
    "flux-kontext": (
        "fk", "float32", "FluxPipeline", {"t5_vec": "prompt_embeds", "clip_l_pooler": "pooled_prompt_embeds"},
    ),
}  # fmt: skip


def serve(out, code, *more):
    """What the trainer served, and its counts; what it said and None, if it stopped."""
    folder, python = checkout("musubi-tuner-30c658c", "venv-musubi")
    served = out.with_name("served.npz")
    return served_by([python, HERE / "serve_musubi.py", folder, out, served, code, *more], served)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny pipeline of each architecture."""
    folder = tmp_path_factory.mktemp("models")
    for name, (_, _, pipeline, _) in MODELS.items():
        torch.manual_seed(0)
        flux = tiny_vae(16, 0.3611, 0.1159)
        vaes = {"wan": diffusers.AutoencoderKLWan(**WAN), "qwen-image": diffusers.AutoencoderKLQwenImage(**WAN)}
        make_pipeline(pipeline, folder / name, vae=vaes.get(name, flux))
    video = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 16}
    diffusers.AutoencoderKLHunyuanVideo(**video).save_pretrained(folder / "hunyuan-video")
    return folder


def compare(served, start, batch, dtype, names):
    """Every tensor of a sample with those of the loader."""
    values = batch["latents"][0].to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(served[f"{start}/latents"].reshape(values.shape), values)
    assert served[f"{start}/latents/dtype"] == f"torch.{dtype}"
    for name, field in names.items():
        values = batch[field][0][: len(served[f"{start}/{name}"])]
        np.testing.assert_array_equal(served[f"{start}/{name}"], values.float().numpy())
        left = batch[field][0][len(served[f"{start}/{name}"]) :]
        assert not left.any()  # zeros, with which the loader pads


@pytest.mark.parametrize("name", MODELS)
def test_every_image_is_accepted_and_every_value_is_equal(run, ten, models, tmp_path, name):
    code, dtype, _, names = MODELS[name]
    data, more = ten, ("--resolution", "320", "--fields", ",".join(["latents", *names.values()]))
    if name == "flux-kontext":
        data = draw_captioned(tmp_path / "data", TEN)
        for number in range(10):
            draw(data / f"edits/p{number}.png", (200, 200), seed=50 + number)
        more = ("--resolution", "320", "--controls", "edits")
    export = ("--fields", "all", "--architecture", name)
    cache, out = exported("musubi", data, tmp_path, models / name, "--resolution", "256", *more, export=export)
    served, counts = serve(out, code, "text")
    assert counts is not None, served
    assert counts["files"] == [40, 40]
    loader = open_cache(cache).read(scaled=name != "z-image", dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(20):
        batch = loader.batch([row])
        side = 256 if batch["target_size"][0].prod() <= 256 * 256 else 320
        start = f"images-1x-{side}x{side}/{batch['names'][0].removesuffix('.png')}"
        compare(served, start, batch, dtype, names)
        assert served[f"{start}/bucket"].tolist()[::-1] == batch["target_size"][0].tolist()
        if name == "flux-kontext":
            np.testing.assert_array_equal(served[f"{start}/latents_control"], batch["control"][0].numpy())
    words = ("--for", "musubi", "--resolution", "256", "--resolution", "320", "--batch-size", "2", "--json")
    plan = run("plan", ten, "--model", "stub", *words).json["trainer"]
    (out / "dataset.toml").write_text((out / "dataset.toml").read_text().replace("batch_size = 1", "batch_size = 2"))
    _, counts = serve(out, code)
    assert counts["batches"] == plan["batches_per_epoch"]


@pytest.mark.parametrize("name", ["wan", "hunyuan-video"])
def test_videos_are_accepted_beside_images(run, models, tmp_path, name):
    data = draw_captioned(tmp_path / "data", [(400, 240), (240, 400)])
    for number, (frames, height) in enumerate([(9, 144), (7, 144), (11, 256)]):
        write_video(data / f"clips/v{number}.mp4", frames, height=height, width=256, seed=number)
        (data / f"clips/v{number}.txt").write_text(f"video {number}", "utf-8")
    more = ("--resolution", "256", "--frames", "5", "--frames", "9")
    text = ("--fields", "all") if name == "wan" else ()
    cache, out = exported("musubi", data, tmp_path, models / name, *more, export=text)
    served, counts = serve(out, {"wan": "wan", "hunyuan-video": "hv"}[name], *(["text"] if text else []))
    if not text:  # without text the trainer has no sample yet
        assert counts == {"files": [5, 5], "samples": 0, "batches": 0}
        return
    assert counts is not None, served
    assert (counts["files"], counts["samples"]) == ([10, 10], 5)
    loader = open_cache(cache).read(dtype=torch.float32).loader(batch_size=1, seed=None)
    for row in range(5):
        batch = loader.batch([row])
        frames = {1: "images", 2: "videos-5f", 3: "videos-9f"}[batch["latents"].shape[2]]
        start = f"{frames}-1x-256x256/{batch['names'][0].rpartition('.')[0].replace('/', '_')}"
        compare(served, start, batch, "bfloat16", {"t5": "prompt_embeds"})
    assert run("verify", out, "--data", data).status == 0


def test_a_changed_caption_or_size_is_encoded_again_and_verify_names_it(run, ten, models, tmp_path):
    export = ("--fields", "all", "--architecture", "z-image")
    _, out = exported("musubi", ten, tmp_path, models / "z-image", "--resolution", "256", export=export)
    path = out / "cache/images-1x-256x256/p3_0410x0240_zi.safetensors"
    path.rename(path.with_name("p3_0240x0410_zi.safetensors"))
    said, counts = serve(out, "zi", "text")
    assert counts is None
    assert "the trainer encodes again: ['" in said
    assert {finding["path"] for finding in run("verify", out, "--json").json["findings"]} == {
        path.relative_to(out).as_posix()
    }
