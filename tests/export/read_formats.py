"""Readers of the exported formats, based on their specifications and ``struct`` only."""

import json
import struct
from itertools import chain, pairwise

#: Type codes of Megatron and type names of MDS as ``struct`` formats.
MEGATRON_TYPES = {4: "i", 8: "H"}
MDS_TYPES = {"ndarray:uint16": "H", "ndarray:int32": "i"}


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
    assert [len(one) for one in sequences] == lengths
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
    index = json.loads((folder / "index.json").read_text())
    assert index["version"] == 2
    return [sample for shard in index["shards"] for sample in _shard(folder, shard)]


def _shard(folder, shard):
    data = (folder / shard["raw_data"]["basename"]).read_bytes()
    assert len(data) == shard["raw_data"]["bytes"]
    (count,) = struct.unpack("<I", data[:4])
    assert count == shard["samples"]
    offsets = numbers("I", data[4 : 4 + 4 * (count + 1)])
    assert json.loads(data[4 + 4 * (count + 1) : offsets[0]])["column_names"] == shard["column_names"] == ["tokens"]
    assert offsets[-1] == len(data)
    kind = MDS_TYPES[shard["column_encodings"][0]]
    return [_sample(data[a:b], kind) for a, b in pairwise(offsets)]


def _sample(data, kind):
    (size,) = struct.unpack("<I", data[:4])
    assert size == len(data) - 4
    axes, side = data[4] >> 2, "BHIQ"[data[4] & 3]
    assert axes == 1
    (length,) = struct.unpack(f"<{side}", data[5 : 5 + struct.calcsize(side)])
    values = numbers(kind, data[5 + struct.calcsize(side) :])
    assert len(values) == length
    return values
