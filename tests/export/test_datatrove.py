import pytest
from hypothesis import given
from made_documents import CORPORA, FACTS, cache_of
from read_formats import read_datatrove

from latentcache.export.datatrove import DATATROVE, metadata
from latentcache.export.documents import export_documents

FILE = "train/00000_tokens.ds"


def export(ids, out, num_ids=300, **facts):
    return export_documents({"train": cache_of(ids, num_ids)}, DATATROVE, out, FACTS | facts)["train"]


@given(CORPORA)
def test_ids_and_documents_come_back(tmp_path_factory, corpus):
    num_ids, ids = corpus
    out = tmp_path_factory.mktemp("datatrove") / "out"
    written = export(ids, out, num_ids)
    assert read_datatrove(out / FILE) == ids
    assert written.dtype == ("uint16" if num_ids <= 1 << 16 else "uint32")


def test_the_bytes_are_those_of_the_format(tmp_path):
    export([[5, 70_000, 1], [7, 1]], tmp_path / "out", num_ids=100_000, tokenizer="llama")
    assert (
        tmp_path / "out" / FILE
    ).read_bytes().hex() == "05000000" + "70110100" + "01000000" + "07000000" + "01000000"
    assert (tmp_path / "out" / f"{FILE}.index").read_bytes().hex() == "03" + "00" * 7 + "05" + "00" * 7
    assert (tmp_path / "out" / f"{FILE}.metadata").read_text() == "llama|4\n5\n5e-09 GT"


@pytest.mark.parametrize("name", ["a|b", "a\nb", "a b", " a  b"])
def test_the_first_line_has_one_bar(tmp_path, name):
    written = export([[1]], tmp_path / "out")
    assert metadata(name, written).split("\n")[0] == "a b|2"
    assert metadata("", written).split("\n")[0] == "Unknown Tokenizer|2"
