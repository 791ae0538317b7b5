"""A training step for SD 1.5, SDXL and Flux with tiny diffusers models and tiny VAEs."""

import pytest
import torch
from in_threads import in_threads
from made_pipelines import flux_transformer, tiny_unet
from thirteen_images import draw_thirteen
from tiny_vae import tiny_vae

from latentcache import BuildSettings, build_cache, open_cache

pytestmark = pytest.mark.filterwarnings("ignore")

SCALES = {
    "sd": {"latent_channels": 4, "scaling_factor": 0.18215},
    "sdxl": {"latent_channels": 4, "scaling_factor": 0.13025},
    "flux": {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159},
}
TEXT = 8
"""Width of the stub's embeddings."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a cache and a denoiser for each of the three."""
    folder = tmp_path_factory.mktemp("lora")
    draw_thirteen(folder / "images")
    torch.manual_seed(0)
    for name, config in SCALES.items():
        vae = tiny_vae(folder / name / "vae", **config)
        recipe = {"model": str(vae), "resolutions": (64,), "bucket_step": 16, "min_side": 32}
        fields = {"latents": recipe, "prompt_embeds": {"text_encoder": "stub"}}
        out = folder / f"{name}.latentcache"
        with in_threads():
            build_cache(BuildSettings(data=folder / "images", out=out, fields=fields, related=True, device="cpu"))
    tiny_unet(TEXT).save_pretrained(folder / "sd" / "unet")
    tiny_unet(TEXT, TEXT).save_pretrained(folder / "sdxl" / "unet")
    flux_transformer(TEXT, TEXT).save_pretrained(folder / "flux" / "transformer")
    return folder


def test_the_page_trains_all_three(models, run_howto, monkeypatch):
    monkeypatch.chdir(models)
    names = run_howto("diffusers-lora")
    for loss in (names["sd"], names["sdxl"], names["loss"]):
        assert torch.isfinite(loss)
    trained = [module for module in names["transformer"].modules() if isinstance(module, names["LowRank"])]
    assert trained
    assert all(module.up.weight.abs().max() > 0 for module in trained)  # initialized with zeros


def test_sizes_condition_sdxl(models):
    """The time ids reach the model: another original size changes its output."""
    unet = tiny_unet(TEXT, TEXT)
    batch = next(iter(open_cache(models / "sdxl.latentcache").loader(batch_size=2, format="diffusers-sdxl")))

    def guess(ids):
        more = {"text_embeds": batch["pooled_prompt_embeds"].float(), "time_ids": ids}
        return unet(batch["latents"].float(), 10, batch["prompt_embeds"].float(), added_cond_kwargs=more).sample

    with torch.no_grad():
        assert not torch.equal(guess(batch["time_ids"]), guess(batch["time_ids"] + 64))
