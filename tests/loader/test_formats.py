"""Formats of trainers; a format rejects latents of another model."""

import inspect
import shlex

import diffusers
import numpy as np
import PIL.Image
import pytest
import torch
from made_caches import documents, images, opened, texts
from made_pipelines import flux_transformer, make_pipeline, tiny_unet, tiny_vae

from latentcache import open_cache
from latentcache.cli.app import main
from latentcache.errors import UsageError
from latentcache.loader.formats import check_row_format, row_format, sample_format

#: Columns of a cache of latents: captions are encoded in training.
CARRIED = ["latents", "captions", "names", "keys"]
SIZES = ["original_size", "crop_top_left", "target_size"]
FLUX = {"kind": "scale-shift", "scale": 0.3611, "shift": 0.1159}


def test_sdxl_has_time_ids(many):
    batch = next(iter(many.loader(batch_size=2, format="diffusers-sdxl", fields=[*CARRIED, *SIZES])))
    expected = torch.cat([batch[name] for name in SIZES], dim=1)
    assert torch.equal(batch["time_ids"], expected)
    with pytest.raises(UsageError, match="needs crop_top_left, original_size, target_size"):
        many.loader(batch_size=2, format="diffusers-sdxl", fields=["latents", "captions"])


@pytest.mark.parametrize(
    ("name", "missing"),
    [("sd", "no prompt_embeds"), ("sdxl", "no prompt_embeds and no pooled_prompt_embeds")],
)
def test_embeddings_that_a_format_needs_are_an_error_if_the_cache_lacks_them(many, name, missing):
    with pytest.raises(UsageError) as caught:
        many.loader(batch_size=2, format=f"diffusers-{name}")
    assert caught.value.what == f"format='diffusers-{name}': the cache has {missing}"
    columns = eval(caught.value.fix.split("fields=")[1])  # the second way that the error names
    assert "forward" in next(iter(many.loader(batch_size=2, format=f"diffusers-{name}", fields=columns)))


@pytest.mark.usefixtures("threads")
def test_the_command_of_the_error_adds_the_embeddings(tmp_path):
    make_pipeline("StableDiffusionXLPipeline", tmp_path / "sdxl", vae=tiny_vae())
    (tmp_path / "my images").mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(tmp_path / "my images" / f"{number}.png")
        (tmp_path / "my images" / f"{number}.txt").write_text(f"caption {number}")
    small = ("--resolution", "64", "--bucket-step", "16", "--min-side", "32", "--device", "cpu")
    words = ("--model", tmp_path / "sdxl", "--text-encoder", "none", *small)
    assert main([*map(str, ("build", tmp_path / "my images", "--out", tmp_path / "c", *words))]) == 0
    with pytest.raises(UsageError, match="the cache has no prompt_embeds") as caught:
        open_cache(tmp_path / "c").loader(batch_size=2, format="diffusers-sdxl")
    assert main(shlex.split(caught.value.fix.split("`")[1])[1:]) == 0
    assert "forward" in next(iter(open_cache(tmp_path / "c").loader(batch_size=2, format="diffusers-sdxl")))


@pytest.mark.parametrize("form", ["flat", "torchtitan", "transformers"])
def test_columns_that_a_format_of_rows_leaves_out_are_an_error(tmp_path, form):
    rows = opened(documents(tmp_path / "cache", texts(8))).rows(pack=64)
    there = {*next(iter(rows.loader(batch_size=1, format=form)))}
    there = there | {"input_ids"} if "input" in there else there  # as torchtitan calls it
    there = there | {"position_ids"} if "positions" in there else there
    for column in ("input_ids", "labels", "position_ids", "seq_idx"):
        if column in there:
            rows.loader(batch_size=1, format=form, fields=[column])
            continue
        with pytest.raises(UsageError, match=f"format='{form}': its batches have no {column}"):
            rows.loader(batch_size=1, format=form, fields=[column])
    if form == "transformers":
        assert "meta" in next(iter(rows.loader(batch_size=1, format=form, fields=["meta"])))
    else:
        with pytest.raises(UsageError, match="have no names, meta"):
            rows.loader(batch_size=1, format=form, fields=["names", "meta"])


SPACES = {
    "sd": {"channels": 4, "kind": "scale-shift", "scale": 0.18215},
    "sdxl": {"channels": 4, "kind": "scale-shift", "scale": 0.13025},
    "flux": {"channels": 16} | FLUX,
    "sd3": {"channels": 16, "kind": "scale-shift", "scale": 1.5305, "shift": 0.0609},
    "no shift": {"channels": 16, "kind": "scale-shift", "scale": 0.3611},
    "wan": {"channels": 16, "kind": "mean-std", "mean": (0.0,) * 16, "std": (1.0,) * 16},
}


#: (latent space, format) with equal channels -> reason of the rejection.
WHY = {
    ("sd", "sdxl"): "a scale of 0.18215, not 0.13025",
    ("sdxl", "sd"): "a scale of 0.13025, not 0.18215",
    ("sd3", "flux"): "a scale of 1.5305, not 0.3611",
    ("no shift", "flux"): "a shift of 0, not 0.1159",
    ("wan", "flux"): "scaling 'mean-std', not 'scale-shift'",
}


