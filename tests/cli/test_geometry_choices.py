import warnings

import numpy as np
import pytest
from small_cache import SMALL, build, draw

from latentcache import open_cache
from latentcache.geometry.sizes import Size
from latentcache.store.snapshot import open_snapshot


@pytest.fixture
def data(tmp_path):
    """Two images wider than their bucket, and a small one."""
    for number, size in enumerate([(160, 96), (150, 96), (24, 20)]):
        draw(tmp_path / "data" / f"p{number}.png", size, seed=number)
    return tmp_path / "data"


def opened(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return open_cache(folder)


def notes(done):
    return [item for item in done.json["items"] if (item["category"], item["reason"]) == ("note", "upscaled")]


def test_enlarged_images_are_counted_and_the_worst_is_named(run, data, tmp_path):
    done = run("build", data, *SMALL, "--out", tmp_path / "c", "--json")
    (note,) = notes(done)
    assert (note["path"], note.get("count", 1)) == ("p2.png", 1)
    assert "3 times at most: p2.png from 20x24 to cover 56x72 pixels" in note["found"]
    again = run("build", data, *SMALL, "--out", tmp_path / "c", "--json").json
    assert (again["published"], again["counts"]["encoded"]) == (False, 0)
    assert "upscaled" in run("build", data, *SMALL, "--out", tmp_path / "c").out


def test_no_upscaling_encodes_only_the_enlarged_image(run, data, tmp_path):
    build(data, tmp_path / "c")
    done = run("build", data, "--no-upscale", "--out", tmp_path / "c", "--json")
    assert (done.json["counts"]["encoded"], notes(done)) == (1, [])
    rows = open_snapshot(tmp_path / "c").fields["latents"]
    assert sorted(rows.groups[group].label for group in np.asarray(rows.group)) == ["16x24", "48x80", "48x80"]
    assert "never enlarged" in run("info", tmp_path / "c").out
    assert run("build", data, "--out", tmp_path / "c", "--json").json["counts"]["encoded"] == 0  # follows the cache
    assert notes(run("build", data, "--upscale", "--out", tmp_path / "c", "--json"))


def test_small_images_are_rejected_until_the_limit_changes(run, data, tmp_path):
    words = ["--out", tmp_path / "c", "--allow-failed", 1, "--json"]
    done = run("build", data, *SMALL, "--min-pixels", 500, *words)
    assert [(item["path"], item["reason"]) for item in done.json["items"]] == [("p2.png", "too-few-pixels")]
    assert run("verify", tmp_path / "c", "--data", data, "--json").json["counts"]["quarantined"] == 1
    assert run("build", data, "--min-pixels", 480, *words).json["counts"] | {"no_caption": 0} == {
        "samples": 3, "encoded": 1, "cached": 2, "duplicates": 0, "quarantined": 0, "no_caption": 0,
    }  # fmt: skip


def test_random_crops_are_stored_served_and_verified(run, data, tmp_path):
    square = {"resolutions": None, "buckets": (Size(48, 48),)}
    build(data, tmp_path / "c", crop="random", crop_variants=3, flip=True, **square)
    rows = open_snapshot(tmp_path / "c").fields["latents"]
    crop, variant = np.asarray(rows.columns["crop"]), np.asarray(rows.variant)
    lefts = crop[:, 1].reshape(3, 6)
    assert variant.reshape(3, 6).tolist() == [list(range(6))] * 3
    resize, group = np.asarray(rows.columns["resize"])[:, 1].reshape(3, 6), np.asarray(rows.group)
    width = np.array([bucket.dims[2] for bucket in rows.groups])[group].reshape(3, 6)
    assert (lefts[:, 3:] == (resize - width - lefts)[:, :3]).all()
    assert len(np.unique(lefts[0])) > 2
    done = run("verify", tmp_path / "c", "--full", "--reencode", 18, "--json")
    assert (done.status, done.json["counts"]["ok"]) == (0, 3)
    assert run("build", data, "--out", tmp_path / "c", "--json").json["counts"]["encoded"] == 0


def test_crops_rotate_over_epochs(data, tmp_path):
    build(data, tmp_path / "c", crop="random", crop_variants=3)
    cache = opened(tmp_path / "c")
    rows = open_snapshot(tmp_path / "c").fields["latents"]
    stored = dict(zip(map(bytes, rows.row_keys()), np.asarray(rows.columns["crop"]).tolist(), strict=True))
    loader, served = cache.loader(batch_size=1), set()
    for epoch in range(12):
        loader.set_epoch(epoch)
        for batch in loader:
            key = batch["keys"]["latents"][0].numpy().tobytes()
            served.add((batch["names"][0], key[1]))
            assert batch["crop_top_left"][0].tolist() == stored[key]
    assert served == {(f"p{number}.png", variant) for number in range(3) for variant in range(3)}
    first = {int(batch["keys"]["latents"][0][1]) for batch in cache.read(augment=False).loader(batch_size=1)}
    assert first == {0}
