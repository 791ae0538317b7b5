"""A kind of field of another package has every feature.

The toy kind ``edge_map`` is one ragged uint8 tensor per image. The package does not name it.
"""

import subprocess

import numpy as np
import pytest
from commands import ROOT, finished, look, start
from damaged import damage_payload
from kinds import KINDS, TOY, forget_kinds, stored

from latentcache import open_cache
from latentcache.fields import registry
from latentcache.store.snapshot import open_snapshot
from tests.fields.edge_map import EdgeProducer, EdgeRecipe

EDGES, FIELD = KINDS["edge_map"], ("--field", TOY)
STUB = ("--model", "stub", "--resolution", 64, "--bucket-step", 32)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Only ``--field`` registers the kind, and only for this test."""
    forget_kinds(monkeypatch)
    yield
    monkeypatch.undo()
    registry.field_kinds.cache_clear()


@pytest.fixture
def data(tmp_path):
    return EDGES.data(tmp_path / "data", 8)


@pytest.fixture
def cache(data, tmp_path):
    assert EDGES.build(data, tmp_path / "cache").json["counts"]["encoded"] == 8
    return tmp_path / "cache"


def command(*words, variables=None, timeout=60):
    return finished(start(*words, "--json", variables={"LATENTCACHE_FIELDS": "", **(variables or {})}), timeout)


def edges(pixels):
    return EdgeProducer({}, EdgeRecipe(), None).edges("", pixels)


def test_no_module_names_the_kind():
    found = subprocess.run(["grep", "-rniE", "edge_?map", "latentcache"], cwd=ROOT, capture_output=True, text=True)
    assert [line for line in found.stdout.splitlines() if not line.startswith("Binary")] == []


def test_it_is_built_beside_another_field_and_shown(data, tmp_path):
    cache = tmp_path / "cache"
    alone = command("build", data, "--out", cache, *FIELD)
    assert (alone.status, alone.json["counts"]["encoded"], list(alone.json["fields"])) == (0, 8, ["edge_map"])
    both = command("build", data, "--out", cache, *FIELD, "--fields", "latents,edge_map", *STUB).json
    assert {name: (one["encoded"], one["cached"]) for name, one in both["fields"].items()} == {
        "latents": (8, 0),
        "edge_map": (0, 8),
    }
    info = look("info", cache, *FIELD, "--entries", "--json").json
    assert (info["counts"]["samples"], info["counts"]["entries"]) == (8, 16)
    field = info["fields"]["edge_map"]
    assert (field["items"], field["dtype"], field["installed"], field["recipe"]) == (
        8,
        "uint8",
        True,
        {"threshold": 16},
    )
    edge_maps = [entry for entry in info["entries"] if entry["field"] == "edge_map"]
    assert {tuple(entry["paths"]) for entry in edge_maps} == {(f"{number:03}.png",) for number in range(8)}
    assert {tuple(entry["shape"]) for entry in edge_maps} == {(48 + number, 8) for number in range(8)}
    assert {entry["key"] for entry in edge_maps} == set(stored(cache, "edge_map"))
    text = look("info", cache, *FIELD).out
    assert "edge_map (recipe" in text
    assert "8 items" in text
    assert look("plan", cache, *FIELD, "--batch-size", 4, "--json").json["exit_code"] == 0
    planned = look("plan", data, *FIELD, "--fields", "edge_map", "--batch-size", 4, "--json")
    assert planned.status == 0, planned.err
    assert EDGES.verify(cache, "--full").json["counts"]["ok"] == 8


def test_its_options_are_those_of_its_settings(data, cache):
    assert "--edge-threshold" in look("build", *FIELD, "--help").out
    words = (*EDGES.build_words(data, cache, "--edge-threshold", 40)[1:], "--json")
    planned = look("inspect", *words).json["plan"]["fields"]["edge_map"]
    assert planned["changed"] == [{"setting": "threshold", "cached": 16, "requested": 40}]
    stale = EDGES.verify(cache, "--edge-threshold", 40)
    assert (stale.status, stale.json["counts"]["stale"]) == (1, 8)
    assert EDGES.build(data, cache, "--edge-threshold", 40).json["counts"]["encoded"] == 8
    assert EDGES.build(data, cache).json["counts"]["encoded"] == 0, "settings that are not given follow the cache"


def test_it_is_found_by_its_entry_point(data, tmp_path):
    about = tmp_path / "site" / "edge_kind-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: edge-kind\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{registry.GROUP}]\nedge_map = {TOY}\n")
    found = {"PYTHONPATH": f"{tmp_path / 'site'}:{ROOT}"}
    cache = tmp_path / "cache"
    words = ("build", data, "--out", cache, "--fields", "edge_map", "--workers", 2)
    assert command(*words, variables=found).json["counts"]["encoded"] == 8
    assert command("verify", cache, "--full", variables=found).json["counts"]["ok"] == 8
    assert command("build", data, "--out", cache, variables=found).json["counts"]["cached"] == 8
    assert command(*words).json["error"]["slug"] == "usage"


def test_it_loads_padded_with_a_mask(data, cache, tmp_path):
    from PIL import Image

    assert EDGES.build(data, cache, "--fields", "latents,edge_map", *STUB).status == 0
    seen = 0
    for batch in open_cache(cache).loader(batch_size=4, prefetch=0):
        assert batch["edge_map"].shape == (4, 55, 8)
        assert batch["latents"].shape[0] == 4
        for name, values, mask in zip(batch["names"], batch["edge_map"], batch["edge_map_mask"], strict=True):
            with Image.open(data / name) as image:
                expected = edges(np.asarray(image))
            assert np.array_equal(values[mask], expected)
            assert (values[~mask] == 255).all()
            assert mask.sum() == len(expected)
            seen += 1
    assert seen == 8
    only = next(iter(open_cache(cache).loader(batch_size=2, fields=["edge_map"])))
    assert "latents" not in only


def test_a_cache_of_an_uninstalled_kind_is_checked(data, cache):
    assert EDGES.build(data, cache, "--fields", "latents,edge_map", *STUB).status == 0
    wanted = stored(cache, "edge_map")
    done = command("verify", cache, "--full")
    assert (done.status, done.json["counts"]["ok"], done.json["checked"]["payloads"]) == (0, 8, 9)
    assert "plan and values of edge_map (its kind is not installed)" in done.json["not_compared"]
    info = command("info", cache, "--entries").json
    assert (info["fields"]["edge_map"]["installed"], info["counts"]["entries"]) == (False, 16)
    rejected = command("build", data, "--out", cache)
    assert (rejected.status, "--field" in rejected.json["error"]["fix"]) == (2, True)
    assert command("gc", cache, "--apply", "--keep", 1).status == 0
    assert command("plan", cache, "--batch-size", 2).status == 0
    assert stored(cache, "edge_map") == wanted
    damage_payload(cache, field="edge_map")
    found = command("verify", cache, "--full")
    assert (found.status, found.json["counts"]["corrupt"]) == (1, 8)
    registry.field_kinds.cache_clear()
    registry.register([TOY])
    assert EDGES.verify(cache, "--repair", "--yes").json["repair"]
    assert EDGES.build(data, cache).status == 0
    assert stored(cache, "edge_map") == wanted


@pytest.mark.slow
def test_only_images_that_crash_or_hang_are_quarantined(data, tmp_path):
    for number, name in enumerate(("poison", "endless")):
        EDGES.write(data, 50 + number).rename(data / f"{name}.png")
    deadline = {"LATENTCACHE_WORKER_DEADLINE": "1"}
    done = EDGES.finish(data, tmp_path / "cache", "--workers", 2, delay_ms=0, variables=deadline, timeout=120)
    counts = done.json["counts"]
    assert (done.status, counts["encoded"], counts["quarantined"]) == (1, 8, 2), done.err
    reasons = {item["path"]: item["reason"] for item in done.json["items"]}
    assert reasons == {"poison.png": "encoder-crash", "endless.png": "encoder-crash"}
    assert [one.target for one in open_snapshot(tmp_path / "cache").rejected]
    assert EDGES.counts(tmp_path / "cache", "--full") == {"ok": 8, "quarantined": 2}
