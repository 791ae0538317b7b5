from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from made_documents import CORPORA, FACTS, cache_of
from read_formats import read_megatron

from latentcache.errors import ExportError
from latentcache.export.documents import Written, export_documents
from latentcache.export.megatron import MEGATRON, check_index


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


#: Place in the index of two documents of 3 and 2 ids, and what it is replaced by.
DAMAGE = {
    "the magic": (0, b"X"),
    "the version": (9, b"\x02"),
    "the type, of as many bytes": (17, b"\x03"),
    "a length": (34, b"\x02"),
    "a pointer": (50, b"\x04"),
    "the first pointer": (42, b"\x02"),
    "a document index": (66, b"\x02"),
}


@pytest.mark.parametrize("place", DAMAGE)
def test_an_index_that_would_read_other_tokens_is_found(tmp_path, place):
    written = export([[5, 6, 1], [7, 1]], tmp_path / "out")
    index = tmp_path / "out/train.idx"
    check_index(tmp_path / "out/train.bin", written)
    data, (at, byte) = bytearray(index.read_bytes()), DAMAGE[place]
    assert data[at : at + 1] != byte
    data[at : at + 1] = byte
    index.write_bytes(bytes(data))
    with pytest.raises(ExportError, match="other tokens"):
        check_index(tmp_path / "out/train.bin", written)


def test_a_missing_document_index_is_found(tmp_path):
    written = export([[5, 6, 1], [7, 1]], tmp_path / "out")
    index = tmp_path / "out/train.idx"
    data = bytearray(index.read_bytes()[:-8])
    data[26] = 2
    index.write_bytes(bytes(data))
    with pytest.raises(ExportError, match="a sequence for each document"):
        check_index(tmp_path / "out/train.bin", written)


def test_ids_that_are_cut_short_are_found(tmp_path):
    written = export([[5, 6, 1], [7, 1]], tmp_path / "out")
    file = tmp_path / "out/train.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(ExportError, match="the size of the ids"):
        check_index(file, written)


def test_the_check_is_made_before_the_folder_has_its_name(tmp_path):
    def one_off(file, written, facts):
        return MEGATRON.beside(file, replace(written, ends=written.ends + 1), facts)

    form = replace(MEGATRON, beside=one_off)
    with pytest.raises(ExportError, match="the size of the ids"):
        export_documents({"train": cache_of([[5, 6, 1]])}, form, tmp_path / "out", FACTS)
    assert not list(tmp_path.iterdir())


def test_a_document_that_an_index_cannot_count(tmp_path):
    ends = np.array([5, 5 + 2**31], dtype=np.int64)
    (tmp_path / "train.bin").touch()
    with pytest.raises(ExportError, match="2147483648 tokens"):
        MEGATRON.beside(tmp_path / "train.bin", Written(dtype="uint16", ends=ends, last_id=None), {})


def test_offsets_beyond_four_gigabytes(tmp_path):
    """The file of ids has holes in it, so it takes no space."""
    ends = np.array([3, 2 + 2**31, 2**32], dtype=np.int64)
    with (tmp_path / "train.bin").open("wb") as file:
        file.truncate(int(ends[-1]) * 2)
    written = Written(dtype="uint16", ends=ends, last_id=None)
    MEGATRON.beside(tmp_path / "train.bin", written, {})
    begins = np.fromfile(tmp_path / "train.idx", "<i8", 3, offset=34 + 12)
    assert begins.tolist() == [0, 6, 4 + 2**32]
