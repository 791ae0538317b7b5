"""Numbers of published models from their configurations, and what is identity and what is not."""

import pytest

from latentcache.encoders.vae.config_fields import config_hash, normalization_of, shape_of
from latentcache.encoders.vae.families import FAMILIES, GENERIC, family_of
from latentcache.errors import UnsupportedModelError
from latentcache.fields.latents import Normalization

FOUR = [128, 256, 512, 512]
#: Configuration fields of published models -> (channels, factor, multiple).
PUBLISHED = [
    ("AutoencoderKL", {"block_out_channels": FOUR, "latent_channels": 4}, (4, 8, 8)),
    ("AutoencoderKL", {"block_out_channels": FOUR, "latent_channels": 16}, (16, 8, 16)),
    ("AutoencoderTiny", {"latent_channels": 4}, (4, 8, 8)),
    ("AutoencoderTiny", {"latent_channels": 16}, (16, 8, 16)),
    ("AutoencoderDC", {}, (32, 32, 32)),
    ("AutoencoderKLQwenImage", {}, (16, 8, 16)),
    ("AutoencoderKLWan", {}, (16, 8, 16)),
    ("AutoencoderKLWan", {"z_dim": 48, "patch_size": 2, "in_channels": 12}, (48, 16, 32)),
    ("AutoencoderKLFlux2", {}, (32, 8, 16)),
    ("AutoencoderKLHunyuanVideo", {}, (16, 8, 16)),
    ("AutoencoderKLLTXVideo", {}, (128, 32, 32)),
    ("AutoencoderKLHunyuanVideo15", {"latent_channels": 32, "spatial_compression_ratio": 16}, (32, 16, 32)),
    (
        "AutoencoderKLMochi",
        {"latent_channels": 12, "in_channels": 15, "encoder_block_out_channels": FOUR},
        (12, 8, 16),
    ),
    ("AutoencoderKLCogVideoX", {"latent_channels": 16, "block_out_channels": FOUR}, (16, 8, 16)),
]


@pytest.mark.parametrize(("name", "config", "expected"), PUBLISHED)
def test_shape_of_published_models(name, config, expected):
    facts = shape_of(family_of(name, ""), {"_class_name": name, **config}, "")
    assert (facts.channels, facts.factor, facts.multiple) == expected


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("AutoencoderKL", {}, Normalization(kind="scale-shift", scale=0.18215)),
        (
            "AutoencoderKL",
            {"scaling_factor": 0.3611, "shift_factor": 0.1159},
            Normalization(kind="scale-shift", scale=0.3611, shift=0.1159),
        ),
        (
            "AutoencoderKL",
            {"scaling_factor": 0.5, "latents_mean": [1, 2, 3, 4], "latents_std": [4.0, 3.0, 2.0, 1.0]},
            Normalization(kind="mean-std", scale=0.5, mean=(1, 2, 3, 4), std=(4, 3, 2, 1)),
        ),
        ("AutoencoderDC", {"scaling_factor": 0.41407}, Normalization(kind="scale-shift", scale=0.41407)),
        ("AutoencoderKLMagvit", {}, Normalization(kind="none")),
    ],
)
def test_normalization_from_the_configuration(name, config, expected):
    assert normalization_of(family_of(name, ""), config, {}) == expected


def test_statistics_per_frame_are_those_of_the_first_frame():
    config = {"_class_name": "AutoencoderKLCosmos", "latent_channels": 2, "scaling_factor": 1.0}
    config |= {"latents_mean": [1.0, 9.0, 9.0, 2.0, 9.0, 9.0], "latents_std": [3.0, 9.0, 9.0, 4.0, 9.0, 9.0]}
    assert normalization_of(GENERIC, config, {}) == Normalization(kind="mean-std", mean=(1, 2), std=(3, 4))
    wrong = config | {"latents_mean": [1.0] * 5}
    assert len(normalization_of(GENERIC, wrong, {}).mean) == 5


@pytest.mark.parametrize("config", [{}, {"latent_channels": 4}, {"latent_channels": 4, "ch_mult": []}])
def test_a_generic_class_without_sizes_is_rejected(config):
    with pytest.raises(UnsupportedModelError, match="does not say how large a latent is"):
        shape_of(GENERIC, {"_class_name": "AutoencoderX", **config}, "")


@pytest.mark.parametrize("colors", [1, 4, 12])
def test_images_must_be_rgb(colors):
    config = {"_class_name": "AutoencoderKL", "block_out_channels": FOUR, "in_channels": colors}
    with pytest.raises(UnsupportedModelError, match=f"{colors} input channels does not take RGB"):
        shape_of(FAMILIES["AutoencoderKL"], config, "")


def test_a_default_spelled_out_is_the_same_encoder():
    family = FAMILIES["AutoencoderKL"]
    spelled = {"_class_name": "AutoencoderKL", **family.encode, "act_fn": "silu"}
    assert config_hash(family, {"_class_name": "AutoencoderKL"}) == config_hash(family, spelled)


@pytest.mark.parametrize("family", [*FAMILIES.values(), GENERIC], ids=lambda f: f.name or "generic")
def test_read_time_fields_are_no_identity(family):
    config = {"_class_name": family.name, "latent_channels": 4}
    for field, value in [("scaling_factor", 9.0), ("shift_factor", 1.0), ("latents_mean", [1.0])]:
        assert config_hash(family, config) == config_hash(family, config | {field: value})


@pytest.mark.parametrize("family", [*FAMILIES.values(), GENERIC], ids=lambda f: f.name or "generic")
def test_every_encode_field_is_identity(family):
    config = {"_class_name": family.name}
    for field in family.encode or {"norm_eps": 0}:
        assert config_hash(family, config) != config_hash(family, config | {field: "other"}), field
