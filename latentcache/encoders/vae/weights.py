"""Weights files as bytes: their format, their tensors, the encoder half and its fingerprint.

Guarantee: before any library opens it, a file that is not complete safetensors (GGUF, pickle, HTML, a git-lfs
pointer, half a download) is rejected by name with a remedy. The fingerprint covers tensor bytes, names, types and
shapes of the encoder half, so sharding, metadata and the decoder do not move it; the same encoder has the same names
in a diffusers folder, in an original latent-diffusion file and inside a full checkpoint. Format:
huggingface/safetensors README (u64 little-endian header length, JSON header, tensor bytes without gaps). Names:
CompVis/latent-diffusion ``ldm/modules/diffusionmodules/model.py`` (class Encoder) and diffusers
``models/autoencoders/vae.py``. Cost: reading the encoder half once at disk speed. No torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.errors import EncoderError, UnsupportedModelError
from latentcache.fields.dtypes import as_floats, finite
from latentcache.identity.content import canonical_json
from latentcache.value import Value

#: Longest header accepted, the limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
_CHUNK_BYTES = 4 << 20
_ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "C64": 64} | {
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
}
_FLOATS: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}

_RESAVE = "save it as safetensors where you trust it, then give that folder: model.save_pretrained(FOLDER)"
_AGAIN = "download the file again and compare its size with the page it comes from"
#: First bytes of files that are given by mistake: magic -> (kind of file, why it is unusable, remedy).
_MAGICS: tuple[tuple[tuple[bytes, ...], str, str, str], ...] = (
    ((b"GGUF",), "a GGUF file", "GGUF files have language and transformer models, not image encoders",
     "give the safetensors VAE that belongs to the model (its vae/ folder)"),
    ((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle checkpoint",
     "pickle files can run code when they are opened", _RESAVE),
    ((b"version https://git-lfs",), "a git-lfs pointer", "git has not fetched the file itself",
     "run `git lfs pull` in its folder"),
    ((b"<!doctype", b"<html", b"<?xml"), "an HTML page", "a web page was saved in place of the file", _AGAIN),
)  # fmt: skip
#: Prefixes under which checkpoints keep an autoencoder: the first that fits is taken off.
PREFIXES = ("first_stage_model.", "vae.", "")
#: Names of tensors that no encoder uses: the other half, and additions of training checkpoints.
_DECODER = ("decoder.", "post_quant_conv.", "loss.", "model_ema.")
_COUNTER = ".num_batches_tracked"

_LDM = (
    (re.compile(r"^encoder\.down\.(\d+)\.block\."), r"encoder.down_blocks.\1.resnets."),
    (re.compile(r"^encoder\.down\.(\d+)\.downsample\."), r"encoder.down_blocks.\1.downsamplers.0."),
    (re.compile(r"^encoder\.mid\.block_1\."), "encoder.mid_block.resnets.0."),
    (re.compile(r"^encoder\.mid\.block_2\."), "encoder.mid_block.resnets.1."),
    (re.compile(r"^encoder\.mid\.attn_1\.norm\."), "encoder.mid_block.attentions.0.group_norm."),
    (re.compile(r"^encoder\.mid\.attn_1\.proj_out\."), "encoder.mid_block.attentions.0.to_out.0."),
    (re.compile(r"^encoder\.mid\.attn_1\.([qkv])\."), r"encoder.mid_block.attentions.0.to_\1."),
    (re.compile(r"^encoder\.norm_out\."), "encoder.conv_norm_out."),
    (re.compile(r"\.nin_shortcut\."), ".conv_shortcut."),
    # Names that diffusers itself wrote before its version 0.17; it still reads them.
    (re.compile(r"(\.attentions\.0)\.query\."), r"\1.to_q."),
    (re.compile(r"(\.attentions\.0)\.key\."), r"\1.to_k."),
    (re.compile(r"(\.attentions\.0)\.value\."), r"\1.to_v."),
    (re.compile(r"(\.attentions\.0)\.proj_attn\."), r"\1.to_out.0."),
)
_ATTENTION_WEIGHT = re.compile(r"\.attentions\.0\.to_(q|k|v|out\.0)\.weight$")


class TensorInfo(Value):
    """Place of one tensor."""

    path: Path
    dtype: str
    """In the spelling of safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int


