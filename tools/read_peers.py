"""Other ways to keep tensors for training, written and read the way their own users do.

Decides which formats the loader is compared with and how each is used: a file per sample (safetensors, ``.npz``,
``.pt``) behind torch's ``DataLoader``; MDS, litdata and webdataset with the loader and shuffle they bring; Hugging
Face datasets, Lance and tensordict by lists of rows. ``DataLoader`` and its like come with 0 and with 2 workers.
Each hands over batches (B, bytes) of uint8 in one contiguous piece, so that nobody is measured on a view.
Order: those in :data:`OWN_ORDER` shuffle by themselves and take from a plan only whether it is sequential; the
others serve its rows. webdataset can only read on: its shuffle is a buffer over shards in another order.
Cost: the payloads on disk once for each format. None of the libraries is a dependency of this project; what is not
installed is left out, and :func:`left_out` says why. All of them, on top of this project (``make setup``):

    pip install -c constraints.txt datasets pylance tensordict webdataset litdata mosaicml-streaming

``mosaicml-streaming`` and ``litdata`` ask for torchvision, which there may be no build of for the torch in use, and
the former for an older numpy. Then ``pip install --no-deps`` both, and of their needs ``lightning-utilities obstore
boto3 tifffile transformers brotli zstd python-snappy catalogue``; the classes for images, the only ones of MDS that
touch torchvision, are left out here. Workers of MDS (0.13.0) need ``filelock<3.20``: 3.32 refuses after a fork.
"""

from __future__ import annotations

import importlib
import io
import sys
import tarfile
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, Dataset, default_collate

Plan = list[list[int]]
"""Rows of each batch, all of one length."""
Epoch = Callable[[Plan], Iterator[Any]]
"""Batches of the rows of a plan."""
Shape = tuple[int, int]
"""Samples, bytes of each."""

NAME = "latents"
SHARD_BYTES = 64 << 20
"""Of a tar, an MDS shard, a litdata chunk."""
SHUFFLE_BUFFER = 1000
"""What webdataset's own examples use; less where the data set is small, so that the buffer does not hold it all."""
WORKERS = (0, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A format: its writer and its readers."""

    library: str
    """Module that must be importable."""
    write: Callable[[Path, NDArray[np.uint8]], None]
    """Write into a new folder."""
    open: Callable[[Path, Shape, int], dict[str, Epoch]]
    """Readers by variant; nothing is opened before the first epoch."""


def peers(
    folder: Path, payloads: NDArray[np.uint8], batch: int, *, formats: Collection[str] | None = None
) -> dict[str, Epoch]:
    """Every peer whose library is there, on a copy of the payloads of its own.

    Args:
        folder: Where the copies are; a format that was written there before is used as it is.
        payloads: (N, bytes) what to store; of formats that are there already only the shape counts.
        batch: Rows of a batch, for those that make batches by themselves.
        formats: Names of :data:`PEERS`; by default all.

    Returns:
        Name -> function from a plan to an iterator of (batch, bytes) uint8 tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Epoch] = {}
    for name, peer in PEERS.items():
        if formats is not None and name not in formats:
            continue
        if _why_not(peer.library):
            continue
        place = folder / name.replace(" ", "-")
        if not place.exists():
            peer.write(place, payloads)
        shape = payloads.shape[0], payloads.shape[1]
        found |= {f"{name}, {variant}": epoch for variant, epoch in peer.open(place, shape, batch).items()}
    return found


def left_out() -> dict[str, str]:
    """Map peers that cannot run here to the reason."""
    reasons = {name: _why_not(peer.library) for name, peer in PEERS.items()}
    return {name: reason for name, reason in reasons.items() if reason}


def versions() -> dict[str, str]:
    """Return the version of every participating library."""
    libraries = sorted({peer.library for peer in PEERS.values() if not _why_not(peer.library)})
    return {library: str(getattr(_library(library), "__version__", "?")) for library in libraries}


def is_sequential(plan: Plan) -> bool:
    """True if a plan reads the rows in storage order."""
    rows = [row for rows in plan for row in rows]
    return rows == sorted(rows)


@cache
def _why_not(library: str) -> str:
    try:
        _library(library)
    except (ImportError, RuntimeError) as error:  # RuntimeError: built for another torch
        return f"{library}: {error}"
    return ""


def _library(name: str) -> Any:
    """Import a library when it is needed: imports take seconds, and most are missing."""
    if name == "streaming":
        try:
            importlib.import_module("torchvision")
        except (ImportError, RuntimeError):
            sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    return importlib.import_module(name)


def _per_worker_count(loader: Callable[[Plan, int], Iterator[Any]]) -> dict[str, Epoch]:
    def with_workers(workers: int) -> Epoch:
        return lambda plan: loader(plan, workers)

    return {f"{workers} workers": with_workers(workers) for workers in WORKERS}


# a file per sample


@dataclass(frozen=True, slots=True)
class Files(Dataset[torch.Tensor]):
    """Write one file per sample, as trainers' caches do."""

    folder: Path
    suffix: str
    load: Callable[[Path], torch.Tensor]

    def __getitem__(self, row: int) -> torch.Tensor:
        """(bytes,) of one sample."""
        return self.load(self.folder / f"{row:08}{self.suffix}")