@pytest.mark.parametrize("space", SPACES)
def test_a_format_takes_latents_of_its_model_and_names_the_one_that_fits(tmp_path, space):
    cache = opened(images(tmp_path / "c", [(64, 96)] * 4, **SPACES[space]))
    for name in ("sd", "sdxl", "flux", "sd3", "qwen-image", "wan"):
        fields = [*CARRIED, *SIZES] if name == "sdxl" else CARRIED
        if name == space or (space, name) == ("wan", "qwen-image"):
            next(iter(cache.loader(batch_size=2, format=f"diffusers-{name}", fields=fields)))
            continue
        with pytest.raises(UsageError, match="the latents are of another model") as caught:
            cache.loader(batch_size=2, format=f"diffusers-{name}", fields=fields)
        fits = "" if space == "no shift" else f"format='diffusers-{space.replace('wan', 'qwen-image')}' or "
        fits += "format='diffusers-wan' or " if space == "wan" else ""
        assert caught.value.fix.startswith(f"{fits}format='plain', or build")
        assert WHY.get((space, name), " not ") in caught.value.why


TEXT = 8
TINY = {"num_layers": 1, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": TEXT}
#: A tiny version of each format's denoiser.
MODELS = {
    "diffusers-sdxl": lambda: tiny_unet(TEXT, TEXT),
    "diffusers-sd3": lambda: diffusers.SD3Transformer2DModel(
        **TINY | {"attention_head_dim": 8}, sample_size=8, caption_projection_dim=16, pooled_projection_dim=TEXT
    ),
    "diffusers-flux": lambda: flux_transformer(TEXT, TEXT),
    "diffusers-qwen-image": lambda: diffusers.QwenImageTransformer2DModel(
        **TINY, in_channels=64, out_channels=16, axes_dims_rope=(4, 6, 6)
    ),
    "diffusers-wan": lambda: diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=TEXT, freq_dim=16, ffn_dim=16, num_layers=1
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_matches_the_forward_of_the_model(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    plain = {
        "latents": torch.randn(2, 4 if name == "diffusers-sdxl" else 16, 8, 12),
        "prompt_embeds": torch.randn(2, 5, TEXT),
        "prompt_embeds_mask": torch.arange(5) < torch.tensor([[5], [3]]),
        "pooled_prompt_embeds": torch.randn(2, TEXT),
        **{size: torch.tensor([[64, 96]] * 2) for size in ("original_size", "crop_top_left", "target_size")},
    }
    batch = sample_format(plain, name)
    latents = batch["latents"]
    if name in ("diffusers-flux", "diffusers-qwen-image"):
        latents = torch.nn.functional.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)
    with torch.inference_mode():
        predicted = model(latents, timestep=torch.tensor([10, 500]), **batch["forward"], return_dict=False)[0]
    assert predicted.shape == latents.shape
    assert bool(predicted.isfinite().all())
    wanted = set(inspect.signature(type(model).forward).parameters)
    # arguments of image-to-video, not from a text encoder
    beside = {"encoder_hidden_states_image", "encoder_attention_mask"}
    named = {argument for argument in wanted if argument.startswith(("encoder", "pooled", "txt", "img", "added"))}
    assert set(batch["forward"]) == named - beside


def test_patches_must_fill_every_bucket(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 96)] * 4 + [(64, 88)], channels=16, **FLUX))
    with pytest.raises(UsageError) as caught:
        cache.loader(batch_size=1, format="diffusers-flux", fields=CARRIED)
    assert caught.value.why == "they have a size of 8x11 cells, which patches of 2x2 do not fill"


def test_unknown_formats(many):
    with pytest.raises(UsageError, match="format='sdxl': must be 'plain', 'diffusers-sd'"):
        many.loader(batch_size=1, format="sdxl")
    with pytest.raises(UsageError, match="format='flat'"):
        check_row_format("flat", isolated=False)


def a_batch():
    position_ids = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]])
    ids = torch.arange(12).view(2, 6)
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        "position_ids": position_ids,
        "seq_idx": torch.ones(2, 6, dtype=torch.int32),
    }


def test_rows_for_transformers_torchtitan_and_flash_attention():
    batch = a_batch()
    assert set(row_format(batch, "transformers")) == {"input_ids", "labels", "position_ids", "use_cache"}
    titan = row_format(batch, "torchtitan")
    assert set(titan) == {"input", "positions", "labels"}
    assert titan["labels"].tolist() == [[1, 2, 3, 4, 5, -100], [7, 8, 9, 10, 11, -100]]
    flat = row_format(batch, "flat")
    assert flat["input_ids"].shape == (1, 12)
    assert flat["cu_seq_lens_q"].tolist() == [0, 3, 5, 6, 12]
    assert (flat["max_length_q"], flat["seq_idx"][0].tolist()) == (6, [0, 0, 0, 1, 1, 2, 3, 3, 3, 3, 3, 3])
    assert flat["cu_seq_lens_q"].dtype == torch.int32
    del batch["position_ids"]
    assert set(row_format(batch, "transformers")) == {"input_ids", "labels"}
