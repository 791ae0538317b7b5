"""The table against the classes it speaks of."""

import inspect

import pytest
from described_models import described_model

from latentcache.encoders.vae.encoder import VaeEncoder, choose_device
from latentcache.encoders.vae.families import FAMILIES, GENERIC, UNSUPPORTED, family_of
from latentcache.encoders.vae.modules import load_module
from latentcache.errors import UnsupportedModelError


def plain(value):
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("name", FAMILIES)
def test_defaults_are_those_of_the_class(name):
    import diffusers

    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    row = FAMILIES[name]
    for fields in (row.encode, row.read):
        for field, value in fields.items():
            assert plain(parameters[field].default) == value, field


def test_every_autoencoder_of_the_installed_diffusers_has_an_answer():
    import diffusers

    names = [name for name in dir(diffusers) if name.startswith("Autoencoder") or name in UNSUPPORTED]
    assert len(names) > 15
    for name in names:
        if name in UNSUPPORTED or name.endswith("Audio"):
            with pytest.raises(UnsupportedModelError):
                family_of(name, "config.json")
        else:
            assert family_of(name, "config.json") in (*FAMILIES.values(), GENERIC)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("AutoencoderOobleck", "it encodes sound"),
        ("AutoencoderOfTomorrowAudio", "it encodes sound"),
        ("AutoencoderRAE", UNSUPPORTED["AutoencoderRAE"]),
        ("VQModel", "it is not an autoencoder"),
        ("UNet2DConditionModel", "it is not an autoencoder"),
        ("", "it is not an autoencoder"),
    ],
)
def test_what_is_no_image_encoder_is_rejected_by_name(name, why):
    with pytest.raises(UnsupportedModelError) as caught:
        family_of(name, "there/config.json")
    assert (caught.value.what, caught.value.why) == (f"{name} is not an image encoder", why)
    assert caught.value.where == "there/config.json"


@pytest.mark.parametrize("name", [*FAMILIES, "AutoencoderKLCosmos"])
def test_tiles_are_those_of_the_class(name, tiny, images):
    """What the table says of a class, against the class; tiles smaller than an image give other latents."""
    changes = {}
    if name == "AutoencoderTiny":  # its tiles presume the factor of four levels
        sides = ("encoder_block_out_channels", "decoder_block_out_channels")
        blocks = ("num_encoder_blocks", "num_decoder_blocks")
        changes = dict.fromkeys(sides, (8,) * 4) | dict.fromkeys(blocks, (1,) * 4)
    description = described_model(tiny(name, **changes), storage_dtype="float32", tiling=True)
    encoder = VaeEncoder(description, choose_device("cpu"))
    (module,) = encoder._modules.values()
    assert module.use_tiling
    assert encoder.encode(images).finite.all()


def test_a_generic_class_without_tiles_is_rejected_when_it_is_loaded(tiny, monkeypatch):
    def without_tiles(*given):
        module = load_module(*given)
        del module.use_tiling
        return module

    monkeypatch.setattr("latentcache.encoders.vae.encoder.load_module", without_tiles)
    description = described_model(tiny("AutoencoderKLHunyuanImage"), tiling=True)
    with pytest.raises(UnsupportedModelError, match="AutoencoderKLHunyuanImage cannot encode in tiles"):
        VaeEncoder(description, choose_device("cpu"))