def sniff(path: Path) -> None:
    """Check by first bytes and size that a file is complete safetensors.

    Raises:
        UnsupportedModelError: Another kind of file, empty or cut short; named with a remedy.
        EncoderError: An unreadable file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise EncoderError(
            f"{path.name} cannot be read", where=str(path), why=str(error), fix=f"ls -l {path}"
        ) from error
    if not size:
        raise _unsupported(path, "empty", "it has no bytes", _AGAIN)
    start = head.lstrip().lower()
    for magics, kind, why, fix in _MAGICS:
        if head.startswith(magics) or start.startswith(magics):
            raise _unsupported(path, kind, why, fix)
    length = int.from_bytes(head[:8], "little")
    if size < 8 or head[8:9] not in (b"{", b""):
        raise _unsupported(path, "not a safetensors file", "it does not begin with a safetensors header", _RESAVE)
    if length > MAX_HEADER_BYTES:
        raise _unsupported(path, "not a safetensors file", f"its header would have {length} bytes", _RESAVE)
    if 8 + length > size:
        raise _truncated(path, 8 + length, size)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file by name.

    Raises:
        UnsupportedModelError: Not safetensors, cut short, or a header that contradicts itself.
    """
    sniff(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        tensors = {name: _info(path, 8 + length, entry) for name, entry in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _unsupported(path, "a damaged safetensors file", f"header: {error}", _AGAIN) from error
    end, size = max((t.start + t.num_bytes for t in tensors.values()), default=8 + length), path.stat().st_size
    if end > size:
        raise _truncated(path, end, size)
    if end < size:
        raise _unsupported(path, "a damaged safetensors file", f"{size - end} bytes belong to no tensor", _AGAIN)
    return tensors


def read_headers(paths: Iterable[Path]) -> dict[str, TensorInfo]:
    """Tensors of all shards of one model by name.

    Raises:
        UnsupportedModelError: As in :func:`read_header`, or one name is in two shards.
    """
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        for name, info in read_header(path).items():
            if name in tensors:
                raise _unsupported(path, "a damaged model", f"tensor {name} is in two shards", _AGAIN)
            tensors[name] = info
    return tensors


def shards_of(index: Path) -> tuple[Path, ...]:
    """Files that a ``*.safetensors.index.json`` names, in the order of their names.

    Raises:
        UnsupportedModelError: An unreadable index, or one that names a missing file or one in another folder.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        paths = tuple(index.parent / name for name in names)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unsupported(index, "not an index of weights", f"no weight_map: {error}", _AGAIN) from error
    for path in paths:
        if path.parent != index.parent or not path.is_file():
            raise _unsupported(index, "an incomplete model", f"shard {path.name} is missing", _AGAIN)
    return paths


def tensor_hashes(names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> list[list[Any]]:
    """``[name, dtype, shape, xxh3-64 in hex]`` of each tensor, in name order.

    Args:
        names: Name to hash under -> name in the file (:func:`latentcache.encoders.vae.weights.encoder_names`).
        tensors: Tensors by their name in the file.
    """
    return [[name, *_fact(name, tensors[names[name]])] for name in sorted(names)]


def fingerprint(names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> str:
    """Hex of xxh3-128 over the canonical JSON of :func:`tensor_hashes`."""
    return xxhash.xxh3_128_hexdigest(canonical_json(tensor_hashes(names, tensors)))


def not_finite(names: Mapping[str, str], tensors: Mapping[str, TensorInfo]) -> str:
    """Name in the file of the first tensor that holds infinity or NaN; empty if there is none.

    Args:
        names: As for :func:`tensor_hashes`.
        tensors: Tensors by their name in the file.
    """
    for name in names.values():
        kind = _FLOATS.get(tensors[name].dtype)
        for chunk in _chunks(tensors[name]) if kind else ():
            if not finite(np.frombuffer(chunk, kind)).all():
                return name
    return ""


def read_tensor(info: TensorInfo) -> NDArray[np.float32]:
    """One small tensor as float32, exact, in its own shape.

    Raises:
        UnsupportedModelError: It is not float32, float16 or bfloat16.
    """
    if info.dtype not in _FLOATS:
        raise _unsupported(info.path, "a model of another data type", f"a tensor is {info.dtype}", _RESAVE)
    with info.path.open("rb") as file:
        file.seek(info.start)
        values = np.frombuffer(file.read(info.num_bytes), _FLOATS[info.dtype])
    return as_floats(values).reshape(info.shape)


def _fact(name: str, info: TensorInfo) -> tuple[str, list[int], str]:
    digest = xxhash.xxh3_64()
    for chunk in _chunks(info):
        digest.update(chunk)
    return info.dtype, list(encoder_shape(name, info.shape)), digest.hexdigest()


def _chunks(info: TensorInfo) -> Iterator[bytes]:
    left = info.num_bytes
    with info.path.open("rb") as file:
        file.seek(info.start)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk
    if left > 0:
        raise _truncated(info.path, info.start + info.num_bytes, info.start + info.num_bytes - left)


def _info(path: Path, data_start: int, entry: Mapping[str, Any]) -> TensorInfo:
    """One header entry, checked: the bytes it spans are those its type and shape need."""
    (begin, end), shape, dtype = entry["data_offsets"], tuple(entry["shape"]), entry["dtype"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(f"offsets {begin}, {end} and shape {shape} are not sizes")
    if dtype not in _ITEM_BITS:
        raise ValueError(f"unknown type {dtype}")
    if end - begin != math.prod(shape) * _ITEM_BITS[dtype] // 8:
        raise ValueError(f"{end - begin} bytes for {dtype} of shape {shape}")
    return TensorInfo(path=path, dtype=dtype, shape=shape, start=data_start + begin, num_bytes=end - begin)


def _unsupported(path: Path, kind: str, why: str, fix: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path.name} is {kind}", where=str(path), why=why, fix=fix)


def _truncated(path: Path, expected: int, found: int) -> UnsupportedModelError:
    why = f"the header needs {expected} bytes, the file has {found}"
    return _unsupported(path, "cut short", why, _AGAIN)


def encoder_names(names: Iterable[str], *, ldm: bool) -> Mapping[str, str]:
    """Tensors of the encoder half: name in diffusers -> name in the file, sorted.

    Args:
        names: All tensor names of the weights.
        ldm: True if the class has an original layout that is translated.
    """
    listed = list(names)
    prefix = next(p for p in PREFIXES if not p or any(n.startswith(f"{p}encoder.") for n in listed))
    mine = {name.removeprefix(prefix): name for name in listed if name.startswith(prefix)}
    kept = {name: full for name, full in mine.items() if is_encoder(name)}
    return dict(sorted((_modern(name) if ldm else name, full) for name, full in kept.items()))


def is_encoder(name: str) -> bool:
    """True if ``encode`` uses a tensor: all but the decoder half and training counters."""
    return not name.startswith(_DECODER) and not name.endswith(_COUNTER)


def encoder_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape as diffusers has it: the original attention layers are 1x1 convolutions, there they are linear."""
    if _ATTENTION_WEIGHT.search(name) and shape[2:] == (1, 1):
        return shape[:2]
    return shape


def _modern(name: str) -> str:
    for pattern, replacement in _LDM:
        name = pattern.sub(replacement, name)
    return name
