"""Folders of every trainer: their values, captions and images, later exports, and caches that do not fit."""

import json

import pytest
import torch
from captioned_images import FOUR, draw_captioned, files_below
from made_pipelines import tiny_vae
from small_cache import build, draw
from trainer_exports import EXPORT, LIKE, cached, latents_of, onetrainer_config, still

from latentcache import open_cache

INPAINTING = "STABLE_DIFFUSION_XL_10_BASE_INPAINTING"
INPAINTED = {"model_type": INPAINTING, "custom_conditioning_image": True}
#: Trainers that write latents as the encoder makes them.
UNSCALED = ("kohya", "onetrainer", "musubi")


@pytest.mark.parametrize("trainer", LIKE)
def test_every_file_holds_what_the_cache_holds(run, tmp_path, trainer):
    data, cache, out = cached(tmp_path, trainer)
    words = ("export", cache, out, *EXPORT[trainer], "--as", "/sets/run", "--json")
    done = run(*words)
    assert (done.status, done.json["samples"], done.json["files"]) == (0, 4, done.json["written"])
    loader = open_cache(cache).read(scaled=trainer not in UNSCALED).loader(batch_size=1, seed=None)
    for batch in map(loader.batch, ([row] for row in range(4))):
        stem = batch["names"][0].removesuffix(".png")
        latents = latents_of(out, trainer, stem)
        assert latents.dtype == torch.float32
        assert torch.equal(latents, batch["latents"][0].float())
        (image,) = [path for path in out.rglob(f"{stem}.png") if path.samefile(data / f"{stem}.png")]
        caption = (data / f"{stem}.txt").read_text("utf-8")
        # ai-toolkit puts a blank behind each comma.
        caption = caption.replace(", ", ",") if trainer == "ai-toolkit" else caption
        assert image.with_suffix(".txt").read_text("utf-8") == caption
    assert any("/sets/run" in line or "C:" in line for line in done.json["advice"])
    assert run("verify", out, "--data", data).status == 0
    again = run(*words).json
    assert (again["written"], again["kept"], again["deleted"]) == (0, done.json["files"], 0)
    run("export", cache, tmp_path / "second", *words[3:])
    for name in files_below(out):
        if not name.startswith("latentcache.") and not name.endswith((".pt", "jpg")):
            assert (tmp_path / "second" / name).read_bytes() == (out / name).read_bytes()


@pytest.mark.parametrize("trainer", LIKE)
def test_images_moved_added_changed_and_removed_are_named_and_written(run, tmp_path, trainer):
    data, cache, out = cached(tmp_path, trainer)
    export = ("export", cache, out, *EXPORT[trainer], "--copy", "--json")
    assert run(*export).status == 0
    draw(data / "p0.png", FOUR[0], seed=7)
    draw(data / "new.png", FOUR[0], seed=8)
    (data / "new.txt").write_text("new", "utf-8")
    (data / "p3.txt").write_text("another caption", "utf-8")
    for end in ("png", "txt"):
        (data / f"p1.{end}").unlink()
        (data / f"p2.{end}").rename(data / f"moved.{end}")
    done = run("verify", out, "--data", data, "--json")
    assert done.status == 1
    assert {finding["path"]: finding["problem"] for finding in done.json["findings"]} == {
        "p0.png": "source-changed", "new.png": "source-added", "moved.png": "source-added",
        "p1.png": "source-removed", "p2.png": "source-removed",
    }  # fmt: skip
    build(data, cache, **LIKE[trainer])
    changed = run(*export).json
    assert changed["kept"] >= 1  # the image that stayed
    assert changed["deleted"] >= 4  # images and captions that are gone
    assert not [name for name in files_below(out) if "p1" in name or "p2" in name]
    assert run("verify", out, "--data", data).status == 0
    stems = {name: latents_of(out, trainer, name) for name in ("p0", "p3", "new", "moved")}
    assert len({latents.numpy().tobytes() for latents in stems.values()}) == 4
    assert {file.read_text("utf-8") for file in out.rglob("p3.txt")} == {"another caption"}


@pytest.mark.parametrize("trainer", ["kohya", "onetrainer", "simpletuner", "musubi"])
def test_every_line_is_a_caption_of_the_folder(run, tmp_path, trainer):
    data, cache, out = draw_captioned(tmp_path / "cats"), tmp_path / "cache", tmp_path / "out"
    (data / "p0.txt").write_text("first\n\nsecond \n", "utf-8")
    (data / "p1.txt").unlink()
    build(data, cache, **LIKE[trainer], source={"caption_lines": "all", "default_caption": ""})
    done = run("export", cache, out, *EXPORT[trainer], "--json")
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


