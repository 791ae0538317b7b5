"""Export whole samples: a safetensors file for each, or shards for webdataset or mosaicml-streaming, with a README.

Formats: safetensors 0.8; WebDataset 1.0 (``webdataset/tariterators.py``), members of one sample share a name up to
the first dot; MDS as in ``export/mds.py``, which has no bfloat16 and no bool.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from latentcache.errors import UsageError, count_of
from latentcache.export.folder import File, of_bytes
from latentcache.export.mds import SHARD_BYTES, Columns, array, sample
from latentcache.export.samples import WholeSample, WholeSamples, check_demo, facts_of, opened
from latentcache.identity.content import content_hash
from latentcache.loader.values import Affine

if TYPE_CHECKING:
    from latentcache.export.folder import Folder
    from latentcache.export.settings import Advanced, ExportSettings

#: Bytes of a sample beside its values: names, types, ``about``.
_AROUND = 1024
_README = """\
# {count} of {cache}

latentcache wrote this folder. Each sample has these tensors, with shapes as in the first sample:

| name | type | shape |
|---|---|---|
{rows}

`about` describes a sample: `{about}`.

Values are those that a model trains on. These were scaled and shifted:

{scalings}
{note}You can read all samples with this Python, run in this folder:

```python
{code}```

`latentcache verify .` compares every file with the list of this export.
"""


class Container:
    """How samples become files. ``types``: type of each tensor in the cache."""

    name: str
    """Of a file, with the place of its number."""
    shard_bytes = SHARD_BYTES
    """Bytes of a file, about; 1: each sample has its own."""
    code: str
    """Python that reads the folder, where it runs."""
    wider: Mapping[torch.dtype, torch.dtype] = {}
    """Types that it lacks -> a type that holds each of their values."""
    note = ""
    """Sentence on these types, if the cache has one of them."""

    def __init__(self, types: Mapping[str, torch.dtype]) -> None:
        self.types = {name: self.wider.get(dtype, dtype) for name, dtype in types.items()}
        self.notes = [self.note] if self.types != types else []

    def write(self, path: Path, samples: Iterable[WholeSample]) -> None:
        """Write one file."""
        raise NotImplementedError

    def index(self, shards: Iterable[tuple[str, int, int]]) -> Mapping[str, bytes]:
        """Further files, for the name, the number of samples and the bytes of each file."""
        return {}


class SafetensorsFiles(Container):
    """A file for each sample, with ``about`` in its metadata."""

    name, shard_bytes = "samples/{:08d}.safetensors", 1
    code = """\
import json
from pathlib import Path
from safetensors import safe_open

for path in sorted(Path("samples").iterdir()):
    with safe_open(path, "pt") as file:
        sample = {name: file.get_tensor(name) for name in file.keys()}
        about = json.loads(file.metadata()["about"])
"""

    def write(self, path: Path, samples: Iterable[WholeSample]) -> None:
        """See ``Container``."""
        for _, tensors, about in samples:
            path.write_bytes(save(dict(tensors), {"about": json.dumps(about)}))


class WebDatasetShards(Container):
    """Tar files of two members for each sample: its tensors, and ``about``."""

    name = "shard-{:06d}.tar"
    code = """\
from glob import glob
from safetensors.torch import load
from webdataset import WebDataset

for members in WebDataset(sorted(glob("*.tar")), shardshuffle=False).decode():
    sample = load(members["safetensors"])
    about = members["json"]
"""

    def write(self, path: Path, samples: Iterable[WholeSample]) -> None:
        """See ``Container``."""
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
            for number, tensors, about in samples:
                members = {"safetensors": save(dict(tensors)), "json": json.dumps(about).encode()}
                for ending, data in members.items():
                    member = tarfile.TarInfo(f"{number:08d}.{ending}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


class MdsShards(Container):
    """Shards with a column for each tensor, and ``about`` as JSON."""

    name = "shard.{:05d}.mds"
    wider = {torch.bfloat16: torch.float32, torch.bool: torch.uint8}  # noqa: RUF012
    note = "MDS has no bfloat16 and no bool: these are float32 and uint8 here, with equal values."
    code = """\
from streaming import StreamingDataset

for sample in StreamingDataset(local=".", shuffle=False, batch_size=1):
    about = sample.pop("about")
