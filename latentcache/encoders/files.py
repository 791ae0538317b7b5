"""Files of a model: find them by path or hub id, read JSON and safetensors, fingerprint weights. No torch.

Guarantee: a name that was meant as a path is never looked up on the network. Pickle weights are never chosen. A file
that is not complete safetensors is rejected by name with a remedy before any library opens it. The fingerprint covers
bytes, names, types and shapes of the tensors in use, so sharding, metadata and other tensors do not move it. Format:
huggingface/safetensors README (u64 little-endian header length, JSON header, tensor bytes without gaps).
Cost: weights are read once at disk speed, and not again while the files have the stat of an earlier build.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from latentcache.encoders.devices import first_line
from latentcache.errors import EncoderError, ModelNotFoundError, UnsupportedModelError, UsageError, option
from latentcache.fields.dtypes import as_floats
from latentcache.identity.content import StatMemo, canonical_json, json_hash
from latentcache.sources.known import racy
from latentcache.value import Value

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_STUB = re.compile(r"stub(?::delay_ms=([0-9]{1,6}))?")
_CHUNK_BYTES = 4 << 20
_FLOATS: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")
_OTHER_WEIGHTS = (*_PICKLES, ".gguf", ".msgpack", ".onnx", ".safetensors")
#: Ends of names of files, which no repository has.
_FILES = (*_OTHER_WEIGHTS, ".json")

_RESAVE = "save it as safetensors where you trust it, then give that folder: model.save_pretrained(FOLDER)"
_AGAIN = "download the file again and compare its size with the page it comes from"
_LFS = b"version https://git-lfs"
#: First bytes of files that are given by mistake: magic -> (kind of file, why it is unusable, remedy).
_MAGICS: tuple[tuple[tuple[bytes, ...], str, str, str], ...] = (
    ((b"GGUF",), "a GGUF file", "GGUF files have language and transformer models, not image encoders",
     "give the safetensors VAE that belongs to the model (its vae/ folder)"),
    ((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), "a pickle checkpoint",
     "pickle files can run code when they are opened", _RESAVE),
    ((_LFS,), "a git-lfs pointer", "git has not fetched the file itself", "run `git lfs pull` in its folder"),
    ((b"<!doctype", b"<html", b"<?xml"), "an HTML page", "a web page was saved in place of the file", _AGAIN),
)  # fmt: skip


class Wanted(Value):
    """Model, pipeline or tokenizer to look for."""

    argument: str
    """Argument that names it; a cache records the name in its provenance under the same key."""
    takes: str
    """Everything that the argument takes, for the error."""
    files: tuple[str, ...]
    """Patterns of the files to download."""


def find(
    name: str, wanted: Wanted, cached: Mapping[str, Any] = MappingProxyType({}), *, offline: bool = False
) -> tuple[Path, str]:
    """Find the file or folder of a path or hub id, and the commit of a hub id; raises ModelNotFoundError.

    A hub id that the provenance ``cached`` names keeps its commit. Else ``huggingface_hub`` asks the network for the
    newest one, and completes a folder that other tools downloaded in part; without a network it uses the local hub
    cache. ``offline``: nothing is downloaded.
    """
    path = expanded(name)
    if path.exists():
        return path, ""
    if not is_hub_id(name):
        raise ModelNotFoundError(
            "no such file or folder",
            argument=wanted.argument,
            value=name,
            where=str(path.absolute()),
            fix=f"check the path; {option(wanted.argument)} takes {wanted.takes}",
        )
    revision = str(cached.get("revision", "")) if cached.get(wanted.argument) == name else ""
    folder = download(name, wanted, revision=revision, offline=offline)
    return folder, folder.name if folder.parent.name == "snapshots" else ""


def download(name: str, wanted: Wanted, *, revision: str = "", offline: bool = False) -> Path:
    """Download a hub id into the local hub cache and return its folder; arguments and errors as of :func:`find`."""
    # Half a second that only users of a hub id should pay.
    from huggingface_hub import snapshot_download

    files = list(wanted.files)
    try:
        folder = snapshot_download(name, revision=revision or None, allow_patterns=files, local_files_only=offline)
    except Exception as error:
        by_hand = f"`hf download {name} --local-dir FOLDER` where there is a network, then give FOLDER"
        raise ModelNotFoundError(
            "not in the local hub cache" + ("" if offline else ", and it cannot be downloaded"),
            argument=wanted.argument,
            value=name,
            where=f"https://huggingface.co/{name}",
            why=first_line(error),
            fix=f"{by_hand}; for a closed repository accept its terms on that page and run `hf auth login` before",
        ) from error
    return Path(folder)


def is_hub_id(name: str) -> bool:
    """True if a name that is not a path here could be ``org/name``."""
    if _HUB_ID.fullmatch(name) is None or name.startswith((".", "~")):
        return False
    return Path(name).suffix not in _FILES and not Path(Path(name).parts[0]).is_dir()


def expanded(name: str) -> Path:
    """Put the home folder in place of ``~``; a name of no user stays as it is."""
    return Path(os.path.expanduser(name))  # noqa: PTH111 - Path.expanduser fails without such a user


def recorded_name(name: str) -> str:
    """Make a path absolute, so that a later build finds the model by the name in the cache."""
    path = expanded(name)
    return str(path.resolve()) if path.exists() else name


def is_stub(name: str) -> bool:
    """True for a documented encoder without torch: ``stub[:delay_ms=N]``."""
    return name.partition(":")[0] == "stub"


def stub_delay(name: str, argument: str) -> int:
    """The N of ``stub:delay_ms=N``."""
    match = _STUB.fullmatch(name)
    if match is None:
        fix = "use stub or stub:delay_ms=20"
        raise UsageError("unknown option of the stub", argument=argument, value=name, fix=fix)
    return int(match[1] or 0)


class TensorInfo(NamedTuple):
    """Where a tensor is, and of which type and shape."""

    path: Path
    name: str
    """In the file."""
    dtype: str
    """In the spelling of safetensors: F32, BF16, ..."""
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""
    num_bytes: int


Tensors = Mapping[str, TensorInfo]
"""Tensors of one model by name."""


def read_json(path: Path | str) -> dict[str, Any]:
    """Read a JSON object; raises UnsupportedModelError, or EncoderError if it cannot be read."""
    path = Path(path)
    raw = _read(path)
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        _check_magic(path, raw)
        raise _unsupported(path, "not JSON", str(error), "download the file again") from error
    if not isinstance(value, dict):
        raise _unsupported(path, "not a JSON object", f"it is a {type(value).__name__}", "download the file again")
    return value


def weights_in(folder: Path, name: str) -> tuple[Path, ...]:
    """Find the weights in a model folder: the file that its library calls ``name``, else the shards of an index."""
    if (folder / name).is_file():
        return (folder / name,)
    index = folder / f"{name}.index.json"
    if index.is_file():
        return _shards_of(index)
    weights = sorted(path for path in folder.iterdir() if path.suffix in _OTHER_WEIGHTS)
    has_pickles = any(path.suffix in _PICKLES for path in weights)
    kind = "only pickle weights" if has_pickles else f"no {name}"
    named = ", ".join(path.name for path in weights[:3])
    usable = [str(path) for path in weights if path.suffix == ".safetensors" and "pytorch" in name]
    raise UnsupportedModelError(
        f"{folder} has {kind}" + (f" ({named})" if weights else ""),
        where=str(folder),
        why="pickle files can run code when they are opened" if has_pickles else "no other file is taken for it",
        fix=f"give the weights by name: {option('model', usable[0])}" if usable else _RESAVE,
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """List the tensors of a safetensors file; raises UnsupportedModelError, or EncoderError if it cannot be read."""
    from safetensors import SafetensorError, safe_open  # checks of recorded recipes read no weights

    head = _read(path, 64)
    _check_magic(path, head)
    if head[8:9] != b"{":
        raise _unsupported(path, "not a safetensors file", "it does not begin with a header", _RESAVE)
    try:
        with safe_open(path, framework="numpy"):  # checks the header, and that the tensors fill the file
            pass
    except SafetensorError as error:
        raise _unsupported(path, "a damaged safetensors file", str(error), _AGAIN) from error
    data = 8 + int.from_bytes(head[:8], "little")
    header = json.loads(_read(path, data)[8:])
    header.pop("__metadata__", None)
    return {
        name: TensorInfo(path, name, entry["dtype"], tuple(entry["shape"]), data + begin, end - begin)
        for name, entry in header.items()
        for begin, end in (entry["data_offsets"],)
    }


def read_headers(paths: Iterable[Path | str]) -> dict[str, TensorInfo]:
    """List the tensors in all shards of a model; raises as :func:`read_header`."""
    return {name: info for path in paths for name, info in read_header(Path(path)).items()}


def fingerprint(tensors: Tensors) -> str:
    """Hex of xxh3-128 over the canonical JSON of ``[name, dtype, shape, xxh3-64 in hex]``, in name order."""
    described = []
    for name, info in sorted(tensors.items()):
        digest = xxhash.xxh3_64()
        for chunk in _chunks(info):
            digest.update(chunk)
        described.append([name, info.dtype, list(info.shape), digest.hexdigest()])
    return xxhash.xxh3_128_hexdigest(canonical_json(described))


def fingerprint_memo(tensors: Tensors, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fingerprint tensors, unless the memo ``known`` of an earlier build has the same files; return the new memo."""
    names = json_hash(sorted(tensors)).hex()
    files = sorted({info.path for info in tensors.values()})
    memos = [StatMemo.of(path.stat(), seen_ns=time.time_ns()) for path in files]
    stats = [[str(path.resolve()), *memo.identity] for path, memo in zip(files, memos, strict=True)]
    if known is not None and (known.get("names"), known.get("stats")) == (names, stats):
        return dict(known)
    # A file so young may change again without another stat.
    kept = [] if racy(np.array(memos, dtype=np.uint64)).any() else stats
    return {"fingerprint": fingerprint(tensors), "names": names, "stats": kept}


