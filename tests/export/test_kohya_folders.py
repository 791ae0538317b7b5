"""Folders for sd-scripts and lora-scripts: what is in them, what is refused, and what later exports change."""

import json
import tomllib

import numpy as np
import pytest
import trainer_exports
from captioned_images import FOUR, data_and_cache, files_below
from made_archives import png, write_tar
from PIL import Image
from small_cache import build, draw

from latentcache import open_cache
from latentcache.cli.app import main

LIKE = trainer_exports.LIKE["kohya"]
EXPORT = ("--to", "kohya", "--architecture", "sdxl")


@pytest.fixture
def kohya(tmp_path):
    """A data folder and its cache with the geometry of kohya."""
    return data_and_cache(tmp_path, **LIKE)


def arrays(path):
    with np.load(path) as archive:
        return dict(archive)


@pytest.mark.parametrize(
    ("release", "name", "suffix"),
    [
        ("stable", "p0.npz", ""),
        ("lora-scripts", "p0.npz", ""),
        ("plain", "p0_0400x0240_sdxl.npz", ""),
        ("suffixed", "p0_0400x0240_sdxl.npz", "_{h}x{w}"),
    ],
)
def test_each_form_holds_the_values_of_the_cache(run, kohya, release, name, suffix):
    data, cache, out = kohya
    done = run("export", cache, out, *EXPORT, "--release", release, "--json")
    assert (done.status, done.json["samples"], done.json["written"]) == (0, 4, 13)
    written = arrays(out / "1_cats" / name)
    loader = open_cache(cache).read(scaled=False).loader(batch_size=1, seed=None)
    batch = next(batch for batch in (loader.batch([row]) for row in range(4)) if batch["names"] == ["p0.png"])
    latents = batch["latents"][0].float().numpy()
    at = suffix.format(h=latents.shape[1], w=latents.shape[2])
    assert set(written) == {f"latents{at}", f"original_size{at}", f"crop_ltrb{at}"}
    assert written[f"latents{at}"].dtype == np.float32
    np.testing.assert_array_equal(written[f"latents{at}"], latents)
    assert written[f"original_size{at}"].tolist() == [400, 240]
    left, top, right, bottom = written[f"crop_ltrb{at}"].tolist()
    assert (left, right) == (0, 320)
    assert bottom - top == pytest.approx(320 * 240 / 400)
    assert (out / "1_cats/p0.txt").read_text("utf-8") == "caption 0, tag"
    assert (out / "1_cats/p0.png").samefile(data / "p0.png")
    config = tomllib.loads((out / "dataset.toml").read_text("utf-8"))
    (dataset,) = config["datasets"]
    assert (dataset["resolution"], dataset["enable_bucket"], dataset["min_bucket_reso"]) == ([256, 256], True, 128)
    assert dataset["subsets"] == [{"image_dir": f"{out}/1_cats", "num_repeats": 1, "class_tokens": "cats"}]


def test_flips_and_several_resolutions_share_a_file(run, kohya):
    data, cache, out = kohya
    build(data, cache, **LIKE | {"resolutions": (256, 320), "flip": True})
    assert run("export", cache, out, *EXPORT, "--release", "suffixed").status == 0
    written = arrays(out / "1_cats/p2_0300x0300_sdxl.npz")
    kinds = ("latents", "latents_flipped", "original_size", "crop_ltrb")
    assert set(written) == {f"{kind}_{side}x{side}" for kind in kinds for side in (32, 40)}
    assert not np.array_equal(written["latents_32x32"], written["latents_flipped_32x32"])
    refused = run("export", cache, out, *EXPORT, "--release", "stable", "--json")
    assert "holds one resolution" in refused.error["what"]


def test_an_interrupted_export_goes_on(run, kohya, monkeypatch):
    _, cache, out = kohya
    options = ("export", str(cache), str(out), *EXPORT, "--release", "stable")

    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("latentcache.cli.progress.ProgressDisplay.counted_up", stop)
        assert main(list(options)) == 130
    assert not out.exists()
    partial = out.with_name("out.partial")
    with (partial / "latentcache.files").open("a") as listing:
        listing.write('{"name": "torn')
    done = run(*options, "--json").json
    assert (done["kept"], done["written"]) == (3, 10)
    assert not partial.exists()
    assert run("verify", out).status == 0


def _swap(first, second):
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)


def _changed(path, change):
    np.savez(path, **{name: change(value) if name == "latents" else value for name, value in arrays(path).items()})


