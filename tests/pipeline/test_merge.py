import re
import shutil

import pytest
from damaged import flip
from small_builds import CASES, built, rows_of, tree

from latentcache import combine, open_cache, verify_cache
from latentcache.errors import (
    CacheDamagedError,
    CacheIncompleteError,
    CacheNotFoundError,
    StaleCacheError,
    UsageError,
)
from latentcache.pipeline.merge import merge_caches
from latentcache.store.paths import CachePaths
from latentcache.store.snapshot import open_snapshot


@pytest.fixture
def data(case, tmp_path):
    return case.data(tmp_path / "data", 12)


@pytest.fixture
def parts(case, data, tmp_path):
    return [built(case, data, out=tmp_path / f"part{n}", part=f"{n}/3").cache for n in range(3)]


def test_merging_again_copies_nothing_and_publishes_nothing(case, parts, tmp_path):
    merge_caches(parts, tmp_path / "merged")
    before = tree(tmp_path / "merged")
    report = merge_caches(parts, tmp_path / "merged")
    assert (report.published, report.snapshot) == (False, 1)
    assert tree(tmp_path / "merged") == before


@pytest.mark.parametrize("words", [["0/1", "0/1"], ["0/2", "1/2"]], ids=["whole", "parts"])
def test_copies_of_one_folder_are_merged_and_a_build_of_it_adds_nothing(case, data, tmp_path, words):
    copy = shutil.copytree(data, tmp_path / "elsewhere" / "copy")
    folders = zip((data, copy), words, ("one", "other"), strict=True)
    caches = [built(case, folder, part=part, out=tmp_path / name).cache for folder, part, name in folders]
    report = merge_caches(caches, tmp_path / "merged")
    assert (report.samples, report.cached) == (12, 12)
    assert (again := built(case, data, out=tmp_path / "merged")).encoded == 0
    assert verify_cache(again.cache).counts["ok"] == 12


def test_caches_of_different_data_are_not_merged_but_combined(case, data, tmp_path):
    other = case.data(tmp_path / "other", 13)
    caches = [built(case, folder, out=tmp_path / f"{folder.name}-cache").cache for folder in (data, other)]
    with pytest.raises(StaleCacheError, match="was built from other data than") as caught:
        merge_caches(caches, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    code = re.search(r"latentcache\.(combine\(.*?\]\));", caught.value.fix)[1]
    assert len(eval(code, {"combine": combine, "open_cache": open_cache})) == 25


def test_parts_of_data_that_changed_between_the_builds_are_built_again(case, data, parts, tmp_path, trusted):
    case.write(data, 12)
    built(case, data, out=parts[2], part="2/3")
    with pytest.raises(StaleCacheError, match="were added, removed or changed between the builds") as caught:
        merge_caches(parts, tmp_path / "merged")
    assert caught.value.fix == "run `latentcache build` on every part again, then merge"
    for number in range(3):
        built(case, data, out=parts[number], part=f"{number}/3")
        assert not built(case, data, out=parts[number], part=f"{number}/3").published
    assert merge_caches(parts, tmp_path / "merged").samples == 13


def test_a_missing_part_is_named(parts, tmp_path):
    with pytest.raises(UsageError, match="1/3"):
        merge_caches([parts[0], parts[2]], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_recipes_that_differ_are_rejected_by_field(tmp_path):
    case = CASES["latents"]
    data = case.data(tmp_path / "data", 4)
    half = built(case, data, out=tmp_path / "a", part="0/2").cache
    other = built(case, data, out=tmp_path / "b", part="1/2", recipe={"storage_dtype": "float32"}).cache
    with pytest.raises(StaleCacheError) as caught:
        merge_caches([half, other], tmp_path / "merged")
    assert caught.value.differences == (("latents.encoder.storage_dtype", "float16", "float32"),)
    assert not (tmp_path / "merged").exists()


def test_parts_of_a_kind_that_is_not_installed_are_rejected(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.preflight.field_kind", {}.get)
    with pytest.raises(UsageError, match="not installed"):
        merge_caches(parts, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_parts_of_different_versions_of_a_file_are_rejected(case, data, parts, tmp_path):
    names = {name: n for n, part in enumerate(parts) for name in rows_of(part, case.field)}
    path = next(path for path in sorted(data.iterdir()) if names[path.name] == 1)
    extra = shutil.copytree(data, tmp_path / "copy")
    case.write(extra, int(path.stem), seed=90)
    if path.suffix == ".jsonl":  # of the same size, as all these images are
        (extra / path.name).write_text(path.read_text().replace("document", "Document"))
    changed = built(case, extra, out=tmp_path / "changed").cache
    whole = built(case, data, out=tmp_path / "whole").cache
    with pytest.raises(StaleCacheError, match=path.name):
        merge_caches([whole, changed], tmp_path / "merged")


def test_unfinished_and_absent_parts_are_rejected(parts, tmp_path):
    (parts[1] / "BUILDING").write_text("{}")
    with pytest.raises(CacheIncompleteError, match="part1"):
        merge_caches(parts, tmp_path / "merged")
    with pytest.raises(CacheNotFoundError):
        merge_caches([parts[0], tmp_path / "nowhere"], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_damaged_entries_are_rejected_and_the_next_merge_goes_on(case, parts, tmp_path):
    snapshot = open_snapshot(parts[1])
    rows = snapshot.fields[case.field]
    path = CachePaths(parts[1]).data(snapshot.shards[int(rows.shard[0])])
    path.chmod(0o644)
    intact = path.read_bytes()
    offset = int(rows.offset[0])
    path.write_bytes(intact[:offset] + bytes([intact[offset] ^ 255]) + intact[offset + 1 :])
    with pytest.raises(CacheDamagedError, match="part1"):
        merge_caches(parts, tmp_path / "merged")
    paths = CachePaths(tmp_path / "merged")
    copied = set(paths.sealed_shards())
    assert copied
    assert not paths.current.exists()
    path.write_bytes(intact)
    assert merge_caches(parts, tmp_path / "merged").samples == 12
    assert copied < set(paths.sealed_shards())


@pytest.mark.parametrize("file", ["columns.safetensors", "manifest.json", "rejected.jsonl"])
def test_a_damaged_part_is_named_with_its_fix(parts, tmp_path, file):
    path = CachePaths(parts[1]).snapshot(1) / file
    if file == "columns.safetensors":
        flip(path, 9)
    else:
        path.write_bytes(b"nothing")
    with pytest.raises(CacheDamagedError) as caught:
        merge_caches(parts, tmp_path / "merged")
    assert caught.value.where == str(path)
    assert f"`latentcache verify {parts[1]} --full`" in caught.value.fix
    assert not (tmp_path / "merged").exists()


def test_a_part_keeps_its_number_and_rejects_another(case, data, parts):
    assert built(case, data, out=parts[1]).plan.part == "1/3"
    with pytest.raises(UsageError, match="1/3"):
        built(case, data, out=parts[1], part="2/3")
    with pytest.raises(UsageError, match="1/3"):
        built(case, data, out=parts[1], part="0/1")
