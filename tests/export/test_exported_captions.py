"""Several captions of an image: each trainer that draws one of them finds all."""

import json

import pytest
from captioned_images import draw_captioned
from small_cache import draw

SIZES = {"kohya": ("--min-side", "64", "--max-side", "512"), "onetrainer": (), "simpletuner": (), "musubi": ()}
MORE = {"kohya": ("--architecture", "sdxl", "--release", "plain"), "musubi": ("--architecture", "z-image")}


@pytest.mark.parametrize("trainer", SIZES)
def test_every_line_is_a_caption_of_the_folder(run, tmp_path, trainer):
    data, cache, out = draw_captioned(tmp_path / "cats"), tmp_path / "cache", tmp_path / "out"
    (data / "p0.txt").write_text("first\n\nsecond \n", "utf-8")
    (data / "p1.txt").unlink()
    step = ("--bucket-step", "16" if trainer == "musubi" else "64")
    words = ("--model", "stub", "--text-encoder", "none", "--resolution", "256", *step)
    options = ("--caption-lines", "all", "--default-caption", "", "--like", trainer, *SIZES[trainer])
    assert run("build", data, "--out", cache, *words, *options).status == 0
    done = run("export", cache, out, "--to", trainer, *MORE.get(trainer, ()), "--json")
    assert done.status == 0, done.err
    (file,) = out.rglob("p0.txt")
    draws = trainer != "musubi"
    assert file.read_text("utf-8") == ("first\nsecond" if draws else "first")
    assert done.json["captions_left_out"] == (0 if draws else 1)
    assert file.with_name("p1.txt").read_bytes() == (b"\n" if trainer == "kohya" else b"")
    if trainer == "kohya":
        assert "enable_wildcard = true" in (out / "dataset.toml").read_text("utf-8")
    if trainer == "simpletuner":
        backend, _ = json.loads((out / "multidatabackend.json").read_text("utf-8"))
        assert backend["disable_multiline_split"] is False


def test_a_caption_with_a_line_end_is_no_caption_among_several_of_simpletuner(run, tmp_path):
    rows = [{"file_name": "a.png", "text": ["one", "two"]}, {"file_name": "b.png", "text": "three\nfour"}]
    for name in ("a", "b"):
        draw(tmp_path / f"data/{name}.png", (256, 256))
    (tmp_path / "data/metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    words = ("--model", "stub", "--resolution", "256", "--bucket-step", "64", "--like", "simpletuner")
    assert run("build", tmp_path / "data", "--out", tmp_path / "cache", *words).status == 0
    error = run("export", tmp_path / "cache", tmp_path / "out", "--to", "simpletuner", "--json").error
    assert error["what"] == "b.png: a caption has several lines"