def load_safetensors(path: Path) -> torch.Tensor:
    loaded: torch.Tensor = load_file(path)[NAME]
    return loaded


def save_safetensors(path: Path, payload: NDArray[np.uint8]) -> None:
    save_file({NAME: torch.from_numpy(payload)}, path)


def load_npz(path: Path) -> torch.Tensor:
    with np.load(path) as arrays:
        return torch.from_numpy(arrays[NAME])


def save_npz(path: Path, payload: NDArray[np.uint8]) -> None:
    np.savez(path, latents=payload)


def load_pt(path: Path) -> torch.Tensor:
    # The package never unpickles. This measures the peer's own way on files of this tool.
    loaded: torch.Tensor = torch.load(path, weights_only=True)
    return loaded


def save_pt(path: Path, payload: NDArray[np.uint8]) -> None:
    torch.save(torch.from_numpy(payload.copy()), path)  # a view would be saved with its whole array


def files(suffix: str, save: Callable[[Path, NDArray[np.uint8]], None], load: Callable[[Path], torch.Tensor]) -> Peer:
    """Read a file per sample with torch's DataLoader."""

    def write(folder: Path, payloads: NDArray[np.uint8]) -> None:
        folder.mkdir()
        for row, payload in enumerate(payloads):
            save(folder / f"{row:08}{suffix}", payload)

    def open_(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
        dataset = Files(folder, suffix, load)
        return _per_worker_count(
            lambda plan, workers: iter(DataLoader(dataset, batch_sampler=plan, num_workers=workers))
        )

    return Peer(library="safetensors" if suffix == ".safetensors" else "torch", write=write, open=open_)


def as_batch(samples: list[dict[str, bytes]]) -> torch.Tensor:
    """Copy once, into the batch (in a worker: into fresh memory, copied again)."""
    return torch.from_numpy(np.stack([np.frombuffer(sample[NAME], np.uint8) for sample in samples]))


def write_mds(folder: Path, payloads: NDArray[np.uint8]) -> None:
    writer = _library("streaming").MDSWriter
    with writer(out=str(folder), columns={NAME: "bytes"}, size_limit=SHARD_BYTES) as out:
        for payload in payloads:
            out.write({NAME: payload.tobytes()})


def open_mds(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    @cache
    def dataset(workers: int) -> Any:
        """Open one per number of workers, each through its own link: a folder cannot be opened twice."""
        alias = folder.with_name(f"{folder.name}-{workers}")
        if not alias.exists():
            alias.symlink_to(folder.name)
        return _library("streaming").StreamingDataset(local=str(alias), batch_size=batch, num_canonical_nodes=1)

    def serve(plan: Plan, workers: int) -> Iterator[Any]:
        chosen = dataset(workers)
        chosen.shuffle = not is_sequential(plan)
        yield from _library("streaming").StreamingDataLoader(
            chosen, batch_size=batch, num_workers=workers, collate_fn=as_batch, drop_last=True
        )

    return _per_worker_count(serve)


def write_litdata(folder: Path, payloads: NDArray[np.uint8]) -> None:
    writer = importlib.import_module("litdata.streaming.writer").BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    for row, payload in enumerate(payloads):
        writer[row] = torch.from_numpy(payload)
    writer.done()
    writer.merge()


def open_litdata(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    @cache
    def dataset(shuffle: bool) -> Any:
        return _library("litdata").StreamingDataset(str(folder), shuffle=shuffle, drop_last=True)

    def serve(plan: Plan, workers: int) -> Iterator[Any]:
        yield from _library("litdata").StreamingDataLoader(
            dataset(not is_sequential(plan)), batch_size=batch, num_workers=workers, drop_last=True
        )

    return _per_worker_count(serve)


def write_tars(folder: Path, payloads: NDArray[np.uint8]) -> None:
    folder.mkdir()
    per_shard = max(1, min(SHARD_BYTES // payloads.shape[1], -(-len(payloads) // max(WORKERS))))
    for number, start in enumerate(range(0, len(payloads), per_shard)):
        with tarfile.open(folder / f"{number:06}.tar", "w") as tar:
            for row in range(start, min(start + per_shard, len(payloads))):
                member = tarfile.TarInfo(f"{row:08}.bin")
                member.size = payloads.shape[1]
                tar.addfile(member, io.BytesIO(payloads[row].tobytes()))


def from_bin(sample: dict[str, bytes]) -> dict[str, bytes]:
    return {NAME: sample["bin"]}


def open_tars(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    buffer = min(SHUFFLE_BUFFER, shape[0] // 8)

    def serve(plan: Plan, workers: int) -> Iterator[Any]:
        wds = _library("webdataset")
        shards = sorted(map(str, folder.iterdir()))
        shuffle = 0 if is_sequential(plan) else buffer
        dataset = wds.WebDataset(shards, shardshuffle=len(shards) if shuffle else False)
        dataset = dataset.shuffle(shuffle, initial=shuffle).map(from_bin)
        if workers:
            dataset = dataset.batched(batch, collation_fn=as_batch, partial=False)
            yield from wds.WebLoader(dataset, batch_size=None, num_workers=workers)
        else:
            yield from dataset.batched(batch, collation_fn=as_batch, partial=False)

    return _per_worker_count(serve)


# Arrow: Hugging Face datasets and Lance


def arrow_table(payloads: NDArray[np.uint8], *, binary: bool) -> Any:
    """Write one column of equal-length values or of bytes."""
    arrow = importlib.import_module("pyarrow")
    flat = arrow.py_buffer(np.ascontiguousarray(payloads).reshape(-1))
    count, size = payloads.shape
    if binary:
        offsets = arrow.py_buffer(np.arange(0, (count + 1) * size, size, dtype=np.int64))
        column = arrow.Array.from_buffers(arrow.large_binary(), count, [None, offsets, flat])
    else:
        values = arrow.Array.from_buffers(arrow.uint8(), count * size, [None, flat])
        column = arrow.FixedSizeListArray.from_arrays(values, size)
    return arrow.table({NAME: column})


def tensor_of(column: Any, size: int) -> torch.Tensor:
    """Copy (B, size) of a column of equal-length lists; Arrow's memory is read-only."""
    values = column.combine_chunks().flatten().to_numpy(zero_copy_only=True)
    return torch.from_numpy(values.reshape(-1, size).copy())


def write_datasets(folder: Path, payloads: NDArray[np.uint8]) -> None:
    library = _library("datasets")
    library.disable_progress_bars()
    for kind in ("torch", "arrow"):
        library.Dataset(arrow_table(payloads, binary=kind == "arrow")).save_to_disk(folder / kind)


def first_column(samples: Any) -> torch.Tensor:
    """Collate rows that are one dictionary per sample."""
    stacked: torch.Tensor = default_collate(samples)[NAME]
    return stacked


def open_datasets(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    @cache
    def dataset(kind: str) -> Any:
        library = _library("datasets")
        options = {"dtype": torch.uint8} if kind == "torch" else {}  # otherwise eight bytes each
        return library.load_from_disk(folder / kind).with_format(kind, **options)

    def arrow(plan: Plan) -> Iterator[Any]:
        for rows in plan:
            values = dataset("arrow")[rows][NAME]
            yield as_batch([{NAME: value.as_buffer()} for value in values])

    def torch_format(plan: Plan, workers: int) -> Iterator[Any]:
        yield from DataLoader(dataset("torch"), batch_sampler=plan, num_workers=workers, collate_fn=first_column)

    return {"binary in arrow format": arrow} | {
        f"torch format, {name}": epoch for name, epoch in _per_worker_count(torch_format).items()
    }


def write_lance(folder: Path, payloads: NDArray[np.uint8]) -> None:
    _library("lance").write_dataset(arrow_table(payloads, binary=False), str(folder))


def open_lance(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    @cache
    def dataset() -> Any:
        return _library("lance").dataset(str(folder))

    def take(plan: Plan) -> Iterator[Any]:
        for rows in plan:
            yield tensor_of(dataset().take(rows, columns=[NAME])[NAME], shape[1])

    return {"take": take}  # no workers: it may not be forked, and its spawn loader makes lists of numbers


# tensordict


def write_tensordict(folder: Path, payloads: NDArray[np.uint8]) -> None:
    made = _library("tensordict").TensorDict({NAME: torch.from_numpy(payloads)}, batch_size=[len(payloads)])
    made.memmap(str(folder))


def memmap_column(samples: Any) -> torch.Tensor:
    """Collate rows that are one tensordict, in their own memory."""
    column = samples[NAME]
    return torch.empty(column.shape, dtype=column.dtype).copy_(column)


def open_tensordict(folder: Path, shape: Shape, batch: int) -> dict[str, Epoch]:
    @cache
    def dataset() -> Any:
        return _library("tensordict").TensorDict.load_memmap(str(folder))

    def rows_at_once(plan: Plan) -> Iterator[Any]:
        for rows in plan:
            yield dataset()[rows][NAME]

    def workers(plan: Plan) -> Iterator[Any]:
        yield from DataLoader(dataset(), batch_sampler=plan, num_workers=2, collate_fn=memmap_column)

    return {"memmap": rows_at_once, "memmap, 2 workers": workers}


PEERS: dict[str, Peer] = {
    "safetensors files": files(".safetensors", save_safetensors, load_safetensors),
    "npz files": files(".npz", save_npz, load_npz),
    "pt files": files(".pt", save_pt, load_pt),
    "MDS": Peer(library="streaming", write=write_mds, open=open_mds),
    "litdata": Peer(library="litdata", write=write_litdata, open=open_litdata),
    "webdataset": Peer(library="webdataset", write=write_tars, open=open_tars),
    "HF datasets": Peer(library="datasets", write=write_datasets, open=open_datasets),
    "lance": Peer(library="lance", write=write_lance, open=open_lance),
    "tensordict": Peer(library="tensordict", write=write_tensordict, open=open_tensordict),
}
OWN_ORDER = ("MDS", "litdata", "webdataset")
"""Peers that decide the order within an epoch by themselves."""
