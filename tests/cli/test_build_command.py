import shlex

import pytest
from small_cache import SMALL, counts


def build(run, data, *more):
    return run("build", data, *SMALL, "--out", data.with_name("cache"), *more)


def test_the_end_says_that_the_demo_encoder_is_not_for_training(run, data):
    words = run("build", data, "--resolution", "64").out.splitlines()[-1]
    assert words.startswith("these latents are of the demo encoder, not for training: `latentcache build ")
    assert shlex.split(words.split("`")[1]) == ["latentcache", "build", str(data), "--model", "MODEL"]
    assert "not for training" not in build(run, data).out


@pytest.mark.parametrize(
    ("words", "types"),
    [
        (["--storage-dtype", "float32"], ["float32", "float32"]),
        (["--storage-dtype", "float32", "--text-storage-dtype", "bfloat16"], ["float32", "bfloat16"]),
        (["--fields", "prompt_embeds", "--storage-dtype", "float32"], ["float32"]),
    ],
)
def test_the_storage_type_is_of_all_fields_unless_one_has_its_own(run, data, words, types):
    model = () if "--fields" in words else SMALL
    fields = run("build", data, *model, "--text-encoder", "stub", *words, "--json").json["fields"]
    recipes = [fields[name]["recipe"] for name in ("latents", "prompt_embeds") if name in fields]
    assert [recipe.get("encoder", recipe)["storage_dtype"] for recipe in recipes] == types


def test_the_storage_type_of_a_cache_changes_for_all_fields(run, data):
    build(run, data, "--text-encoder", "stub")
    fields = build(run, data, "--storage-dtype", "float32", "--compute-dtype", "float32", "--json").json["fields"]
    recipes = [fields[name]["recipe"] for name in ("latents", "prompt_embeds", "pooled_prompt_embeds")]
    assert {recipe.get("encoder", recipe)["storage_dtype"] for recipe in recipes} == {"float32"}


def test_text_gives_the_reason_for_status_1(run, data):
    (data / "broken.jpg").write_bytes(b"")
    done = build(run, data)
    assert done.status == 1
    assert "rejected broken.jpg [empty]" in done.out
    assert "  fix: download, export or save the file again" in done.out
    assert "1 rejected (more than --allow-failed 0: exit status 1)" in done.out


def test_plan_and_end_count_entries_and_duplicates_alike(run, data):
    for number in range(3):
        (data / f"copy{number}.png").write_bytes((data / "p0.png").read_bytes())
    done = build(run, data)
    assert "  plan     4 entries to make, 0 reused, 3 duplicates sharing an entry, " in done.err
    assert "4 encoded, 0 reused, 3 duplicates sharing an entry, 0 rejected in " in done.out
    assert " entries/s while encoding, " in done.out
    assert ", at most " in done.err
    (data / "another.png").write_bytes((data / "p1.png").read_bytes())
    planned = run("inspect", data, "--out", data.with_name("cache"), "--json").json
    assert planned["plan"]["entries_to_make"] == 0, "equal to a file of the snapshot"
    again = build(run, data, "--json").json
    assert again["counts"] == counts(8, 0, 4, 0, duplicates=4, no_caption=again["counts"]["no_caption"])


def test_a_changed_model_reports_its_cost_first(run, data):
    build(run, data)
    cache = ("--out", data.with_name("cache"))
    done = run("inspect", data, *cache, "--model", "demo")
    changed = "latents: encoder stub -> demo; 4 cached entries cannot be used and will be made again"
    assert f"changed    {changed}\n" in done.out
    planned = run("inspect", data, *cache, "--model", "demo", "--json").json["plan"]["fields"]["latents"]
    assert planned["replaced"] == 4
    assert planned["changed"][0] == {"setting": "encoder", "cached": "stub", "requested": "demo"}
    assert "cannot be used" not in run("inspect", data, *cache, "--resolution", "128").out
    assert f"  changed  {changed}\n" in build(run, data, "--model", "demo").err


def test_strict_rejects_notes_before_writing(run, data):
    (data / "p3.txt").write_text("the fourth")
    assert build(run, data, "--strict").status == 0
    (data / "orphan.txt").write_text("a caption of no image")
    cache = data.with_name("cache")
    before = sorted(path.name for path in cache.rglob("*"))
    done = build(run, data, "--strict", "--json")
    assert (done.status, done.error["slug"]) == (2, "strict")
    assert {item["reason"] for item in done.json["items"]} == {"caption-unused"}
    assert sorted(path.name for path in cache.rglob("*")) == before
    assert "note orphan.txt [caption-unused]" in build(run, data, "--strict").out
    assert build(run, data).status == 0
