import numpy as np
from small_tokens import build, opened, spoken, texts, write_texts

from latentcache.store.generation import Rows
from latentcache.store.layout import CacheLayout
from latentcache.store.token_moves import republish_any


def test_documents_of_blocks_that_stay_keep_their_order_and_ids(tmp_path):
    lines = texts(200, longest=4000)
    build(write_texts(tmp_path / "a.jsonl", lines), tmp_path / "cache")
    old, _ = opened(tmp_path / "cache")
    assert len(old.blocks) > 1
    rows = Rows(**{name: getattr(old.rows, name)[1:] for name in Rows.__dataclass_fields__})
    number = republish_any(CacheLayout(tmp_path / "cache"), old, rows=rows, shards=old.shards, complete=False)
    new, reader = opened(tmp_path / "cache")
    stayed = np.flatnonzero(old.documents.block > 0)
    assert (new.number, new.complete, new.manifest["replaces"]) == (number, False, old.number)
    assert spoken(reader) == [lines[number] for number in stayed]
    assert new.fingerprint != old.fingerprint
    assert new.manifest["tokens"]["documents"] == len(stayed)
    assert new.documents.line.tolist() == (stayed + 1).tolist()
