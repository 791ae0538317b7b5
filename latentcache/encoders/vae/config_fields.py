"""Read a diffusers configuration: channels, factor, size multiple, normalization and identity of its latents.

Fields that move the bytes of ``encode`` are hashed into the identity; fields that only say how latents are read are
not, so a corrected scaling factor encodes nothing again.
Functions of a parsed ``config.json`` and, for some families, of a few small tensors in the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from latentcache.encoders.vae.families import Family
from latentcache.encoders.weights import Tensors, read_tensor
from latentcache.errors import EncoderError, UnsupportedModelError
from latentcache.fields.latents import Normalization
from latentcache.identity.content import json_hash
from latentcache.value import Value

Config = Mapping[str, Any]

#: Fields no encoder of a generic class can depend on; all its other fields enter the identity.
_READ_ONLY = {
    *("scaling_factor", "shift_factor", "latents_mean", "latents_std", "invert_scale_latents"),
    *("out_channels", "out_ch", "sample_size", "sample_height", "sample_width", "force_upcast", "dropout"),
    *("use_post_quant_conv", "upsample_match_channel", "timestep_conditioning", "num_dec_blocks"),
}
#: Color channels of Mochi: three, and twelve Fourier features that its ``encode`` makes of them.
_MOCHI_COLORS = 15
_DECODER_PREFIXES = ("_", "decoder_", "decode_", "up_", "upsample_", "layers_per_up_")


class LatentShape(Value):
    """Shape of a latent: ``channels``; ``factor`` pixels per cell; sides are multiples of ``multiple`` pixels.

    A clip has ``k * frame_step + 1`` frames; 0: images only.
    """

    channels: int
    factor: int
    multiple: int
    frame_step: int = 0


def shape_of(family: Family, config: Config, where: str) -> LatentShape:
    """Channels, factor and size multiple of a configuration."""
    patch = _number(_field(family, config, family.patch), default=1)
    factor, channels = (
        _ratio(family, config, family.factor),
        _number(_field(family, config, family.channels), default=0),
    )
    if factor < 1 or channels < 1 or patch < 1:
        raise UnsupportedModelError(
            f"the configuration of {_class(config)} does not say how large a latent is",
            where=where,
            why=f"looked for the fields: {family.channels}; {family.factor}",
            fix="use the config.json that was published with the model",
        )
    colors = _number(_field(family, config, family.colors), default=3)
    if colors not in (3, 3 * patch * patch, _MOCHI_COLORS):
        raise UnsupportedModelError(
            f"{_class(config)} with {colors} input channels does not take RGB images",
            where=where,
            fix="give the VAE that encodes the images of your model",
        )
    packs = family.packs_from is not None and channels >= family.packs_from
    return LatentShape(
        channels=channels,
        factor=factor * patch,
        multiple=factor * patch * (2 if packs else 1),
        frame_step=_ratio(family, config, family.frame_step),
    )


def config_hash(family: Family, config: Config, *, tiling: bool = False) -> str:
    """Hex hash of the class and of the fields that ``encode`` uses, defaults filled in.

    The size of a tile is part of the hash only if images are encoded in tiles.
    """
    if family.generic:
        names = [n for n in config if n not in _READ_ONLY and not n.startswith(_DECODER_PREFIXES)]
    else:
        names = list(family.encode)
    fields = {name: _plain(_field(family, config, name)) for name in names}
    if tiling:
        fields |= {f"tile.{name}": _plain(config.get(name)) for name in family.tile_fields}
    return json_hash({"class": _class(config), "fields": fields}).hex()


def normalization_of(family: Family, config: Config, tensors: Tensors) -> Normalization:
    """Normalization of this model's latents at read.

    Per-channel means win over a scale wherever a configuration has them, as in the diffusers pipelines:
    ``(z - mean) * scaling_factor / std``.
    """
    if family.normalization == "batch-norm":
        return _batch_norm(family, config, tensors)
    mean, std = _field(family, config, "latents_mean"), _field(family, config, "latents_std")
    scale, shift = (_field(family, config, name) for name in ("scaling_factor", "shift_factor"))
    # A generic class may have its statistics among the weights as well (LTX-2): its configuration has a scale of 1.
    if family.normalization == "buffers" or (family.generic and {"latents_mean", "latents_std"} <= tensors.keys()):
        mean, std = _values(tensors, "latents_mean").tolist(), _values(tensors, "latents_std").tolist()
    if family.generic and mean and std:
        channels = _number(_field(family, config, family.channels), default=0)
        mean, std = _first_frame(mean, channels), _first_frame(std, channels)
    if mean and std:
        return Normalization(kind="mean-std", mean=_floats(mean), std=_floats(std), scale=float(scale or 1.0))
    if scale is None and shift is None:
        return Normalization()
    return Normalization(kind="scale-shift", scale=float(scale or 1.0), shift=float(shift or 0.0))


def _batch_norm(family: Family, config: Config, tensors: Tensors) -> Normalization:
    """``(z - running_mean) / sqrt(running_var + eps)`` over 2x2 patches (diffusers pipeline_flux2.py)."""
    variance = _values(tensors, "bn.running_var").astype(np.float64) + _field(family, config, "batch_norm_eps")
    return Normalization(
        kind="batch-norm",
        mean=_floats(_values(tensors, "bn.running_mean").tolist()),
        std=_floats(np.sqrt(variance).tolist()),
        patch=_number(_field(family, config, "patch_size"), default=2),
    )


def _values(tensors: Tensors, name: str) -> np.ndarray[Any, Any]:
    if name not in tensors:
        raise EncoderError(
            f"the weights lack the tensor {name}",
            why="it defines the normalization of latents of this class",
            fix="download the weights again",
        )
    return read_tensor(tensors[name])


def _first_frame(values: Any, channels: int) -> Any:
    """One value per channel: Cosmos lists one per channel and frame (diffusers pipeline_cosmos_video2world.py)."""
    frames = len(values) // channels if channels > 0 and len(values) % channels == 0 else 1
    return values[:: frames or 1]


def _field(family: Family, config: Config, names: str) -> Any:
    """The first of some fields that has a value, else the class's default."""
    for name in names.split():
        if config.get(name) is not None:
            return config[name]
    return next((d[n] for n in names.split() for d in (family.encode, family.read) if n in d), None)


def _ratio(family: Family, config: Config, names: str) -> int:
    """A number is the ratio; a list of flags halves at each true one; other lists have one entry per level."""
    value = _field(family, config, names)
    if isinstance(value, list | tuple) and value:
        return 1 << (sum(value) if all(isinstance(v, bool) for v in value) else len(value) - 1)
    return _number(value, default=0)


def _number(value: Any, *, default: int) -> int:
    """A count from a configuration; the first of a list (patch sizes are written both ways)."""
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if value is None:
        return default
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _plain(value: Any) -> Any:
    """A value without floats and tuples, so that it has one spelling."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return repr(value) if isinstance(value, float) else value


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _class(config: Config) -> str:
    return str(config.get("_class_name", ""))