FIRST, LAST = "p0_0400x0240_sdxl.npz", "p9_0400x0240_sdxl.npz"
WRONG = {
    "values of two images": (lambda out: _swap(out / FIRST, out / LAST), {FIRST: "changed", LAST: "changed"}),
    "sides in a name": (lambda out: (out / FIRST).rename(out / "p0_0240x0400_sdxl.npz"), {FIRST: "missing"}),
    "sides of a value": (lambda out: _changed(out / LAST, lambda value: value.swapaxes(1, 2)), {LAST: "changed"}),
    "scale": (lambda out: _changed(out / LAST, lambda value: value * np.float32(0.13025)), {LAST: "changed"}),
    "captions": (lambda out: _swap(out / "p1.txt", out / "p2.txt"), {"p1.txt": "changed", "p2.txt": "changed"}),
    "no file": (lambda out: (out / LAST).unlink(), {LAST: "missing"}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_verify_names_one_wrong_item_of_ten_and_export_mends_it(run, kohya, wrong):
    data, cache, out = kohya
    for number in range(4, 10):
        draw(data / f"p{number}.png", FOUR[0], seed=number)
    build(data, cache, **LIKE)
    options = ("export", cache, out, *EXPORT, "--release", "plain")
    run(*options)
    break_it, expected = WRONG[wrong]
    break_it(out / "1_cats")
    done = run("verify", out, "--json")
    problems = {finding["path"]: finding["problem"] for finding in done.json["findings"]}
    assert (done.status, problems) == (1, {f"1_cats/{name}": problem for name, problem in expected.items()})
    run(*options)
    assert run("verify", out).status == 0


def test_undo_deletes_what_was_written_and_nothing_else(run, kohya):
    data, cache, out = kohya
    run("export", cache, out, *EXPORT, "--release", "stable")
    (out / "1_cats/mine.txt").write_text("mine")
    (out / "1_cats/p1.txt").write_text("I changed this")
    done = run("export", "--undo", out, "--json")
    assert (done.status, done.json["deleted"], done.json["kept"]) == (0, 12, ["1_cats/p1.txt"])
    assert files_below(out) == ["1_cats/mine.txt", "1_cats/p1.txt"]
    assert len(files_below(data)) == 8
    assert "no export" in run("export", "--undo", out, "--json").error["what"]


def test_beside_the_images_nothing_of_anybody_else_is_touched(run, kohya):
    data, cache, _ = kohya
    before = files_below(data)
    options = ("export", cache, data, *EXPORT, "--release", "stable", "--beside", "--json")
    (data / "p1.npz").write_bytes(b"somebody's")
    assert "no export wrote it" in run(*options).error["what"]
    (data / "p1.npz").unlink()
    assert run(*options).json["kept"] >= 1  # it goes on
    assert set(files_below(data)) - set(before) == {
        *(f"p{number}.npz" for number in range(4)), "latentcache.files", "latentcache.json",
    }  # fmt: skip
    assert build(data, cache, **LIKE).encoded == 0  # DATA is read as before
    assert run("export", "--undo", data).status == 0
    assert files_below(data) == before


def test_images_that_exif_turns_are_upright_copies(run, tmp_path):
    data = tmp_path / "cats"
    data.mkdir()
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (240, 400, 3), dtype=np.uint8))
    exif = pixels.getexif()
    exif[0x0112] = 6
    pixels.save(data / "turned.jpg", exif=exif)
    build(data, tmp_path / "cache", **LIKE)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--release", "plain", "--json")
    assert done.json["redrawn"] == 1
    assert (tmp_path / "out/1_cats/turned_0240x0400_sdxl.npz").exists()
    with Image.open(tmp_path / "out/1_cats/turned.jpg") as upright:
        assert (upright.size, upright.getexif().get(0x0112)) == ((240, 400), None)


def test_formats_that_the_trainer_does_not_read_are_written_as_png(run, tmp_path):
    pixels = draw(tmp_path / "cats/a.tiff", (300, 300))
    (tmp_path / "cats/a.txt").write_text("first\nsecond", "utf-8")
    build(tmp_path / "cats", tmp_path / "cache", **LIKE, source={"caption_lines": "all"})
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--release", "stable", "--json")
    assert (done.json["redrawn"], done.json["several_lines"]) == (1, 0)
    assert files_below(tmp_path / "out/1_cats") == ["a.npz", "a.png", "a.txt"]
    with Image.open(tmp_path / "out/1_cats/a.png") as written, Image.open(pixels) as source:
        np.testing.assert_array_equal(np.asarray(written), np.asarray(source))


def test_rejected_images_are_counted(run, tmp_path):
    draw(tmp_path / "cats/a.png", (300, 300))
    (tmp_path / "cats/b.png").write_bytes(b"no image")
    build(tmp_path / "cats", tmp_path / "cache", **LIKE)
    done = run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--release", "stable")
    assert "1 input is left out, because the build rejected" in done.out
    assert not list((tmp_path / "out").rglob("b*"))


