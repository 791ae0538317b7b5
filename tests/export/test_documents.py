import numpy as np
import pytest
from hypothesis import given
from made_documents import CORPORA, MemoryDocuments, export
from read_formats import read_datatrove, read_megatron
from small_tokens import build, tamper, texts, write_texts

from latentcache import open_cache
from latentcache.errors import CorruptEntryError, PlanError, UsageError
from latentcache.export import tokens
from latentcache.export.tokens import FILES, Ids, counts, megatron_index, reject_masked

FILE = "train/00000_tokens.ds"
DOCUMENTS = [[5, 6, 1], [7, 1], [8, 9, 10, 11, 12, 1], [1]]


@pytest.mark.parametrize(
    ("form", "read", "name", "wide"),
    [("megatron", read_megatron, "train", "int32"), ("datatrove", read_datatrove, FILE, "uint32")],
)
@given(corpus=CORPORA)
def test_ids_and_documents_round_trip(tmp_path_factory, form, read, name, wide, corpus):
    num_ids, ids = corpus
    out = tmp_path_factory.mktemp("export") / "out"
    written = export(form, ids, out, num_ids)["train"]
    assert read(out / name) == ids
    assert written.dtype.name == ("uint16" if num_ids <= 1 << 16 else wide)


def test_the_bytes_of_datatrove(tmp_path):
    export("datatrove", [[5, 70_000, 1], [7, 1]], tmp_path / "out", num_ids=100_000, tokenizer=" a|b\n c")
    ids = "05000000" + "70110100" + "01000000" + "07000000" + "01000000"
    assert (tmp_path / "out" / FILE).read_bytes().hex() == ids
    assert (tmp_path / "out" / f"{FILE}.index").read_bytes().hex() == "03" + "00" * 7 + "05" + "00" * 7
    assert (tmp_path / "out" / f"{FILE}.metadata").read_text() == "a b c|4\n5\n5e-09 GT"


def test_the_bytes_of_megatron(tmp_path):
    export("megatron", [[5, 6, 1], [7, 1]], tmp_path / "out")
    assert (tmp_path / "out/train.bin").read_bytes() == bytes([5, 0, 6, 0, 1, 0, 7, 0, 1, 0])
    parts = [
        *["4d4d49444944580000", "0100000000000000", "08", "0200000000000000", "0300000000000000"],
        *["03000000", "02000000"],
        *["0000000000000000", "0600000000000000"],
        *["0000000000000000", "0100000000000000", "0200000000000000"],
    ]
    assert (tmp_path / "out/train.idx").read_bytes().hex() == "".join(parts)


def test_offsets_of_megatron_beyond_four_gigabytes():
    index = megatron_index(Ids(np.dtype("uint16"), np.array([3, 2 + 2**31, 2**32]), None))
    assert np.frombuffer(index, "<i8", 3, offset=34 + 12).tolist() == [0, 6, 4 + 2**32]


@pytest.mark.parametrize(
    ("limit", "after"), [(1, [1, 2, 3, 4]), (5, [2, 3, 4]), (7, [2, 4]), (11, [3, 4]), (12, [4])]
)
def test_batching_does_not_change_the_output(tmp_path, monkeypatch, limit, after):
    monkeypatch.setattr(tokens, "BATCH_TOKENS", limit)
    seen = []
    export("datatrove", DOCUMENTS, tmp_path / "out", on_progress=lambda *at: seen.append(at[0]))
    assert seen == after
    assert read_datatrove(tmp_path / "out" / FILE) == DOCUMENTS


def test_metadata_and_end_of_document_id(tmp_path):
    ids = export("megatron", DOCUMENTS, tmp_path / "a")
    numbers = {"splits": {"train": 4}, "tokens": {"train": 12}, "dtype": "uint16", "last_id": 1}
    assert counts(ids) == numbers
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "a").iterdir()}
    assert sizes == {"train.bin": 24, "train.idx": 34 + 4 * 12 + 5 * 8}
    parts = {"train": MemoryDocuments(DOCUMENTS), "validation": MemoryDocuments([[5, 6]])}
    ids = export("megatron", parts, tmp_path / "b")
    assert (ids["validation"].last_id, counts(ids)["last_id"]) == (6, None)
    assert export("megatron", [*DOCUMENTS, [4]], tmp_path / "c")["train"].last_id is None


@pytest.mark.parametrize(
    ("spans", "masked"),
    [
        ([[(0, 3)], [(0, 1), (1, 1)], [(0, 6)], [(0, 1)]], 0),
        ([[(0, 3)], [(1, 1)], [(0, 2), (4, 2)], [(0, 1)]], 2),
        ([[(0, 3)], [(0, 2)], [], [(0, 1)]], 1),
    ],
)
def test_labels_are_never_dropped(spans, masked):
    documents = MemoryDocuments(DOCUMENTS, spans=spans)
    if not masked:
        reject_masked(documents, "megatron")
        return
    with pytest.raises(UsageError, match=f"{masked} of 4 documents") as caught:
        reject_masked(documents, "megatron")
    assert caught.value.where == ("memory:2" if masked == 2 else "memory:3")
    assert "hf-disk" in caught.value.fix


@pytest.mark.parametrize("form", FILES)
def test_a_split_without_documents_and_a_damaged_cache_are_named(tmp_path, form):
    splits = {"train": MemoryDocuments(DOCUMENTS), "validation": MemoryDocuments([])}
    with pytest.raises(PlanError, match="no document is in validation"):
        export(form, splits, tmp_path / "out")
    build(write_texts(tmp_path / "data.jsonl", texts(20)), tmp_path / "cache")
    documents = open_cache(tmp_path / "cache").documents()
    tamper(tmp_path / "cache")
    with pytest.raises(CorruptEntryError):
        export(form, {"train": documents}, tmp_path / "other")
