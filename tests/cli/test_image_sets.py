import warnings

import numpy as np
import pytest
from PIL import Image
from small_cache import SMALL

from latentcache import open_cache
from latentcache.store.snapshot import open_snapshot

TEXT = """
[[datasets]]
[[datasets.subsets]]
image_dir = "../data/cats"
num_repeats = %d
class_tokens = "cat"
[[datasets.subsets]]
image_dir = "../data/dogs"
"""


@pytest.fixture
def config(tmp_path):
    for number, name in enumerate(("cats/a", "cats/b", "dogs/c")):
        path = tmp_path / f"data/{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((64, 64, 3), number * 60, dtype=np.uint8)).save(path)
    (tmp_path / "conf").mkdir()
    path = tmp_path / "conf/dataset.toml"
    path.write_text(TEXT % 3)
    return path


def repeats(cache):
    samples = open_snapshot(cache).samples
    return dict(zip(samples.names, np.asarray(samples.columns["repeats"]).tolist(), strict=True))


def test_the_resolution_of_a_configuration_is_followed(run, config, tmp_path):
    config.write_text("[general]\nresolution = 128\n" + TEXT % 1)
    done = run("build", config, "--out", tmp_path / "c", "--model", "stub", "--json").json
    assert done["plan"]["fields"]["latents"]["groups"] == {"128x128": 3}
    assert done["plan"]["fields"]["latents"]["chosen"] == {"resolution": "128 (from the configuration in DATA)"}
    assert "config-ignored" not in {item["reason"] for item in done["items"]}
    config.write_text(config.read_text().replace("128", "64"))
    done = run("build", config, "--out", tmp_path / "c", "--json").json
    assert done["plan"]["fields"]["latents"]["groups"] == {"64x64": 3}


def test_changed_repeats_encode_nothing(run, config, tmp_path):
    cache = tmp_path / "c"
    assert run("build", config, "--out", cache, *SMALL, "--json").json["counts"]["encoded"] == 3
    assert repeats(cache) == {"cats/a.jpg": 3, "cats/b.jpg": 3, "dogs/c.jpg": 1}
    again = run("build", config, "--out", cache, "--json").json
    assert (again["counts"]["encoded"], again["snapshot"], again["published"]) == (0, 1, False)
    assert run("verify", cache, "--full").status == 0
    found = run("verify", cache, "--reencode", 3, "--json").json
    assert (found["counts"]["ok"], found["reencoded"]["samples"]) == (3, 3)
    config.write_text(TEXT % 4)
    stale = run("verify", cache, "--json").json
    assert (stale["counts"]["stale"], stale["counts"]["ok"], stale["exit_code"]) == (2, 1, 1)
    item = stale["items"][0]
    values = [item[key] for key in ("path", "reason", "expected", "found")]
    assert values == ["cats/a.jpg", "repeats-changed", "3 repeats per epoch", "4 repeats per epoch"]
    again = run("build", config, "--out", cache, "--json").json
    assert (again["counts"]["encoded"], again["snapshot"]) == (0, 2)
    assert repeats(cache) == {"cats/a.jpg": 4, "cats/b.jpg": 4, "dogs/c.jpg": 1}
    assert run("verify", cache).status == 0


def test_the_options_of_captions_and_of_the_layout(run, config, tmp_path):
    data, cache = tmp_path / "data", tmp_path / "c"
    (data / "cats/a.tags").write_text("tagged")
    (data / "cats/b.txt").write_text("not read")
    more = ("--caption-ext", ".tags", "--default-caption", "none", "--caption-prefix", "<", "--caption-suffix", ">")
    assert run("build", data, "--out", cache, *SMALL, *more, "--layout", "folder").status == 0
    first = open_snapshot(cache)
    assert list(first.samples.inputs["caption"].text) == ["<tagged>", "<none>", "<none>"]
    assert [note.detail for note in first.notes] == ["captions are read from .tags"]
    again = run("build", data, "--out", cache, "--default-caption", "", "--json").json
    assert (again["counts"]["no_caption"], again["counts"]["encoded"]) == (0, 0)
    assert list(open_snapshot(cache).samples.inputs["caption"].text) == ["<tagged>", "", ""]
    assert run("info", cache, "--json").json["no_caption"]["count"] == 0
    with warnings.catch_warnings(record=True) as caught:
        open_cache(cache).loader(batch_size=1)
    assert not [item for item in caught if "without captions" in str(item.message)]
    wrong = run("build", data, "--out", tmp_path / "d", *SMALL, "--layout", "kohya", "--json")
    assert (wrong.status, wrong.error["slug"]) == (2, "usage")


def test_ignored_settings_of_a_configuration_are_noted(run, config, tmp_path):
    config.write_text(f"[general]\nflip_aug = true\ntoken_warmup_step = 2\n{TEXT % 1}")
    words = ("build", config, "--out", tmp_path / "c", *SMALL, "--default-caption", "x", "--json")
    (note,) = [item for item in run(*words).json["items"] if item["reason"] == "config-ignored"]
    assert note["found"].endswith("no effect here: flip_aug = True, token_warmup_step = 2")
    assert run(*words, "--strict").status == 0


def test_captions_that_are_not_stored_are_counted(run, data, tmp_path):
    for number, image in enumerate(sorted(data.glob("*.png"))[:2]):
        image.with_suffix(".txt").write_text(f"one {number}\ntwo\nthree")
    words = ("build", data, "--out", tmp_path / "c", *SMALL, "--text-encoder", "stub", "--default-caption", "none")
    words += ("--caption-lines", "all", "--json")

    def notes(*more):
        return [item for item in run(*words, *more).json["items"] if item["reason"] == "captions-left"]

    found = notes("--caption-variants", "2")
    assert {(item["category"], item["count"], item["hint"]) for item in found} == {
        ("note", 2, "a larger --caption-variants stores all of them")
    }
    assert [item["field"] for item in found] == ["prompt_embeds", "pooled_prompt_embeds"]
    assert notes("--caption-variants", "3") == []


@pytest.mark.parametrize(
    ("words", "of"),
    [
        (("--caption-ext", ".cap"), "caption files beside images"),
        (("--text-lines",), "records"),
    ],
)
def test_an_option_that_the_data_would_ignore_is_an_error(run, data, tmp_path, words, of):
    (data / "metadata.csv").write_text("file_name,text,description\np0.png,a,b\n")
    found = run("build", data, *SMALL, *words, "--json").error
    assert (found["what"], found["fix"]) == (f"{words[0]}: for {of} only, and DATA has none", f"leave {words[0]} out")
    assert not (tmp_path / "data.latentcache").exists()
