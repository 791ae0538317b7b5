"""Latents of clips equal the class's own encode on the frames of a plain PyAV loop."""

import json

import diffusers
import numpy as np
import pytest
import torch
from made_videos import plain_frames, write_video
from PIL import Image

from latentcache.encoders.vae.describe import decoder, describe
from latentcache.encoders.vae.producer import VaeProducer
from latentcache.errors import RecipeError, UnsupportedModelError, UsageError
from latentcache.fields.latents import LatentsSettings
from latentcache.fields.protocol import DescribeContext, Job, Output, ProducerContext
from latentcache.geometry.sizes import Size

BUCKET = Size(64, 96)
WAN = {"patch_size": None, "in_channels": 3, "out_channels": 3}
WAN |= {"dim_mult": [1, 1, 1, 2], "temperal_downsample": [False, True, True]}
LTX = dict.fromkeys(("spatio_temporal_scaling", "decoder_spatio_temporal_scaling"), (True, True))
#: Class, changes, and frames of a latent frame.
FAMILIES = [
    ("AutoencoderKLWan", WAN, 4),
    ("AutoencoderKLHunyuanVideo", {}, 4),
    ("AutoencoderKLLTXVideo", LTX, 4),
    ("AutoencoderKLCogVideoX", {}, 4),
]


def described(model, bucket=BUCKET, **changes):
    settings = {"model": str(model), "buckets": (bucket,), "storage_dtype": "float32", "frames": (9,), **changes}
    return describe(LatentsSettings(**settings), DescribeContext(device="cpu"))


def latents(root, name, model, count, bucket=BUCKET, **changes):
    description = described(model, bucket, **changes)
    group = description.recipe.group(bucket, count)
    context = ProducerContext(root=str(root), device="cpu", groups=(group,))
    producer = VaeProducer(json.loads(json.dumps(description.producer)), description.recipe, context)
    producer.open()
    job = Job(sample=0, name=name, inputs={"image": {"path": name}}, outputs=(Output(item=0, group=0),))
    items = producer.prepare(job, {"image": (root / name).read_bytes()})
    (item,) = producer.encode(items).result()
    return item.array, group, description.recipe


def reference_latents(model, frames, name):
    """Encode with the class's own posterior mode, raw, (C, f, h, w)."""
    loaded = getattr(diffusers, name).from_pretrained(model).eval()
    values = torch.from_numpy(frames).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    with torch.no_grad():
        return loaded, loaded.encode(values).latent_dist.mode()[0].numpy()


def close(encoded, expected):
    assert encoded.shape == expected.shape
    assert np.abs(encoded - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize(("name", "changes", "step"), FAMILIES)
def test_a_clip_is_encoded_as_the_class_does(name, changes, step, tiny, tmp_path):
    model, path = tiny(name, **changes), write_video(tmp_path / "a.mp4", 2 * step + 3)
    encoded, group, _ = latents(tmp_path, "a.mp4", model, 2 * step + 1)
    assert group.shape == encoded.shape
    assert (encoded.shape[1], group.label) == (3, "9x64x96")
    close(encoded, reference_latents(model, plain_frames(path)[0][: 2 * step + 1], name)[1])


def test_clips_longer_than_a_temporal_tile_are_those_of_the_class(tiny, tmp_path):
    """HunyuanVideo encodes more than 16 frames in parts, which changes values, in every pipeline."""
    model, path = tiny("AutoencoderKLHunyuanVideo"), write_video(tmp_path / "a.mp4", 21)
    encoded, _, _ = latents(tmp_path, "a.mp4", model, 21, frames=(21,))
    close(encoded, reference_latents(model, plain_frames(path)[0], "AutoencoderKLHunyuanVideo")[1])


def test_an_image_is_a_clip_of_one_frame(tiny, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    model = tiny("AutoencoderKLWan", **WAN)
    encoded, group, _ = latents(tmp_path, "a.png", model, 1)
    assert (group.label, group.dims, encoded.shape[1]) == ("64x96", (1, 64, 96), 1)
    close(encoded, reference_latents(model, pixels[None], "AutoencoderKLWan")[1])
    flat, group, _ = latents(tmp_path, "a.png", model, 1, frames=None)
    assert (flat.ndim, group.shape) == (3, flat.shape)
    close(flat, encoded[:, 0])


@pytest.mark.parametrize("frames", [(9,), None], ids=["clips", "images"])
def test_latents_of_a_video_model_are_decoded_as_the_class_does(tiny, frames):
    model = tiny("AutoencoderKLWan", **WAN)
    description = described(model, frames=frames)
    latent = np.random.default_rng(0).normal(size=(16, 3 if frames else 1, 8, 12)).astype(np.float32)
    images = decoder(description.recipe, description.provenance)(latent)
    vae = diffusers.AutoencoderKLWan.from_pretrained(model).eval()
    with torch.no_grad():
        expected = vae.decode(torch.from_numpy(latent)[None]).sample[0].permute(1, 2, 3, 0)
    np.testing.assert_allclose(np.stack(images), ((expected + 1) * 127.5).clamp(0, 255).numpy(), atol=0.51)


def test_frames_that_the_model_does_not_take(tiny):
    model = tiny("AutoencoderKLWan", **WAN)
    with pytest.raises(RecipeError, match="frames=80: this encoder takes 1 frame and a multiple of 4") as caught:
        described(model, frames=(9, 80))
    assert caught.value.fix == "--frames=77 or --frames=81"
    with pytest.raises(RecipeError, match="frames=9: the encoder takes images only"):
        described(tiny("AutoencoderKL"), frames=(9,))
    with pytest.raises(UsageError, match="fps=8: needs frames"):
        described(model, frames=None, fps=8)
    with pytest.raises(UnsupportedModelError):
        described("stub", tiling=True)