def read_tensor(info: TensorInfo) -> NDArray[np.float32]:
    """Read a small tensor as float32, in its own shape."""
    if info.dtype not in _FLOATS:
        raise _unsupported(info.path, "a model of another data type", f"a tensor is {info.dtype}", _RESAVE)
    return as_floats(np.frombuffer(b"".join(_chunks(info)), _FLOATS[info.dtype])).reshape(info.shape)


def _read(path: Path, size: int = -1) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        problem = f"{path.name} cannot be read"
        raise EncoderError(problem, where=str(path), why=str(error), fix=f"ls -l {path}") from error


def _check_magic(path: Path, head: bytes) -> None:
    """Name the kind of a file that is given by mistake."""
    if not head:
        raise _unsupported(path, "empty", "it has no bytes", _AGAIN)
    start = head[:64].lstrip().lower()
    for magics, kind, why, fix in _MAGICS:
        if head.startswith(magics) or start.startswith(magics):
            raise _unsupported(path, kind, why, fix)


def _shards_of(index: Path) -> tuple[Path, ...]:
    """List the files that an index names, sorted; all are in its folder."""
    try:
        names = sorted(set(read_json(index)["weight_map"].values()))
        paths = tuple(index.parent / name for name in names)
    except (TypeError, KeyError, AttributeError) as error:
        raise _unsupported(index, "not an index of weights", f"no weight_map: {error}", _AGAIN) from error
    for path in paths:
        if path.parent != index.parent or not path.is_file():
            raise _unsupported(index, "an incomplete model", f"shard {path.name} is missing", _AGAIN)
    return paths


def _chunks(info: TensorInfo) -> Iterator[bytes]:
    left = info.num_bytes
    with info.path.open("rb") as file:
        file.seek(info.start)
        while left > 0 and (chunk := file.read(min(left, _CHUNK_BYTES))):
            left -= len(chunk)
            yield chunk
    if left > 0:
        raise _unsupported(info.path, "a damaged safetensors file", f"it lacks {left} bytes of a tensor", _AGAIN)


def _unsupported(path: Path, kind: str, why: str, fix: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{path.name} is {kind}", where=str(path), why=why, fix=fix)
