"""Several fields of one data set: one snapshot, nothing encoded twice, failures per field."""

import shutil

import numpy as np
import pytest
from small_builds import CASES, built

from latentcache.errors import UsageError
from latentcache.fields.registry import field_kind, field_kinds
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot

LATENTS, EDGES = CASES["latents"], CASES["edge_map"]


@pytest.fixture
def data(tmp_path):
    return LATENTS.data(tmp_path / "data", 3)


def test_a_field_without_its_kind_or_input_is_rejected(data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="not installed"):
        built(LATENTS, data, fields={"no_such_field": None})
    with pytest.raises(UsageError, match="record"):
        built(LATENTS, data, fields={"input_ids": field_kind("input_ids").settings(tokenizer="stub")})
    built(LATENTS, data, fields=LATENTS.fields() | EDGES.fields())
    kinds = dict(field_kinds())
    del kinds["edge_map"]
    monkeypatch.setattr("latentcache.pipeline.preflight.field_kind", kinds.get)
    with pytest.raises(UsageError, match="edge_map"):
        built(LATENTS, data, fields={})


def test_content_hashes_are_shared_between_fields(data):
    """The second field knows duplicates before it reads files."""
    for number in range(4, 8):
        shutil.copy(LATENTS.path(data, 0), LATENTS.path(data, number))
    report = built(LATENTS, data, fields=EDGES.fields() | LATENTS.fields())
    assert [field.encoded for field in report.fields.values()] == [3, 3]
    content = np.asarray(open_snapshot(report.cache).samples.inputs["image"].content)
    assert content.any(axis=1).all()


def test_a_shard_that_is_gone_takes_the_items_of_its_field_only(data):
    both = LATENTS.fields() | EDGES.fields()
    cache = built(LATENTS, data, fields=both).cache
    rows = open_snapshot(cache).fields["edge_map"]
    shutil.rmtree(CachePaths(cache).shard(rows.shards[int(rows.shard[0])]))
    report = built(LATENTS, data, fields=both)
    assert {name: field.encoded for name, field in report.fields.items()} == {"latents": 0, "edge_map": 3}
    assert {len(rows) for rows in open_snapshot(cache).fields.values()} == {3}


def test_a_new_sample_that_a_field_lacks_moves_no_item_of_it_to_another_sample(data):
    for number in range(3):
        LATENTS.path(data, number).with_suffix(".txt").write_text(f"caption {number}")
    both = LATENTS.fields() | {"prompt_embeds": field_kind("prompt_embeds").settings(text_encoder="stub")}
    built(LATENTS, data, fields=both)
    shutil.copy(LATENTS.path(data, 1), data / "0.png")
    snapshot = open_snapshot(built(LATENTS, data, fields=both).cache)
    owners = {name: [snapshot.samples.names[row] for row in rows.sample] for name, rows in snapshot.fields.items()}
    old = [f"{number:03}.png" for number in range(3)]
    assert owners == {"latents": ["0.png", *old], "prompt_embeds": old}
