"""The formats of whole documents: what was written is read again, and the bytes are those of the format."""

import numpy as np
import pytest
from hypothesis import given
from made_documents import CORPORA, FACTS, cache_of
from read_formats import read_datatrove, read_megatron

from latentcache.export.datatrove import DATATROVE, metadata
from latentcache.export.documents import Written, export_documents
from latentcache.export.megatron import MEGATRON

FILE = "train/00000_tokens.ds"


def export(form, ids, out, num_ids=300, **facts):
    return export_documents({"train": cache_of(ids, num_ids)}, form, out, FACTS | facts)["train"]


@pytest.mark.parametrize(
    ("form", "read", "name", "wide"),
    [(MEGATRON, read_megatron, "train", "int32"), (DATATROVE, read_datatrove, FILE, "uint32")],
    ids=["megatron", "datatrove"],
)
@given(corpus=CORPORA)
def test_ids_and_documents_come_back(tmp_path_factory, form, read, name, wide, corpus):
    num_ids, ids = corpus
    out = tmp_path_factory.mktemp("export") / "out"
    written = export(form, ids, out, num_ids)
    assert read(out / name) == ids
    assert written.dtype == ("uint16" if num_ids <= 1 << 16 else wide)


def test_the_bytes_of_datatrove(tmp_path):
    export(DATATROVE, [[5, 70_000, 1], [7, 1]], tmp_path / "out", num_ids=100_000, tokenizer="llama")
    ids = "05000000" + "70110100" + "01000000" + "07000000" + "01000000"
    assert (tmp_path / "out" / FILE).read_bytes().hex() == ids
    assert (tmp_path / "out" / f"{FILE}.index").read_bytes().hex() == "03" + "00" * 7 + "05" + "00" * 7
    assert (tmp_path / "out" / f"{FILE}.metadata").read_text() == "llama|4\n5\n5e-09 GT"
    written = export(DATATROVE, [[1]], tmp_path / "other")
    for name in ("a|b", "a\nb", "a b", " a  b"):
        assert metadata(name, written).split("\n")[0] == "a b|2"
    assert metadata("", written).split("\n")[0] == "Unknown Tokenizer|2"


def test_the_bytes_of_megatron(tmp_path):
    export(MEGATRON, [[5, 6, 1], [7, 1]], tmp_path / "out")
    assert (tmp_path / "out/train.bin").read_bytes() == bytes([5, 0, 6, 0, 1, 0, 7, 0, 1, 0])
    parts = [
        *["4d4d49444944580000", "0100000000000000", "08", "0200000000000000", "0300000000000000"],
        *["03000000", "02000000"],
        *["0000000000000000", "0600000000000000"],
        *["0000000000000000", "0100000000000000", "0200000000000000"],
    ]
    assert (tmp_path / "out/train.idx").read_bytes().hex() == "".join(parts)


def test_offsets_of_megatron_beyond_four_gigabytes(tmp_path):
    """The file of ids has holes in it, so it takes no space."""
    ends = np.array([3, 2 + 2**31, 2**32], dtype=np.int64)
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(int(ends[-1]) * 2)
    MEGATRON.beside(tmp_path / "train.bin", Written(dtype="uint16", ends=ends, last_id=None), {})
    begins = np.fromfile(tmp_path / "train.idx", "<i8", 3, offset=34 + 12)
    assert begins.tolist() == [0, 6, 4 + 2**32]
