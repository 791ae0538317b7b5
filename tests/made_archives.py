"""The same images as a folder, a tar, parquet files and a saved data set."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

Images = Mapping[str, tuple[bytes, str]]
"""Stem -> bytes and caption."""


def png(value: int, height: int = 64, width: int = 64) -> bytes:
    pixels = np.full((height, width, 3), value, dtype=np.uint8)
    pixels[: height // 2, : width // 3] = (value * 7) % 256
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def some_images(count: int = 6) -> dict[str, tuple[bytes, str]]:
    sizes = ((64, 64), (64, 96), (96, 64))
    return {f"{n:04d}": (png(20 + 9 * n, *sizes[n % 3]), f"caption {n}" if n != 2 else "") for n in range(count)}


def as_folder(root: Path, images: Images) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for stem, (data, text) in images.items():
        (root / f"{stem}.png").write_bytes(data)
        if text:
            (root / f"{stem}.txt").write_text(text)


def as_tars(root: Path, images: Images, each: int = 4) -> None:
    root.mkdir(parents=True, exist_ok=True)
    stems = list(images)
    for number, first in enumerate(range(0, len(stems), each)):
        members = []
        for stem in stems[first : first + each]:
            data, text = images[stem]
            members += [(f"{stem}.png", data), *([(f"{stem}.txt", text.encode())] if text else [])]
        write_tar(root / f"shard-{number:03d}.tar", members)


def write_tar(path: Path, members: list[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def rows_of(images: Images) -> pa.Table:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = [{"bytes": data, "path": f"{stem}.png"} for stem, (data, _) in images.items()]
    return pa.table({"image": pa.array(structs, kind), "text": [text or None for _, text in images.values()]})


def as_parquet(root: Path, images: Images) -> None:
    (root / "data").mkdir(parents=True, exist_ok=True)
    table = rows_of(images)
    for number in range(2):
        part = table.slice(number * 4, 4 if not number else None)
        pq.write_table(
            part, root / "data" / f"train-{number:05d}-of-00002.parquet", row_group_size=2, compression="zstd"
        )


def as_saved(root: Path, images: Images) -> None:
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    datasets.Dataset.from_list(rows_of(images).to_pylist(), features=features).save_to_disk(root, num_shards=2)


FORMS: Mapping[str, Callable[[Path, Images], Any]] = {
    "folder": as_folder,
    "tar": as_tars,
    "parquet": as_parquet,
    "saved": as_saved,
}
