import json
import shutil

import pytest
from described_models import as_cached, described_model
from made_weights import edit
from safetensors.torch import load_file, save_file

from latentcache.encoders.vae.describe import describe
from latentcache.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from latentcache.fields.latents import GeometrySettings, LatentsSettings, Normalization
from latentcache.fields.protocol import DescribeContext
from latentcache.geometry.sizes import Size


def test_a_generic_class_without_a_scale_is_reported(copied):
    """The class may have a default scale that its pipelines apply and this table lacks."""
    model = copied("AutoencoderKLCogVideoX")
    spec = described_model(model.folder).spec
    assert (spec.channels, spec.factor, spec.multiple, spec.normalization.scale) == (4, 8, 16, 1.15258426)
    settings = {"model": str(model.folder), "resolutions": (512,)}
    assert described(settings)[0].notes == ()
    config = json.loads(model.config.read_text())
    model.config.write_text(json.dumps({name: value for name, value in config.items() if name != "scaling_factor"}))
    (note,) = described(settings)[0].notes
    assert "AutoencoderKLCogVideoX has no scaling factor" in note


def test_the_scaling_factor_is_not_in_the_recipe_id(copied):
    model = copied()
    before = described_model(model.folder).spec
    edit(model.config, scaling_factor=0.5, shift_factor=0.25)
    after = described_model(model.folder).spec
    assert after.normalization == Normalization(kind="scale-shift", scale=0.5, shift=0.25)
    assert after.identity() == before.identity()
    edit(model.config, act_fn="relu")
    assert described_model(model.folder).spec.identity() != before.identity()


@pytest.mark.parametrize(
    ("compute_dtype", "device", "upcast", "expected"),
    [
        ("auto", "cpu", True, "float32"),
        ("auto", "cuda", True, "bfloat16"),
        ("auto", "cuda", False, "float16"),
        ("float16", "cpu", True, "float16"),
        ("bfloat16", "cuda", False, "bfloat16"),
    ],
)
def test_compute_type(tiny, compute_dtype, device, upcast, expected):
    described = described_model(
        tiny("AutoencoderKL", force_upcast=upcast), compute_dtype=compute_dtype, device=device
    )
    assert described.spec.compute_dtype == expected


def test_means_of_another_length_are_rejected(copied):
    model = copied()
    edit(model.config, latents_mean=[0.0] * 2, latents_std=[1.0] * 2)
    with pytest.raises(UnsupportedModelError, match="the latents have 4 channels, their mean has 2 values"):
        described_model(str(model.folder))


def test_weights_without_an_encoder(copied):
    model = copied()
    tensors = load_file(model.weights)
    save_file({name: t for name, t in tensors.items() if name.startswith("decoder.")}, model.weights)
    with pytest.raises(UnsupportedModelError, match="has no encoder"):
        described_model(model.folder)


def described(settings=None, cached=None, **context):
    """Describe; return the description and the requests to a worker."""
    calls = []

    def ask(target, **kwargs):
        calls.append(target.partition(":")[2])
        json.dumps(kwargs)
        return target.endswith("resample_self_test")

    context = DescribeContext(**{"device": "cpu", "ask": ask} | context | (cached or {}))
    description = describe(LatentsSettings(**settings or {}), context)
    return description, calls


def test_a_new_cache_gets_the_demo_and_its_defaults():
    description, calls = described()
    assert (description.label, description.demo, description.needs_torch, calls) == ("demo", True, False, [])
    assert description.recipe.geometry == GeometrySettings()
    assert description.recipe.pixels.resample == "lanczos-pil"


@pytest.mark.parametrize(
    ("has_kernel", "resample", "noted"),
    [(False, None, True), (True, None, False), (False, "lanczos-pil", False)],
    ids=["old torch", "new torch", "as asked"],
)
def test_a_slow_resize_is_noted_for_a_new_cache(copied, has_kernel, resample, noted):
    settings = {"model": str(copied().folder), "resolutions": (64,), "resample": resample}
    description, _ = described(settings, ask=lambda target, **options: has_kernel)
    assert [note for note in description.notes if "torch 2.13" in note] == list(description.notes) * noted
    assert bool(description.notes) is noted


def size_of(*arguments, **context):
    """Resolutions of a description, and where they are from."""
    description, _ = described(*arguments, **context)
    return description.recipe.geometry.resolutions, description.chosen.get("resolution", "").partition(" ")[2]


@pytest.mark.parametrize(
    ("name", "changes", "size"),
    [
        ("AutoencoderKL", {"scaling_factor": 0.18215, "sample_size": 256}, 512),
        ("AutoencoderKL", {"scaling_factor": 0.13025}, 1024),
        ("AutoencoderKL", {"scaling_factor": 1.5305, "latent_channels": 16}, 1024),
        ("AutoencoderKL", {"scaling_factor": 0.3611, "latent_channels": 16}, 1024),
        ("AutoencoderKLQwenImage", {}, 1024),
        ("AutoencoderKLFlux2", {}, 1024),
    ],
)
def test_the_resolution_of_a_bare_vae_is_usual_for_its_family(tiny, name, changes, size):
    assert size_of({"model": str(tiny(name, **changes))}) == ((size,), "(usual for this VAE)")