"""

    def __init__(self, types: Mapping[str, torch.dtype]) -> None:
        super().__init__(types)
        encodings = {name: f"ndarray:{str(dtype).removeprefix('torch.')}" for name, dtype in self.types.items()}
        self._columns = Columns({**encodings, "about": "json"})

    def write(self, path: Path, samples: Iterable[WholeSample]) -> None:
        """See ``Container``."""
        encoded = []
        for _, tensors, about in samples:
            values = {name: array(tensors[name].to(dtype).numpy()) for name, dtype in self.types.items()}
            values["about"] = json.dumps(about).encode()
            encoded.append(sample([values[name] for name in self._columns.names]))
        path.with_name("index.json").unlink(missing_ok=True)  # an old one beside new shards gives other samples
        self._columns.write_shard(path, encoded)

    def index(self, shards: Iterable[tuple[str, int, int]]) -> Mapping[str, bytes]:
        """See ``Container``."""
        return {"index.json": self._columns.index(shards)}


#: By ``--to``.
CONTAINERS: Mapping[str, type[Container]] = {
    "safetensors": SafetensorsFiles,
    "webdataset": WebDatasetShards,
    "mds": MdsShards,
}


class SampleExport:
    """One export of whole samples. See :class:`~latentcache.export.run.Export`."""

    resumes, noun = True, "samples"

    def __init__(self, settings: ExportSettings) -> None:
        self._settings = settings
        self._snapshot = opened(settings).snapshots[0]
        check_demo(settings, self._snapshot)
        self._samples = WholeSamples(self._snapshot)
        if not len(self._samples):
            problem, fix = f"{settings.cache}: no sample has all fields", "run `latentcache verify`, which names them"
            raise UsageError(problem, fix=fix)
        self._sizes = self._samples.sizes
        types = {name: values.dtype for name, values in self._samples[0].tensors.items()}
        self._container = CONTAINERS[settings.format](types)

    @property
    def plan(self) -> str:
        """What will be written, as a sentence."""
        fields = ", ".join(self._snapshot.fields)
        return f"{count_of(len(self._samples), 'samples')}, about {self.bytes / 1e6:.1f} MB of {fields}"

    @property
    def bytes(self) -> int:
        """Bytes of the files, about."""
        return int(self._sizes.sum()) * (2 if self._container.notes else 1) + _AROUND * len(self._sizes)

    def write(self, folder: Folder, on_progress: Advanced) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write all files; returns what the sidecar says, and what the JSON output says of it."""
        shards, done = dict[str, int](), 0
        for number, samples in enumerate(self._shards()):
            name = self._container.name.format(number)
            folder.put(File(name=name, origin=self._origin(samples)), partial(self._write_file, samples))
            shards[name] = len(samples)
            done += len(samples)
            on_progress(done, len(self._samples))
        index = self._container.index((name, count, folder.files[name].size) for name, count in shards.items())
        for name, data in {**index, "README.md": self._readme().encode()}.items():
            folder.put(*of_bytes(name, data))
        about = {
            **facts_of(self._settings, self._snapshot, self._snapshot.fields),
            "samples": len(self._samples),
            "left_out": self._samples.excluded,
            "unused": self._samples.unused,
        }
        advice = ["README.md in the folder shows how to read it", *self._container.notes]
        return about, {**about, "advice": advice}

    def _write_file(self, samples: range, path: Path) -> str:
        self._container.write(path, (self._samples[number] for number in samples))
        return ""  # its hash is not known

    def _shards(self) -> Iterator[range]:
        """The samples of each file, in the order of the cache."""
        first, size = 0, 0
        for number, added in enumerate((self._sizes + _AROUND).tolist()):
            if number > first and size + added > self._container.shard_bytes:
                yield range(first, number)
                first, size = number, 0
            size += added
        yield range(first, len(self._sizes))

    def _origin(self, samples: Iterable[int]) -> str:
        """Hex digits of everything that decides the bytes of a file."""
        facts = [
            str(self._container.types),
            str(self._scalings()),
            *(json.dumps(self._samples.about(n)) for n in samples),
        ]
        return content_hash("\0".join(facts).encode()).hex()

    def _scalings(self) -> dict[str, Any]:
        """Scale and shift of values, by field."""
        recipes = {name: field.recipe for name, field in self._snapshot.fields.items()}
        affines = {name: recipe.read_time.affine for name, recipe in recipes.items() if recipe is not None}
        return {name: affine for name, affine in affines.items() if Affine.of(affine).changes}

    def _readme(self) -> str:
        """``README.md``."""
        rows = [
            f"| `{name}` | {str(self._container.types[name]).removeprefix('torch.')} | {tuple(values.shape)} |"
            for name, values in self._samples[0].tensors.items()
        ]
        return _README.format(
            count=count_of(len(self._samples), "samples"),
            cache=self._settings.cache.resolve().name,
            rows="\n".join(rows),
            about="`, `".join(self._samples.about(0)),
            scalings="".join(f"- `{name}`: `{json.dumps(affine)}`\n" for name, affine in self._scalings().items()),
            note="".join(f"{note}\n\n" for note in self._container.notes),
            code=self._container.code,
        )
