import json
import shutil

import pytest
from small_cache import SMALL, draw

KEYS = {
    "schema", "command", "exit_code", "error", "cache", "data", "data_kind", "part", "plan", "counts", "layout",
    "captions", "further", "first_without_caption", "several_captions", "sizes", "duplicates", "items",
    "samples", "needs", "checks", "warnings",
}  # fmt: skip


@pytest.fixture
def kohya(tmp_path):
    """Two sets with one caption, a small image, a duplicate and an orphan caption."""
    folder = tmp_path / "kohya"
    for number in range(3):
        draw(folder / "10_sks dog" / f"a{number}.png", (128, 96), seed=number)
    (folder / "10_sks dog" / "a0.txt").write_text("a dog")
    (folder / "10_sks dog" / "nobody.txt").write_text("nobody")
    draw(folder / "1_cat" / "small.png", (40, 20), seed=7)
    shutil.copy(folder / "10_sks dog" / "a0.png", folder / "1_cat" / "z.png")
    return folder


def test_recognized_layout_with_reasons(run, kohya):
    done = run("inspect", kohya, *SMALL, "--json")
    value = done.json
    assert (done.status, set(value)) == (0, KEYS)
    assert value["layout"]["word"] == "kohya"
    assert "10 repeats" in value["layout"]["why"]
    sets = {image_set["name"]: image_set for image_set in value["layout"]["sets"]}
    assert (sets["10_sks dog"]["repeats"], sets["10_sks dog"]["class_words"]) == (10, "sks dog")
    assert (sets["10_sks dog"]["samples"], sets["1_cat"]["samples"]) == (3, 2)
    assert value["captions"] == {"sidecar .txt": 1, "class words": 4}
    assert value["sizes"]["smallest"] == {"height": 20, "width": 40, "path": "1_cat/small.png"}
    assert (value["sizes"]["largest"]["height"], value["sizes"]["read"]) == (96, 5)
    assert value["duplicates"] == {"known": 1, "first": "1_cat/z.png"} or value["duplicates"]["known"] == 1
    assert "caption-unused" in {item["reason"] for item in value["items"]}
    assert value["plan"]["entries_to_make"] == 4
    assert not kohya.with_name("kohya.latentcache").exists()


def test_findings_and_strictness(run, data):
    assert run("inspect", data, *SMALL).status == 0
    (data / "orphan.txt").write_text("x")
    assert run("inspect", data, *SMALL).status == 0
    assert run("inspect", data, *SMALL, "--strict").status == 1
    (data / "bad.png").write_bytes(b"")
    done = run("inspect", data, *SMALL, "--json")
    assert (done.status, done.json["counts"]["quarantined"]) == (1, 1)
    assert run("inspect", data, *SMALL, "--allow-failed", "1").status == 0


def test_records(run, tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.sources.known.RACY_NS", 0)
    lines = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 2
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    value = run("inspect", tmp_path / "a.jsonl", "--tokenizer", "stub", "--json").json
    assert value["records"]["conversations"] == 2
    assert value["records"]["roles"] == {"user": 2, "assistant": 2}
    assert value["records"]["files"] == [{"path": "a.jsonl", "records": 2}]
    assert value["duplicates"]["known"] == 1
    assert value["plan"]["entries_to_make"] == 1
    assert run("build", tmp_path / "a.jsonl", "--tokenizer", "stub").status == 0
    assert run("inspect", tmp_path / "a.jsonl", "--json").json["records"] == value["records"]


def test_samples_are_shown_as_they_were_understood(run, kohya):
    draw(kohya / "1_cat" / "z-masklabel.png", (40, 20), seed=8)
    done = run("inspect", kohya, *SMALL, "--layout", "kohya", "--json")
    shown = {sample["path"]: sample for sample in done.json["samples"]}
    assert shown["1_cat/z.png"]["buckets"]["latents"]
    assert shown["1_cat/z.png"]["paired"] == {"mask": "1_cat/z-masklabel.png"}
    text = run("inspect", kohya, *SMALL, "--layout", "kohya").out
    assert "sample     1_cat/z.png, set 1_cat, bucket " in text
    assert "mask 1_cat/z-masklabel.png" in text


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["build", "/"], "/ is the root of all folders"),
        (["inspect", "/."], "/ is the root of all folders"),
        (["build", "CACHE"], "is a cache, not data"),
        (
            ["build", "IMAGES", "--tokenizer", "stub"],
            "--tokenizer=stub: for data with records; this data has captions",
        ),
        (["build", "RECORDS", "--model", "stub"], "--model=stub: for data with images; this data has records"),
    ],
)
def test_wrong_data_is_named(run, shared, tmp_path, words, what):
    records = tmp_path / "a.jsonl"
    records.write_text('{"text": "a"}\n')
    places = {"CACHE": shared[1], "IMAGES": shared[0], "RECORDS": records}
    error = run(*[places.get(word, word) for word in words], "--json").error
    assert (error["slug"], what in error["what"]) == ("usage", True), error


def test_records_without_a_tokenizer_are_shown(run, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    done = run("inspect", tmp_path / "a.jsonl", "--json")
    assert (done.status, done.json["error"], done.json["needs"]) == (0, None, "--tokenizer")
    assert done.json["records"]["texts"] == 1
    assert done.json["samples"] == [{"path": "a.jsonl:1", "turns": [{"role": "text", "text": "a"}]}]
    assert done.json["plan"] is None
    assert "build      also needs --tokenizer" in run("inspect", tmp_path / "a.jsonl").out


def test_rejected_data_is_shown_in_part(run, data, tmp_path):
    done = run("inspect", data, "--model", tmp_path / "nowhere", "--json")
    assert (done.status, done.error["slug"]) == (2, "model-not-found")
    assert (done.json["counts"]["samples"], done.json["plan"]) == (4, None)
    (tmp_path / "none").mkdir()
    assert run("inspect", tmp_path / "none", "--json").error["slug"] == "source-empty"
