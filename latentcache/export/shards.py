"""Export whole samples: a safetensors file for each, or shards for webdataset or mosaicml-streaming, with a README.

Formats: safetensors 0.8; WebDataset 1.0 (``webdataset/tariterators.py``), members of one sample share a name up to
the first dot.

MDS (mosaicml-streaming 0.13.0, ``base/format/mds/writer.py`` and ``encodings.py``) has no bfloat16 and no bool. A
shard is the number of samples, n + 1 offsets (uint32), its settings as JSON, and the samples. A sample is the bytes
of each column (uint32), then the columns. An array is a byte 4 * axes + log2 of the width of a side, the sides, and
the values. ``index.json`` (version 2) has the settings of every shard.
"""

from __future__ import annotations

import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save

from latentcache.errors import UsageError, count_of
from latentcache.export.folder import File, of_bytes
from latentcache.export.run import Advanced, Export
from latentcache.export.samples import WholeSample, WholeSamples
from latentcache.identity.content import content_hash
from latentcache.loader.values import Affine
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.export.folder import Folder
    from latentcache.export.settings import ExportSettings

#: Bytes of a shard: the default of the MDS library's own writer.
SHARD_BYTES = 1 << 26
#: Types that MDS lacks -> a type that holds each of their values.
_WIDER = {torch.bfloat16: torch.float32, torch.bool: torch.uint8}
#: File of MDS that lists the shards; name of what describes a sample.
_INDEX, ABOUT = "index.json", "about"
#: Bytes of a sample beside its values: names, types, ``about``.
_AROUND = 1024
_README = """\
# {count} of {cache}

latentcache wrote this folder. Each sample has these tensors, with shapes as in the first sample:

| name | type | shape |
|---|---|---|
{rows}

`about` describes a sample: `{about}`.

Values are those that a model trains on. {scalings}

{note}You can read all samples with this Python, run in this folder:

```python
{code}```

`latentcache verify .` compares every file with the list of this export.
"""


class Columns:
    """The columns of all shards of a folder, by name, with their encodings: ``ndarray:float16``, ``json``, ..."""

    def __init__(self, encodings: Mapping[str, str]) -> None:
        self.names = sorted(encodings)
        self._settings: dict[str, Any] = {
            "version": 2,
            "format": "mds",
            "compression": None,
            "hashes": [],
            "size_limit": SHARD_BYTES,
            "column_names": self.names,
            "column_encodings": [encodings[name] for name in self.names],
            "column_sizes": [None] * len(self.names),
        }
        self._head = json.dumps(self._settings, sort_keys=True).encode()
        self.bytes = 8 + len(self._head)
        """Of a shard, beside its samples and 4 bytes for each."""

    def write_shard(self, path: Path, samples: Sequence[bytes]) -> None:
        """Write one shard."""
        count = len(samples)
        ends = np.cumsum([4 + 4 * (count + 1) + len(self._head), *map(len, samples)]).astype("<u4")
        with path.open("wb") as shard:
            shard.writelines((struct.pack("<I", count), ends.tobytes(), self._head, *samples))

    def index(self, shards: Iterable[tuple[str, int, int]]) -> bytes:
        """Contents of ``index.json``, of the name, the number of samples and the bytes of each shard."""
        entries = [
            {
                **self._settings,
                "samples": samples,
                "raw_data": {"basename": name, "bytes": size, "hashes": {}},
                "zip_data": None,
            }
            for name, samples, size in shards
        ]
        return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()


def sample(columns: Sequence[bytes]) -> bytes:
    """One sample, of the values of its columns in the order of their names."""
    return struct.pack(f"<{len(columns)}I", *map(len, columns)) + b"".join(columns)


def array(values: NDArray[Any]) -> bytes:
    """The value of a column ``ndarray:`` with a type: axes and sides, then the values."""
    log2_width, side = next((k, kind) for k, kind in enumerate("BHI") if max(values.shape) < 1 << (8 << k))
    return struct.pack(f"<B{values.ndim}{side}", values.ndim << 2 | log2_width, *values.shape) + values.tobytes()


class Container(Value):
    """How samples become files."""

    name: str
    """Of a file, with the place of its number."""
    write: Callable[[Path, Iterable[WholeSample], Columns], None]
    code: str
    """Python that reads the folder, run in it."""
    shard_bytes: int = SHARD_BYTES
    """Of a file, about; 1: each sample has its own."""
    wider: Mapping[torch.dtype, torch.dtype] = field(default_factory=dict)
    """Types that it lacks -> a type that holds each of their values."""
    note: str = ""
    """Sentence on these types, if the cache has one of them."""
    index: str = ""
    """File that lists the others; empty: it has none."""


def write_safetensors(path: Path, samples: Iterable[WholeSample], columns: Columns) -> None:
    """A file for each sample, with ``about`` in its metadata."""
    for _, tensors, about in samples:
        path.write_bytes(save(dict(tensors), {ABOUT: json.dumps(about)}))


