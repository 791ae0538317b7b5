"""Several fields of one data set: one snapshot, nothing encoded twice, failures per field."""

import shutil

import numpy as np
import pytest
from small_builds import CASES, Recorder, built, draw, rows_of, settings

from latentcache.errors import UsageError
from latentcache.fields.registry import field_kind, field_kinds
from latentcache.pipeline.build import plan_build
from latentcache.store.snapshot import open_snapshot

LATENTS, EDGES = CASES["latents"], CASES["edge_map"]


@pytest.fixture
def data(tmp_path):
    return LATENTS.data(tmp_path / "data", 3)


def test_adding_a_field_encodes_nothing_else_again(data):
    cache = built(LATENTS, data).cache
    latents = rows_of(cache, "latents")
    report = built(EDGES, data)
    assert {name: (one.encoded, one.cached) for name, one in report.fields.items()} == {
        "latents": (0, 3),
        "edge_map": (3, 0),
    }
    assert (report.encoded, report.cached, report.snapshot) == (3, 3, 2)
    assert rows_of(cache, "latents") == latents
    assert set(open_snapshot(cache).fields) == {"latents", "edge_map"}
    plain = built(LATENTS, data, fields={})
    assert (plain.encoded, plain.cached, set(plain.fields)) == (0, 6, {"latents", "edge_map"})


def test_two_fields_of_a_first_build_are_published_together(data):
    fields = LATENTS.said() | EDGES.said()
    shutil.copy(LATENTS.path(data, 0), LATENTS.path(data, 8))
    report = built(LATENTS, data, fields=fields)
    assert (report.encoded, report.snapshot, report.duplicates) == (6, 1, 1)
    plan = plan_build(settings(LATENTS, data, fields={}))
    assert (plan.to_make, plan.cached) == (0, 6)


def test_failures_are_per_field(data):
    draw(data / "wide.png", 5, height=8, width=2000)  # too extreme for a bucket, fine for edges
    report = built(LATENTS, data, fields=LATENTS.said() | EDGES.said())
    assert [(one.name, one.target) for one in report.rejected] == [("wide.png", "latents")]
    assert (report.samples, report.quarantined) == (4, 1)
    snapshot = open_snapshot(report.cache)
    assert len(snapshot.samples) == 4
    assert (len(snapshot.fields["latents"]), len(snapshot.fields["edge_map"])) == (3, 4)
    assert [one.target for one in snapshot.rejected] == ["latents"]
    assert "wide.png" not in rows_of(report.cache, "latents")
    again = built(LATENTS, data, fields={})
    assert (again.encoded, [one.target for one in again.rejected]) == (0, ["latents"])


def test_a_sample_that_every_field_rejects_is_counted_once(data):
    path = LATENTS.spoil(data, 9)
    report = built(LATENTS, data, fields=LATENTS.said() | EDGES.said())
    assert {one.name for one in report.rejected} == {path.name}
    assert (report.samples, report.quarantined) == (4, 1)
    assert len(open_snapshot(report.cache).samples) == 3


def test_a_field_without_its_kind_or_input_is_refused(data, tmp_path, monkeypatch):
    with pytest.raises(UsageError, match="not installed"):
        built(LATENTS, data, fields={"no_such_field": None})
    with pytest.raises(UsageError, match="record"):
        built(LATENTS, data, fields={"input_ids": field_kind("input_ids").settings(tokenizer="stub")})
    built(LATENTS, data, fields=LATENTS.said() | EDGES.said())
    kinds = dict(field_kinds())
    del kinds["edge_map"]
    monkeypatch.setattr("latentcache.pipeline.existing.field_kind", kinds.get)
    with pytest.raises(UsageError, match="edge_map"):
        built(LATENTS, data, fields={})


def test_the_first_field_that_the_data_allow_is_the_default(tmp_path):
    records, observer = CASES["input_ids"], Recorder()
    built(records, records.data(tmp_path / "docs", 2), observer=observer, fields=records.said())
    assert set(observer.plans[0].fields) == {"input_ids"}
    plan = plan_build(settings(LATENTS, LATENTS.data(tmp_path / "images", 2), out=tmp_path / "new", fields={}))
    assert list(plan.fields) == ["latents"]


def test_contents_that_one_field_read_spare_the_next_one(data):
    """The second field knows duplicates before it reads."""
    for number in range(4, 8):
        shutil.copy(LATENTS.path(data, 0), LATENTS.path(data, number))
    report = built(LATENTS, data, fields=EDGES.said() | LATENTS.said())
    assert [one.encoded for one in report.fields.values()] == [3, 3]
    content = np.asarray(open_snapshot(report.cache).samples.inputs["image"].content)
    assert content.any(axis=1).all()
