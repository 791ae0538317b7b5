import json
import os

from small_cache import SMALL, cache, data, draw, run, shared

from latentcache.report.cache import describe_cache
from latentcache.store.lock import builder_lock

__all__ = ["cache", "data", "run", "shared"]


def test_a_running_build_is_named(run, cache):
    with builder_lock(cache / "builder.lock"):
        assert f"a build is running: process {os.getpid()} on " in run("info", cache).out
        assert run("info", cache, "--json").json["builder"].startswith(f"process {os.getpid()} on ")
    assert "snapshot 1, complete" in run("info", cache).out


def test_inspect_and_info_say_the_same_of_a_recipe(run, tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    planned = run("inspect", tmp_path / "chat.jsonl", "--tokenizer", "stub", "--json").json["plan"]
    run("build", tmp_path / "chat.jsonl", "--tokenizer", "stub")
    stored = run("info", tmp_path / "chat.jsonl.latentcache", "--json").json
    assert planned["fields"]["input_ids"]["about"] == stored["fields"]["input_ids"]["about"]
    assert "loss on assistant" in stored["fields"]["input_ids"]["about"]["tokenizer"]


def test_the_facts_of_a_cache_are_values(cache):
    about = describe_cache(cache)
    latents = about["fields"]["latents"]
    assert (about["complete"], about["counts"]["samples"], about["no_caption"]["count"]) == (True, 4, 1)
    assert latents["items"] == sum(group["items"] for group in latents["groups"]) == 4
    assert json.loads(json.dumps(about)) == about == describe_cache(cache)


def test_a_sample_that_several_fields_reject_is_one_line(run, data):
    words = (data, *SMALL, "--text-encoder", "stub", "--out", data.with_name("texts"))
    lines = [line for line in run("build", *words).out.splitlines() if "no-caption" in line]
    assert lines == ["rejected p3.png pooled_prompt_embeds, prompt_embeds [no-caption]: it has no caption to encode"]
    inspected = run("inspect", *words).out.splitlines()
    assert len([line for line in inspected if "no-caption" in line]) == 1


def test_the_last_run_of_a_field_is_kept_until_the_next(run, data, tmp_path):
    def timing():
        (rows,) = describe_cache(tmp_path / "cache")["fields"].values()
        return rows["provenance"]["timing"], rows["built"]

    run("build", data, "--out", tmp_path / "cache", *SMALL)
    first, text = timing()
    assert first["encoded"] == 4
    assert text.startswith("4 items in 0:0")
    assert f"last run  {text}" in run("info", tmp_path / "cache").out
    draw(data / "new.png", (80, 64))
    run("build", data, "--out", tmp_path / "cache")
    assert timing()[0]["encoded"] == 1