def write_tar(path: Path, samples: Iterable[WholeSample], columns: Columns) -> None:
    """Two members for each sample: its tensors, and ``about``."""
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for number, tensors, about in samples:
            members = {"safetensors": save(dict(tensors)), "json": json.dumps(about).encode()}
            for ending, data in members.items():
                member = tarfile.TarInfo(f"{number:08d}.{ending}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))


def write_mds(path: Path, samples: Iterable[WholeSample], columns: Columns) -> None:
    """A column for each tensor, and ``about`` as JSON."""
    encoded = []
    for _, tensors, about in samples:
        values = {ABOUT: json.dumps(about).encode()}
        for name, tensor in tensors.items():
            values[name] = array(tensor.to(_WIDER.get(tensor.dtype, tensor.dtype)).numpy())
        encoded.append(sample([values[name] for name in columns.names]))
    path.with_name(_INDEX).unlink(missing_ok=True)  # an old one beside new shards gives other samples
    columns.write_shard(path, encoded)


_SAFETENSORS = """\
import json
from pathlib import Path
from safetensors import safe_open

for path in sorted(Path("samples").iterdir()):
    with safe_open(path, "pt") as file:
        sample = {name: file.get_tensor(name) for name in file.keys()}
        about = json.loads(file.metadata()["about"])
"""
_WEBDATASET = """\
from glob import glob
from safetensors.torch import load
from webdataset import WebDataset

for members in WebDataset(sorted(glob("*.tar")), shardshuffle=False).decode():
    sample = load(members["safetensors"])
    about = members["json"]
"""
_STREAMING = """\
from streaming import StreamingDataset

for sample in StreamingDataset(local=".", shuffle=False, batch_size=1):
    about = sample.pop("about")
"""
#: By ``--to``.
CONTAINERS: dict[str, Container] = {
    "safetensors": Container(
        name="samples/{:08d}.safetensors", write=write_safetensors, code=_SAFETENSORS, shard_bytes=1
    ),
    "webdataset": Container(name="shard-{:06d}.tar", write=write_tar, code=_WEBDATASET),
    "mds": Container(
        name="shard.{:05d}.mds",
        write=write_mds,
        code=_STREAMING,
        wider=_WIDER,
        note="MDS has no bfloat16 and no bool: these are float32 and uint8 here, with equal values.",
        index=_INDEX,
    ),
}


class SampleExport(Export):
    """One export of whole samples. See :class:`~latentcache.export.run.Export`."""

    def __init__(self, settings: ExportSettings) -> None:
        super().__init__(settings)
        self.check_demo()
        self.fields = self.snapshot.fields
        self._samples = WholeSamples(self.snapshot)
        if not len(self._samples):
            problem = f"{settings.cache}: no sample has all fields"
            fix = "run `latentcache verify`, which names them"
            raise UsageError(problem, fix=fix)
        self._sizes = self._samples.sizes
        self._container = CONTAINERS[settings.format]
        first = self._samples[0].tensors
        wider = self._container.wider
        types = {name: wider.get(tensor.dtype, tensor.dtype) for name, tensor in first.items()}
        self._types = {name: str(dtype).removeprefix("torch.") for name, dtype in types.items()}
        self._columns = Columns({**{name: f"ndarray:{kind}" for name, kind in self._types.items()}, ABOUT: "json"})
        self._notes = [self._container.note] if any(tensor.dtype in wider for tensor in first.values()) else []

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def bytes(self) -> int:
        """See ``Export``."""
        return int(self._sizes.sum()) * (2 if self._notes else 1) + _AROUND * len(self._sizes)

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``Export``."""
        shards = dict[str, int]()
        for number, samples in enumerate(self._shards()):
            name = self._container.name.format(number)
            folder.put(File(name=name, origin=self._origin(samples)), partial(self._write_file, samples))
            shards[name] = len(samples)
            on_progress(samples.stop, len(self._samples))
        if self._container.index:
            listed = [(name, count, folder.files[name].size) for name, count in shards.items()]
            folder.put(*of_bytes(self._container.index, self._columns.index(listed)))
        folder.put(*of_bytes("README.md", self._readme().encode()))
        about = {
            **self.facts,
            "samples": len(self._samples),
            "left_out": self._samples.excluded,
            "unused": self._samples.unused,
        }
        advice = ["README.md in the folder shows how to read it", *self._notes]
        return about, {**about, "advice": advice}

    def _write_file(self, samples: range, path: Path) -> str:
        self._container.write(path, (self._samples[number] for number in samples), self._columns)
        return ""  # its hash is not known

    def _shards(self) -> Iterator[range]:
        """The samples of each file, in the order of the cache."""
        first, size = 0, 0
        for number, added in enumerate((self._sizes + _AROUND).tolist()):
            if number > first and size + added > self._container.shard_bytes:
                yield range(first, number)
                first = number
                size = 0
            size += added
        yield range(first, len(self._sizes))

    def _origin(self, samples: Iterable[int]) -> str:
        """Hex hash of everything that decides the bytes of a file."""
        facts = [self._types, self._scalings(), *map(self._samples.about, samples)]
        return content_hash(json.dumps(facts).encode()).hex()

    def _scalings(self) -> dict[str, Any]:
        """Scale and shift of values, by field."""
        recipes = {name: field.recipe for name, field in self.snapshot.fields.items()}
        affines = {name: recipe.read_time.affine for name, recipe in recipes.items() if recipe is not None}
        return {name: affine for name, affine in affines.items() if Affine.of(affine).changes}

    def _readme(self) -> str:
        """``README.md``."""
        rows = [
            f"| `{name}` | {self._types[name]} | {tuple(tensor.shape)} |"
            for name, tensor in self._samples[0].tensors.items()
        ]
        scalings = "".join(f"\n- `{name}`: `{json.dumps(affine)}`" for name, affine in self._scalings().items())
        return _README.format(
            count=count_of(len(self._samples), "samples"),
            cache=self.settings.cache.resolve().name,
            rows="\n".join(rows),
            about="`, `".join(self._samples.about(0)),
            scalings=f"These were scaled and shifted:\n{scalings}" if scalings else "None was scaled or shifted.",
            note="".join(f"{note}\n\n" for note in self._notes),
            code=self._container.code,
        )