@pytest.fixture
def pipeline(tiny, tmp_path):
    """Create a pipeline of a VAE with factor 2 and a denoiser."""

    def make(denoiser, vae="AutoencoderKL", part="unet"):
        shutil.copytree(tiny(vae), tmp_path / "pipe/vae")
        (tmp_path / "pipe" / part).mkdir()
        (tmp_path / "pipe/model_index.json").write_text("{}")
        (tmp_path / "pipe" / part / "config.json").write_text(json.dumps(denoiser))
        return tmp_path / "pipe"

    return make


@pytest.mark.parametrize("part", ["unet", "transformer"])
def test_the_resolution_of_a_pipeline_is_that_of_its_denoiser(pipeline, part):
    folder, expected = pipeline({"sample_size": 96}, part=part), ((192,), f"(from the model's {part})")
    assert size_of({"model": str(folder)}) == size_of({"model": str(folder / "vae")}) == expected


def test_a_denoiser_without_a_size_leaves_it_to_the_vae(pipeline):
    assert size_of({"model": str(pipeline({}))}) == ((1024,), "(usual for this VAE)")


@pytest.mark.parametrize("vae", ["AutoencoderKLWan", "AutoencoderTiny", "AutoencoderKLCogVideoX"])
def test_a_vae_without_a_usual_size_must_be_told(tiny, vae):
    settings = {"model": str(tiny(vae))}
    with pytest.raises(UsageError, match="no resolution was given") as caught:
        described(settings)
    assert caught.value.fix == "add --resolution=PIXELS, the side of a square of equal area"
    assert size_of(settings | {"resolutions": (96,)}) == ((96,), "(as given)")
    assert size_of(settings | {"buckets": (Size(96, 96),)}) == ((), "")


def test_clips_must_be_told_their_size(pipeline):
    folder = pipeline({"sample_size": 96}, vae="AutoencoderKLWan", part="transformer")
    with pytest.raises(UsageError, match="no resolution was given") as caught:
        described({"model": str(folder), "frames": (5,)})
    assert caught.value.why == "video models are trained at many sizes"


def test_options_win_then_the_configuration_then_the_cache(pipeline):
    folder, asked = str(pipeline({"sample_size": 96})), {"resolutions": (256,)}
    first, _ = described({"model": folder}, asked=asked)
    usual = "; the model is trained at 192)"
    assert first.chosen == {"resolution": f"256 (from the configuration in DATA{usual}"}
    kept = ((256,), f"(as the cache{usual}")
    assert size_of({}, as_cached(first)) == size_of({}, as_cached(first), asked=asked) == kept
    changed, _ = described({}, as_cached(first), asked={"resolutions": (320,)})
    assert changed.recipe.geometry.resolutions == (320,)
    fixed, _ = described({"model": folder, "resolutions": (128,)}, asked=asked)
    again = size_of({}, as_cached(fixed), asked=asked)
    assert again == ((128,), f"(as the cache{usual}"), "the option said so when the configuration was the same"
    with pytest.raises(UsageError, match="asks for several resolutions: 256, 320"):
        described({"model": folder}, asked={"resolutions": (256, 320)})


def test_a_resolution_beside_the_grid_is_reported():
    description, _ = described({"resolutions": (250,)})
    assert description.notes == ("resolution 250 gives squares of 192 pixels: sides are multiples of 64",)
    assert described({}, as_cached(description))[0].notes == ()


def test_worker_answers_are_cached(tiny):
    model = str(tiny("AutoencoderKL", force_upcast=True))
    first, calls = described({"model": model}, device="cuda:0")
    assert calls == ["has_bfloat16", "resample_self_test"]
    assert (first.recipe.encoder.compute_dtype, first.recipe.pixels.resample) == ("float32", "lanczos-u8")
    assert first.needs_torch
    second, calls = described(cached=as_cached(first), device="cpu")
    assert (calls, second.recipe) == ([], first.recipe)
    assert second.provenance["model"] == model


def test_another_model_does_not_inherit_tiles(tiny):
    first, _ = described({"model": str(tiny("AutoencoderKL")), "tiling": True})
    assert described(cached=as_cached(first))[0].recipe.encoder.tiling
    assert not described({"model": "stub"}, as_cached(first))[0].recipe.encoder.tiling


def test_the_id_depends_on_nothing_but_the_model(tiny, tmp_path):
    """The id ignores the folder, the hub cache and the memo of the weights."""
    cold, _ = described({"model": str(tiny("AutoencoderKLFlux2"))})
    elsewhere = shutil.copytree(tiny("AutoencoderKLFlux2"), tmp_path / "elsewhere")
    (elsewhere / "README.md").write_text("more files")
    warm, _ = described({"model": str(elsewhere)}, as_cached(cold))
    assert warm.recipe.recipe_id == cold.recipe.recipe_id == described(cached=as_cached(warm))[0].recipe.recipe_id


@pytest.mark.parametrize("model", ["", "some/vae"], ids=["folder", "hub id"])
def test_a_check_downloads_nothing(copied, model):
    before = copied()
    first, _ = described({"model": str(before.folder)})
    shutil.rmtree(before.folder)
    cached = as_cached(first)
    cached["provenance"]["model"] = model or cached["provenance"]["model"]
    with pytest.raises(
        ModelNotFoundError, match="not in the local hub cache;" if model else "no such file or folder"
    ):
        described({}, cached, check=True)
