import numpy as np
from hypothesis import given
from made_documents import CORPORA, FACTS, cache_of
from read_formats import read_megatron

from latentcache.export.documents import Written, export_documents
from latentcache.export.megatron import MEGATRON


def export(ids, out, num_ids=300):
    return export_documents({"train": cache_of(ids, num_ids)}, MEGATRON, out, FACTS)["train"]


@given(CORPORA)
def test_ids_and_documents_come_back(tmp_path_factory, corpus):
    num_ids, ids = corpus
    out = tmp_path_factory.mktemp("megatron") / "out"
    written = export(ids, out, num_ids)
    assert read_megatron(out / "train") == ids
    assert written.dtype == ("uint16" if num_ids <= 1 << 16 else "int32")


def test_the_bytes_are_those_of_the_format(tmp_path):
    export([[5, 6, 1], [7, 1]], tmp_path / "out")
    assert (tmp_path / "out/train.bin").read_bytes() == bytes([5, 0, 6, 0, 1, 0, 7, 0, 1, 0])
    parts = [
        *["4d4d49444944580000", "0100000000000000", "08", "0200000000000000", "0300000000000000"],
        *["03000000", "02000000"],
        *["0000000000000000", "0600000000000000"],
        *["0000000000000000", "0100000000000000", "0200000000000000"],
    ]
    assert (tmp_path / "out/train.idx").read_bytes().hex() == "".join(parts)


def test_offsets_beyond_four_gigabytes(tmp_path):
    """The file of ids has holes in it, so it takes no space."""
    ends = np.array([3, 2 + 2**31, 2**32], dtype=np.int64)
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(int(ends[-1]) * 2)
    written = Written(dtype="uint16", ends=ends, last_id=None)
    MEGATRON.beside(tmp_path / "train.bin", written, {})
    begins = np.fromfile(tmp_path / "train.idx", "<i8", 3, offset=34 + 12)
    assert begins.tolist() == [0, 6, 4 + 2**32]