#: Trainer, settings of the cache, options of the export, values of a file of OneTrainer, start of the error.
REFUSALS = [
    ("kohya", {}, ("--release", "2019"), None, "unknown release"),
    ("kohya", {}, ("--fields", "text"), None, "holds no embeddings"),
    ("kohya", {}, ("--draw", "1"), None, "nothing to draw from"),
    ("kohya", {}, ("--architecture", "flux"), None, "no architecture has such latents"),
    ("kohya", {}, ("--pad", "8"), None, "--pad: not available"),
    ("kohya", {"model": "demo"}, (), None, "a demo encoder made it"),
    ("onetrainer", {}, ("--release", "2019"), None, "--release: not available"),
    ("onetrainer", {}, ("--beside",), None, "--beside: not available"),
    ("onetrainer", {}, (), {"masked_training": True}, "the cache has no masks"),
    ("onetrainer", {}, (), {"latent_caching": False}, "takes no cached latents"),
    ("onetrainer", {}, (), {"model_type": INPAINTING}, "takes no cached latents"),
    ("onetrainer", {}, (), INPAINTED, "takes a conditioning image"),
    ("onetrainer", {}, (), {"model_type": "FLUX_FILL_DEV_1"}, "takes no cached latents"),
    ("onetrainer", {}, (), {"resolution": "512"}, "would encode 4 images"),
    ("onetrainer", {}, (), {"model_type": "SANA"}, "would encode 3 images"),
    ("onetrainer", {}, (), {"batch_size": 0}, "a setting has another form"),
    ("onetrainer", {}, (), {"concepts": [1]}, "a setting has another form"),
    ("onetrainer", {}, (), {"concepts": [still(enable_random_flip=True)]}, "the cache has no flips"),
    ("simpletuner", {"flip": True}, (), None, "the cache has flips"),
    ("simpletuner", {"like": None, "bucket_step": 8}, (), None, "would encode"),
    ("simpletuner", {}, ("--beside",), None, "not available with --to simpletuner"),
    ("musubi", {"flip": True}, (), None, "the cache has flips"),
    ("musubi", {"like": None, "bucket_step": 8}, (), None, "would encode"),
    ("musubi", {}, ("--architecture", "framepack"), None, "--architecture=framepack: cannot be exported"),
    ("musubi", {}, ("--architecture", "flux-kontext"), None, "has no latents of control images"),
    ("musubi", {}, ("--architecture", "flux"), None, "unknown architecture"),
    ("ai-toolkit", {"like": None, "bucket_step": 16}, (), None, "would encode"),
    ("ai-toolkit", {"bucket_step": 32}, (), None, "sides of sdxl are multiples of 16 pixels"),
    ("ai-toolkit", {}, ("--architecture", "flux"), None, "sides of flux are multiples of 32 pixels"),
    ("ai-toolkit", {}, ("--architecture", "kandinsky"), None, "unknown architecture"),
    *((trainer, {}, ("--as", path), None, "not an absolute path")
      for trainer, path in (("kohya", "sets/out"), ("musubi", "~/out"), ("simpletuner", "C:out"))),
]  # fmt: skip


@pytest.mark.parametrize(("trainer", "options", "words", "values", "expected"), REFUSALS)
def test_what_does_not_fit_is_named_before_anything_is_written(
    run, tmp_path, trainer, options, words, values, expected
):
    _, cache, out = cached(tmp_path, trainer, **options)
    if values is not None:
        words = (*words, "--trainer-config", onetrainer_config(tmp_path, still(), **values))
    done = run("export", cache, out, *EXPORT[trainer], *words, "--json")
    assert done.status == 2
    assert expected in done.error["what"]
    assert not list(tmp_path.glob("out*"))


def test_files_that_have_several_forms_or_fit_several_models_are_asked_for(run, tmp_path):
    _, cache, out = cached(tmp_path, "kohya")
    assert "have three forms" in run("export", cache, out, *EXPORT["kohya"][:4], "--json").error["what"]
    tiny_vae(16, 0.3611, 0.1159).save_pretrained(tmp_path / "vae")
    build(tmp_path / "cats", tmp_path / "other", **LIKE["musubi"], model=str(tmp_path / "vae"))
    done = run("export", tmp_path / "other", out, "--to", "musubi", "--json")
    assert "fit z-image and flux-kontext" in done.error["what"]
    build(tmp_path / "cats", tmp_path / "third", **LIKE["musubi"])
    error = run("export", tmp_path / "third", out, "--to", "musubi", "--json").error
    assert "no architecture has such latents" in error["what"]


def test_names_that_cannot_be_are_refused(run, tmp_path):
    """Two images of one name, a caption of several lines, no caption, and bytes that are no UTF-8."""
    data, cache, out = cached(tmp_path, "simpletuner")

    def refused(trainer):
        build(data, tmp_path / trainer, **LIKE[trainer])
        return run("export", tmp_path / trainer, out, *EXPORT[trainer], "--json").error["what"]

    (data / "p2.txt").unlink()
    assert "p2.png: has no caption" in refused("simpletuner")
    draw(data / "a_b.png", (64, 64))
    draw(data / "a/b.png", (64, 64), seed=1)
    assert "would share their files" in refused("musubi")
    (data / "a_b.png").rename(data / "p\udcff.png")
    assert "is no UTF-8" in refused("onetrainer")
    (data / "p\udcff.png").unlink()
    rows = [{"file_name": "p0.png", "text": ["one", "two"]}, {"file_name": "p1.png", "text": "three\nfour"}]
    (data / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    for text in data.glob("*.txt"):
        text.unlink()
    build(data, cache, **LIKE["simpletuner"], allow_failed="9", source={"default_caption": ""})
    error = run("export", cache, out, *EXPORT["simpletuner"], "--json").error
    assert error["what"] == "p1.png: a caption has several lines"
