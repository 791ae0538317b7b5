import json

import pytest
from made_documents import FACTS, cache_of
from read_formats import read_datatrove, read_megatron
from small_tokens import build, tamper, texts, write_texts

from latentcache import open_cache
from latentcache.errors import CorruptEntryError, PlanError, UsageError
from latentcache.export import documents
from latentcache.export.datatrove import DATATROVE
from latentcache.export.documents import export_documents, reject_masked
from latentcache.export.megatron import MEGATRON

DOCUMENTS = [[5, 6, 1], [7, 1], [8, 9, 10, 11, 12, 1], [1]]


def test_documents_of_a_cache_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BATCH_TOKENS", 500)
    build(write_texts(tmp_path / "data.jsonl", texts(60)), tmp_path / "cache")
    train, held = (part.documents() for part in open_cache(tmp_path / "cache").split(0.3))
    seen = []
    export_documents(
        {"train": train, "validation": held}, MEGATRON, tmp_path / "out", FACTS, lambda *at: seen.append(at)
    )
    for name, part in (("train", train), ("validation", held)):
        assert read_megatron(tmp_path / "out" / name) == [part.read(number).tolist() for number in range(len(part))]
    assert seen == sorted(set(seen))
    assert len(seen) > 4, "documents pass through memory a few at a time"
    assert seen[-1] == (60, 60)


@pytest.mark.parametrize(
    ("limit", "after"), [(1, [1, 2, 3, 4]), (5, [2, 3, 4]), (7, [2, 4]), (11, [3, 4]), (12, [4])]
)
def test_documents_that_pass_together_change_nothing(tmp_path, monkeypatch, limit, after):
    monkeypatch.setattr(documents, "BATCH_TOKENS", limit)
    seen = []
    export_documents(
        {"train": cache_of(DOCUMENTS)}, DATATROVE, tmp_path / "out", FACTS, lambda *at: seen.append(at[0])
    )
    assert seen == after
    assert read_datatrove(tmp_path / "out/train/00000_tokens.ds") == DOCUMENTS


def test_the_id_that_ends_them(tmp_path):
    made = export_documents({"train": cache_of(DOCUMENTS)}, MEGATRON, tmp_path / "a", FACTS)
    assert documents.counts(made) == {
        "splits": {"train": 4}, "tokens": {"train": 12}, "dtype": "uint16", "last_id": 1,
    }  # fmt: skip
    parts = {"train": cache_of(DOCUMENTS), "validation": cache_of([[5, 6]])}
    made = export_documents(parts, MEGATRON, tmp_path / "b", FACTS)
    assert (made["validation"].last_id, documents.counts(made)["last_id"]) == (6, None)
    made = export_documents({"train": cache_of([*DOCUMENTS, [4]])}, MEGATRON, tmp_path / "c", FACTS)
    assert made["train"].last_id is None


def test_facts_stand_beside_them(tmp_path):
    export_documents({"train": cache_of(DOCUMENTS)}, MEGATRON, tmp_path / "out", FACTS)
    facts = json.loads((tmp_path / "out/latentcache.json").read_text())
    assert (facts["format"], facts["fingerprint"], facts["splits"]) == ("megatron", "ab" * 16, {"train": 4})
    assert facts["bytes"] == {"train.bin": 24, "train.idx": 34 + 4 * 12 + 5 * 8}


@pytest.mark.parametrize("form", [MEGATRON, DATATROVE])
def test_labels_are_not_dropped_without_a_word(tmp_path, form):
    spans = [[(0, 3)], [(1, 1)], [(0, 2), (4, 2)], [(0, 1)]]
    with pytest.raises(UsageError, match="2 of 4 documents") as caught:
        export_documents({"train": cache_of(DOCUMENTS, spans=spans)}, form, tmp_path / "out", FACTS)
    assert caught.value.where == "memory:2"
    assert "hf-disk" in caught.value.fix
    assert not list(tmp_path.iterdir())


def test_documents_that_all_have_loss_pass():
    reject_masked(cache_of(DOCUMENTS, spans=[[(0, 3)], [(0, 1), (1, 1)], [(0, 6)], [(0, 1)]]), "megatron")
    with pytest.raises(UsageError, match="1 of 4"):
        reject_masked(cache_of(DOCUMENTS, spans=[[(0, 3)], [(0, 2)], [], [(0, 1)]]), "megatron")


def test_a_split_without_documents(tmp_path):
    with pytest.raises(PlanError, match="no document is in validation"):
        export_documents(
            {"train": cache_of(DOCUMENTS), "validation": cache_of([])}, MEGATRON, tmp_path / "out", FACTS
        )
    assert not list(tmp_path.iterdir())


def test_a_damaged_cache_leaves_nothing(tmp_path):
    build(write_texts(tmp_path / "data.jsonl", texts(20)), tmp_path / "cache")
    cache = open_cache(tmp_path / "cache").documents()
    tamper(tmp_path / "cache")
    with pytest.raises(CorruptEntryError):
        export_documents({"train": cache}, MEGATRON, tmp_path / "out", FACTS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "data.jsonl"]
