import shutil

import numpy as np
import pytest
from small_builds import CASES, arrays_of, built, draw, reasons, rows_of, settings, tree

from latentcache.pipeline.build import plan_build
from latentcache.store.lock import builder_lock


@pytest.fixture
def data(case, tmp_path):
    return case.data(tmp_path / "data", 4)


def test_renamed_files_and_moved_folders_encode_nothing(case, data, tmp_path):
    cache = built(case, data).cache
    path = case.path(data, 0)
    path.rename(path.with_stem("zzz"))
    assert (built(case, data).encoded, len(rows_of(cache, case.field))) == (0, 4)
    shutil.copytree(data, tmp_path / "elsewhere")
    assert built(case, tmp_path / "elsewhere", out=cache).encoded == 0
    moved = shutil.move(cache, tmp_path / "moved")
    assert built(case, data, out=tmp_path / "moved").encoded == 0
    assert moved == str(tmp_path / "moved") or moved == tmp_path / "moved"


def test_a_build_that_publishes_nothing_removes_what_a_killed_one_left(case, data, trusted):
    cache = built(case, data).cache
    unfinished = cache / "snapshots" / "000002"
    unfinished.mkdir()
    for path in (unfinished / "columns.safetensors", unfinished / "manifest.json.tmp", cache / "CURRENT.tmp"):
        path.write_bytes(b"partial")
    assert not built(case, data).published
    assert not [*cache.glob("*.tmp"), *cache.glob("snapshots/000002")]


@pytest.mark.parametrize("workers", [1, 2])
def test_the_number_of_workers_changes_no_row_and_no_item(case, tmp_path, workers):
    data = case.data(tmp_path / "data", 12)
    serial = built(case, data, out=tmp_path / "one", workers=0).cache
    other = built(case, data, out=tmp_path / "other", workers=workers, batch_size=3, commit_every=2).cache
    assert rows_of(serial, case.field) == rows_of(other, case.field)
    arrays, other_arrays = arrays_of(serial, case.field), arrays_of(other, case.field)
    for name, values in arrays.items():
        assert all(np.array_equal(a, b) for a, b in zip(values, other_arrays[name], strict=True))


def test_rejected_samples_are_quarantined_until_they_change(case, data, trusted, no_runs):
    path = case.spoil(data, 7)
    report = built(case, data)
    assert list(reasons(report)) == [path.name]
    assert report.rejected[0].hint
    assert report.rejected[0].detail
    assert (report.encoded, report.quarantined, report.samples, report.too_many_failed) == (4, 1, 5, True)
    assert "cache, snapshot 1: 5 samples, 4 encoded, 1 quarantined" in repr(report)
    assert path.name not in rows_of(report.cache, case.field)
    assert not built(case, data, allow_failed="20%").too_many_failed
    with no_runs():
        again = built(case, data, allow_failed="0")  # unchanged rejected samples are not read again
        if case.suffix == ".png":  # rejected by a worker
            with pytest.raises(AssertionError, match="worker"):
                built(case, data, retry_failed=True)
    assert (reasons(again), again.published) == (reasons(report), True)  # --allow-failed differs
    case.write(data, 7)
    assert (built(case, data).encoded, reasons(built(case, data))) == (1, {})


def test_a_rejected_image_is_read_again_if_the_answer_may_be_another(tmp_path, trusted, monkeypatch):
    case = CASES["latents"]
    data = case.data(tmp_path / "data", 2)
    case.spoil(data, 7)
    (reason,) = reasons(built(case, data)).values()
    assert plan_build(settings(case, data)).to_make == 0
    assert plan_build(settings(case, data, recipe={"storage_dtype": "float32"})).to_make == 3
    with monkeypatch.context() as patch:
        patch.setattr("latentcache.encoders.vae.describe.installed", lambda names: dict.fromkeys(names, "0"))
        assert plan_build(settings(case, data)).to_make == 1
    monkeypatch.setattr("latentcache.pipeline.diff.AGAIN", {reason})
    assert plan_build(settings(case, data)).to_make == 1


@pytest.mark.parametrize("name", ["latents", "edge_map"])
def test_samples_that_are_rejected_do_not_stop_duplicates_of_others(name, tmp_path):
    case = CASES[name]
    data = case.data(tmp_path / "data", 2)
    shutil.copy(case.spoil(data, 7), case.path(data, 8))
    report = built(case, data)
    assert set(reasons(report)) == {case.path(data, 7).name, case.path(data, 8).name}
    assert len(set(reasons(report).values())) == 1


def test_a_plan_takes_no_lock_and_writes_nothing(case, data, tmp_path):
    plan = plan_build(settings(case, data))
    assert (plan.to_make, plan.samples, len(plan.fields[case.field].todo)) == (4, 4, 4)
    assert not (tmp_path / "cache").exists()
    cache = built(case, data).cache
    case.write(data, 9)
    before = tree(cache)
    with builder_lock(cache / "builder.lock"):
        plan = plan_build(settings(case, data))
    assert (plan.to_make, plan.cached) == (1, 4)
    assert tree(cache) == before


def test_a_further_resolution_encodes_only_itself(tmp_path):
    case = CASES["latents"]
    data = case.data(tmp_path / "data", 3)
    built(case, data)
    report = built(case, data, recipe={"resolutions": (64, 128)})
    assert (report.encoded, report.cached) == (3, 3)
    assert {len(keys) for keys in rows_of(report.cache, "latents").values()} == {2}
    flipped = built(case, data, recipe={"resolutions": (64,), "flip": True})
    assert (flipped.encoded, flipped.cached) == (3, 3)
    assert {len(keys) for keys in rows_of(report.cache, "latents").values()} == {2}


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_a_file_with_other_bytes_and_the_same_pixels_counts_as_cached(tmp_path, suffix):
    from small_builds import jpeg_with_comment, png_with_text

    case = CASES["latents"]
    data = case.data(tmp_path / "data", 2)
    path = draw(data / f"extra{suffix}", 33)
    cache = built(case, data).cache
    (old,), stored = rows_of(cache, "latents")[path.name], arrays_of(cache, "latents")[path.name]
    change = png_with_text if suffix == ".png" else jpeg_with_comment
    path.write_bytes(change(path.read_bytes(), "another comment"))
    report = built(case, data)
    assert (report.encoded, report.cached) == (0, 3)
    (new,) = rows_of(cache, "latents")[path.name]
    assert new != old
    assert np.array_equal(arrays_of(cache, "latents")[path.name], stored)
