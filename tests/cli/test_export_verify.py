import json
import shlex
import shutil

import pytest


@pytest.fixture
def cache(run, tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert run("build", tmp_path / "data.jsonl", "--tokenizer", "stub", "--out", tmp_path / "cache").status == 0
    return tmp_path / "cache"


@pytest.fixture
def rows(run, cache, tmp_path):
    assert run("export", cache, tmp_path / "rows", "--pad", 16).status == 0
    return tmp_path / "rows"


def test_an_export_is_held_against_its_cache(run, rows, tmp_path):
    done = run("verify", rows)
    assert (done.status, done.out.splitlines()[-1]) == (
        0, f"to check the cache itself: latentcache verify {tmp_path / 'cache'}",
    )  # fmt: skip
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n{"text": "three"}\n')
    assert run("build", tmp_path / "data.jsonl", "--out", tmp_path / "cache").status == 0
    value = run("verify", rows, "--json").json
    assert (value["exit_code"], value["kind"], value["made_from"]) == (1, "export", str(tmp_path / "cache"))
    assert (value["counts"]["stale"], value["items"][0]["reason"]) == (1, "cache-changed")
    assert "stale train/data-00000-of-00001.arrow [cache-changed]" in run("verify", rows).out


def test_its_fix_mends_it(run, rows, tmp_path):

    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    assert run("build", tmp_path / "data.jsonl", "--out", tmp_path / "cache").status == 0
    _, command = run("verify", rows, "--json").json["items"][0]["fix"].split("; ")
    shutil.rmtree(rows)
    assert run(*shlex.split(command)[1:]).status == 0
    assert run("verify", rows).status == 0
    assert json.loads((rows / "latentcache.json").read_text())["snapshot"] == 2


OTHERS = {
    "megatron": ("train.bin", ()),
    "datatrove": ("train/00000_tokens.ds.index", ()),
    "mds": ("train/shard.00000.mds", ("--pad", 2, "--overflow", "truncate_right")),
}


@pytest.mark.parametrize("form", OTHERS)
def test_every_format_is_held_against_its_cache(run, cache, tmp_path, form):
    """Stale where the cache holds other documents, damaged where a byte is another one, and mended by its fix."""
    name, words = OTHERS[form]
    assert run("export", cache, tmp_path / "rows", "--to", form, *words).status == 0
    assert run("verify", tmp_path / "rows", "--full").status == 0
    file = tmp_path / "rows" / name
    data = file.read_bytes()
    file.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    assert run("verify", tmp_path / "rows").status == 0
    items = run("verify", tmp_path / "rows", "--full", "--json").json["items"]
    assert [(item["category"], item["reason"], item["file"]) for item in items] == [("corrupt", "file-changed", name)]
    (tmp_path / "data.jsonl").write_text('{"text": "one"}\n')
    assert run("build", tmp_path / "data.jsonl", "--out", cache).status == 0
    value = run("verify", tmp_path / "rows", "--json").json
    assert (value["exit_code"], value["counts"]["stale"]) == (1, value["checked"]["files"])
    _, command = value["items"][0]["fix"].split("; ")
    shutil.rmtree(tmp_path / "rows")
    assert run(*shlex.split(command)[1:]).status == 0
    assert run("verify", tmp_path / "rows", "--full").status == 0
    facts = json.loads((tmp_path / "rows/latentcache.json").read_text())
    assert (facts["snapshot"], facts["format"]) == (2, form)


@pytest.mark.parametrize("words", [("--repair", "--yes"), ("--tokenizer", "stub"), ("--reencode", "1"), ("--flip",)])
def test_flags_for_caches_are_rejected(run, rows, words):
    done = run("verify", rows, *words)
    assert (done.status, "written by latentcache export" in done.err) == (2, True)


def test_without_its_cache_nothing_is_known(run, rows, tmp_path):
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert run("verify", rows, "--json").json["error"]["slug"] == "cache-not-found"
    assert run("verify", rows, "--data", tmp_path / "moved").status == 0


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "train/../../secret", "", ".", "link/a"])
def test_metadata_name_no_file_outside_the_folder(run, rows, tmp_path, name):
    """The metadata of a folder from elsewhere are not believed: nothing outside it is opened."""
    (tmp_path / "secret").write_text("x")
    (rows / "link").symlink_to(tmp_path)
    facts = json.loads((rows / "latentcache.json").read_text())
    facts["files"][name], facts["bytes"][name] = "00", 1
    (rows / "latentcache.json").write_text(json.dumps(facts))
    done = run("verify", rows, "--full", "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-damaged")
    assert "not a file below this folder" in done.error["why"]