def test_members_of_archives_are_files(run, tmp_path):
    (tmp_path / "set").mkdir()
    first = png(9, 300, 300)
    members = [("x.png", first), ("x.txt", b"in a tar"), ("y.png", png(90, 300, 300))]
    write_tar(tmp_path / "set/a.tar", members)
    build(tmp_path / "set", tmp_path / "cache", **LIKE)
    assert run("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--release", "stable").status == 0
    assert (tmp_path / "out/1_a.tar/x.png").read_bytes() == first
    assert (tmp_path / "out/1_a.tar/x.txt").read_text() == "in a tar"
    assert run("verify", tmp_path / "out", "--data", tmp_path / "set").status == 0


def test_a_trainers_configuration_is_followed(run, kohya, tmp_path):
    data, cache, out = kohya
    config = tmp_path / "lora.toml"
    lines = ['resolution = "256,256"', "enable_bucket = true", "min_bucket_reso = 128", "max_bucket_reso = 512"]
    config.write_text("\n".join(lines), "utf-8")
    build(data, tmp_path / "other", trainer_config=config, resolutions=None, bucket_step=None)
    assert open_cache(tmp_path / "other").recipe().geometry == open_cache(cache).recipe().geometry
    options = ("export", cache, out, *EXPORT, "--release", "stable", "--trainer-config", config, "--json")
    assert run(*options).status == 0
    config.write_text("\n".join([*lines, "flip_aug = true"]), "utf-8")
    assert "the trainer flips images, and the cache has no flips" in run(*options).error["what"]
    config.write_text("\n".join([*lines, "random_crop = true"]), "utf-8")
    assert run(*options).error["why"] == "random_crop = true"
    config.write_text("\n".join([*lines[:3], "max_bucket_reso = 256"]), "utf-8")
    assert "would encode" in run(*options).error["what"]


def test_folders_in_the_way_and_full_disks_are_named_first(run, kohya, monkeypatch):
    _, cache, out = kohya
    options = ("export", cache, out, *EXPORT, "--release", "stable", "--json")
    out.mkdir()
    (out / "mine").write_text("mine")
    assert "exists" in run(*options).error["what"]
    (out / "mine").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
        assert "are free" in run(*options).error["what"]
    assert run(*options).status == 0


def test_moments_are_exported_as_mean_or_as_one_draw(run, kohya, tmp_path):
    data, _, _ = kohya
    cache = tmp_path / "moments"
    build(data, cache, **LIKE, latents="moments")
    drawn = []
    for number, words in enumerate([(), ("--draw", "1"), ("--draw", "1"), ("--draw", "2")]):
        out = tmp_path / f"out{number}"
        assert run("export", cache, out, *EXPORT, "--release", "stable", *words).status == 0
        drawn.append((out / "1_cats/p0.npz").read_bytes())
    assert drawn[1] == drawn[2]
    assert len(set(drawn)) == 3
    assert json.loads((tmp_path / "out3/latentcache.json").read_text())["draw"] == 2


def test_folders_that_would_meet_and_names_that_windows_takes_for_one_are_refused(run, tmp_path):
    """Two folders of the data set would be one, with the class words of the first."""
    for number, name in enumerate(["x/2_cats/a", "y/2_cats/b"]):
        draw(tmp_path / f"data/{name}.png", (300, 300), seed=number)
    config = tmp_path / "dataset.toml"
    sets = "".join(
        f"[[datasets.subsets]]\nimage_dir = '{tmp_path}/data/{name}/2_cats'\nnum_repeats = 2\n"
        f"class_tokens = '{name}'\n"
        for name in ("x", "y")
    )
    config.write_text(f"[[datasets]]\nresolution = 256\n{sets}")
    source = {"config": str(config)}
    build(tmp_path / "data", tmp_path / "cache", like="kohya", resolutions=(256,), source=source)
    options = ("export", tmp_path / "cache", tmp_path / "out", *EXPORT, "--release", "stable", "--json")
    error = run(*options).error
    assert "would be in one folder of the export, 2_cats" in error["what"]
    assert "class_words" in error["why"]
    assert "'x' and 'y'" in error["why"]


def test_two_exports_into_one_folder(run, kohya):
    from latentcache.export.folder import Folder

    _, cache, out = kohya
    with Folder(out.with_name("out.partial")).writing():
        error = run("export", cache, out, *EXPORT, "--release", "plain", "--json").error
    assert "another export writes here" in error["what"]
