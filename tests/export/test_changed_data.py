"""Images that change after an export: verify names them, and the next export mends the folder."""

import pytest
from captioned_images import FOUR, data_and_cache
from small_cache import build, draw

OPTIONS = {
    "kohya": (("--architecture", "sdxl", "--release", "stable"), {"min_side": 64, "max_side": 512}),
    "onetrainer": ((), {}),
    "simpletuner": ((), {}),
}


@pytest.mark.parametrize("trainer", OPTIONS)
def test_images_moved_added_changed_and_removed_are_named_and_written(run, tmp_path, trainer):
    options, sides = OPTIONS[trainer]
    like = {"like": trainer, "resolutions": (256,), "bucket_step": 64, **sides}
    data, cache, out = data_and_cache(tmp_path, **like)
    export = ("export", cache, out, "--to", trainer, "--copy", *options, "--json")
    assert run(*export).status == 0
    draw(data / "p0.png", FOUR[0], seed=7)
    draw(data / "new.png", FOUR[0], seed=8)
    (data / "new.txt").write_text("new", "utf-8")
    for end in ("png", "txt"):
        (data / f"p1.{end}").unlink()
        (data / f"p2.{end}").rename(data / f"moved.{end}")
    done = run("verify", out, "--data", data, "--json")
    assert done.status == 1
    assert {finding["path"]: finding["problem"] for finding in done.json["findings"]} == {
        "p0.png": "source-changed", "new.png": "source-added", "moved.png": "source-added",
        "p1.png": "source-removed", "p2.png": "source-removed",
    }  # fmt: skip
    build(data, cache, **like)
    assert run(*export).json["kept"] >= 2  # the image and the caption that stayed
    assert run("verify", out, "--data", data).status == 0
