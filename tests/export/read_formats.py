"""Readers of the exported formats, based on their specifications, ``struct`` and numpy only."""

import json
import struct
from itertools import chain, pairwise

import numpy as np

#: Type codes of Megatron as ``struct`` formats.
MEGATRON_TYPES = {4: "i", 8: "H"}


def numbers(kind, data):
    return [value for (value,) in struct.iter_unpack(f"<{kind}", data)]


def read_megatron(prefix):
    """Read the documents at ``prefix``; a document joins its sequences."""
    index, ids = prefix.with_suffix(".idx").read_bytes(), prefix.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, count, indices = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    kind, offset = MEGATRON_TYPES[code], 34
    columns = []
    for width, number, name in ((4, count, "i"), (8, count, "q"), (8, indices, "q")):
        columns.append(numbers(name, index[offset : offset + width * number]))
        offset += width * number
    assert offset == len(index)
    lengths, begins, first = columns
    width = struct.calcsize(kind)
    sequences = [numbers(kind, ids[b : b + n * width]) for b, n in zip(begins, lengths, strict=True)]
    assert [len(sequence) for sequence in sequences] == lengths
    return [list(chain(*sequences[a:b])) for a, b in pairwise(first)]


def read_datatrove(file):
    """Read the documents of a ``.ds`` with the width of its metadata."""
    name, tokens, _ = file.with_name(f"{file.name}.metadata").read_text().split("\n")
    _, width = name.split("|")
    ids = numbers({"2": "H", "4": "I"}[width], file.read_bytes())
    assert len(ids) == int(tokens)
    ends = numbers("Q", file.with_name(f"{file.name}.index").read_bytes())
    return [ids[a:b] for a, b in pairwise([0, *ends])]


def read_mds(folder):
    """Read the rows of the column ``tokens``."""
    return [sample["tokens"].tolist() for sample in read_mds_samples(folder)]


def read_mds_samples(folder):
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    return [sample for shard in index["shards"] for sample in _shard(folder, shard)]


def _shard(folder, shard):
    data = (folder / shard["raw_data"]["basename"]).read_bytes()
    assert len(data) == shard["raw_data"]["bytes"]
    (count,) = struct.unpack("<I", data[:4])
    assert count == shard["samples"]
    offsets = numbers("I", data[4 : 4 + 4 * (count + 1)])
    names, encodings = shard["column_names"], shard["column_encodings"]
    assert json.loads(data[4 + 4 * (count + 1) : offsets[0]])["column_names"] == names == sorted(names)
    assert offsets[-1] == len(data)
    return [dict(zip(names, _sample(data[a:b], encodings), strict=True)) for a, b in pairwise(offsets)]


def _sample(data, encodings):
    start, values = 4 * len(encodings), []
    for size, encoding in zip(numbers("I", data[:start]), encodings, strict=True):
        values.append(_value(data[start : start + size], encoding))
        start += size
    assert start == len(data)
    return values


def _value(data, encoding):
    if encoding == "json":
        return json.loads(data)
    axes, side = data[0] >> 2, "BHIQ"[data[0] & 3]
    start = 1 + axes * struct.calcsize(side)
    shape = struct.unpack(f"<{axes}{side}", data[1:start])
    return np.frombuffer(data[start:], encoding.removeprefix("ndarray:")).reshape(shape)
