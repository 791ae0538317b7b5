import pytest
from described_models import described_model

from latentcache.encoders.devices import choose_device
from latentcache.encoders.vae.encoder import VaeEncoder
from latentcache.encoders.vae.families import (
    FAMILIES,
    GENERIC,
    UNSUPPORTED,
    config_hash,
    family_of,
    normalization_of,
    shape_of,
)
from latentcache.errors import UnsupportedModelError
from latentcache.fields.dtypes import is_finite

FOUR = [128, 256, 512, 512]
WAN = {"z_dim": 16, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True], "scale_factor_spatial": 8}
WAN_PATCHES = {"z_dim": 48, "patch_size": 2, "in_channels": 12, "scale_factor_spatial": 16}
HUNYUAN = {"latent_channels": 16, "spatial_compression_ratio": 8, "temporal_compression_ratio": 4}
LTX = {"latent_channels": 128, "spatio_temporal_scaling": [True, True, True, False], "patch_size": 4}
MOCHI = {"latent_channels": 12, "in_channels": 15, "encoder_block_out_channels": FOUR}
#: Configuration fields of published models -> (channels, factor, multiple, frame step).
PUBLISHED = [
    ("AutoencoderKL", {"block_out_channels": FOUR, "latent_channels": 4}, (4, 8, 8, 0)),
    ("AutoencoderKL", {"block_out_channels": FOUR, "latent_channels": 16}, (16, 8, 16, 0)),
    ("AutoencoderTiny", {"encoder_block_out_channels": [64] * 4, "latent_channels": 4}, (4, 8, 8, 0)),
    ("AutoencoderTiny", {"encoder_block_out_channels": [64] * 4, "latent_channels": 16}, (16, 8, 16, 0)),
    ("AutoencoderDC", {"encoder_block_out_channels": [128] * 6, "latent_channels": 32}, (32, 32, 32, 0)),
    ("AutoencoderKLQwenImage", WAN, (16, 8, 16, 4)),
    ("AutoencoderKLWan", WAN, (16, 8, 16, 4)),
    ("AutoencoderKLWan", WAN | WAN_PATCHES, (48, 16, 32, 4)),
    ("AutoencoderKLFlux2", {"block_out_channels": FOUR, "latent_channels": 32, "patch_size": [2, 2]}, (32, 8, 16, 0)),
    ("AutoencoderKLHunyuanVideo", HUNYUAN, (16, 8, 16, 4)),
    ("AutoencoderKLLTXVideo", LTX, (128, 32, 32, 8)),
    ("AutoencoderKLHunyuanVideo15", {"latent_channels": 32, "spatial_compression_ratio": 16}, (32, 16, 32, 0)),
    ("AutoencoderKLMochi", MOCHI, (12, 8, 16, 0)),
    ("AutoencoderKLCogVideoX", {"latent_channels": 16, "block_out_channels": FOUR}, (16, 8, 16, 0)),
]


@pytest.mark.parametrize(("name", "config", "expected"), PUBLISHED)
def test_shape_of_published_models(name, config, expected):
    shape = shape_of(family_of(name, ""), {"_class_name": name, **config}, "")
    assert (shape.channels, shape.factor, shape.multiple, shape.frame_step) == expected


@pytest.mark.parametrize("name", ["AutoencoderKLWan", "AutoencoderKLLTXVideo", "AutoencoderKLFlux2"])
def test_a_model_without_the_statistics_of_its_class_is_rejected(name):
    with pytest.raises(UnsupportedModelError, match=f"lacks mean and std of its latents, which {name} needs"):
        normalization_of(FAMILIES[name], {"scaling_factor": 1.0}, {}, "")


@pytest.mark.parametrize("config", [{}, {"latent_channels": 4}, {"latent_channels": 4, "ch_mult": []}])
def test_a_class_without_sizes_is_rejected(config):
    with pytest.raises(UnsupportedModelError, match="does not say how large a latent is"):
        shape_of(GENERIC, {"_class_name": "AutoencoderX", **config}, "")


@pytest.mark.parametrize("colors", [1, 4, 12])
def test_images_must_be_rgb(colors):
    config = {"_class_name": "AutoencoderKL", "latent_channels": 4, "block_out_channels": FOUR, "in_channels": colors}
    with pytest.raises(UnsupportedModelError, match=f"{colors} input channels does not take RGB"):
        shape_of(FAMILIES["AutoencoderKL"], config, "")


def test_identity_holds_the_config_that_encode_uses():
    config = {"_class_name": "AutoencoderKL", "latent_channels": 4}
    same = {"scaling_factor": 9.0, "latents_mean": [1.0], "up_block_types": ["A"], "_diffusers_version": "1"}
    same |= {"use_quant_conv": True, "mid_block_add_attention": True, "sample_size": 512}
    for field, value in same.items():
        assert config_hash(config) == config_hash(config | {field: value}), field
    for field, value in {"use_quant_conv": False, "act_fn": "relu", "patch_size": 2, "norm_eps": 0.5}.items():
        assert config_hash(config) != config_hash(config | {field: value}), field
    assert config_hash(config, tiling=True) != config_hash(config | {"sample_size": 512}, tiling=True)


def test_every_diffusers_autoencoder_is_known():
    import diffusers

    names = [name for name in dir(diffusers) if name.startswith("Autoencoder") or name in UNSUPPORTED]
    assert len(names) > 15
    for name in (*names, "AutoencoderOfTomorrowAudio", "UNet2DConditionModel", ""):
        if name in UNSUPPORTED or name.endswith("Audio") or not name.startswith("Autoencoder"):
            with pytest.raises(UnsupportedModelError, match=f"{name} is not an image encoder"):
                family_of(name, "config.json")
        else:
            assert family_of(name, "config.json") in (*FAMILIES.values(), GENERIC)


@pytest.mark.parametrize("name", [*FAMILIES, "AutoencoderKLCosmos"])
def test_tiles_are_those_of_the_class(name, tiny, images):
    """Tiles smaller than an image change the latents."""
    changes = {}
    if name == "AutoencoderTiny":  # its tiles assume a factor of four levels
        sides = ("encoder_block_out_channels", "decoder_block_out_channels")
        blocks = ("num_encoder_blocks", "num_decoder_blocks")
        changes = dict.fromkeys(sides, (8,) * 4) | dict.fromkeys(blocks, (1,) * 4)
    description = described_model(tiny(name, **changes), storage_dtype="float32", tiling=True)
    encoder = VaeEncoder(description, choose_device("cpu"))
    (module,) = encoder._modules.values()
    assert module.use_tiling
    assert is_finite(encoder.encode(images))
