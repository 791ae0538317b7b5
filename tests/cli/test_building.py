from small_tokens import write_texts

from latentcache.cli.building import show_cache, show_refused
from latentcache.sources.sample import Refusal


def test_a_refused_record_is_named_once(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", ('{"text": 1}',)])
    done = run("build", data, "--tokenizer", "stub", "--workers", "0")
    assert "quarantined a.jsonl:2 text [record-field]: expected text, found" in done.out
    assert done.out.count("a.jsonl:2") == 1
    cache = data.with_name("a.jsonl.latentcache")
    assert run("verify", cache).out.count("a.jsonl:2") == 1
    (item,) = run("verify", cache, "--json").json["items"]
    assert (item["path"], item["field"], item["found"][:8]) == ("a.jsonl:2", "text", "expected")


def test_a_cache_without_a_record_is_called_empty(run, tmp_path):
    data = write_texts(tmp_path / "a.jsonl", [("bad",), ('{"text": 1}',)])
    done = run("build", data, "--tokenizer", "stub", "--workers", "0")
    assert done.status == 1
    assert "is empty: no record could be used\n  fix: " in done.out
    assert "complete" not in done.out
    data.write_text("")
    assert run("build", data, "--tokenizer", "stub", "--json").status == 2


def test_a_cache_without_a_picture_is_called_empty(run, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "bad.png").write_bytes(b"")
    done = run("build", tmp_path / "data", "--model", "stub", "--allow-failed", "1")
    assert done.status == 0
    assert "is empty: no picture could be used\n  fix: " in done.out


def test_the_last_words(capsys, tmp_path):
    show_cache(tmp_path, 3, 1, "picture")
    show_refused("note", [Refusal(name="a", cause="c", hint="h")])
    assert capsys.readouterr().out == f"cache {tmp_path} (generation 3) is complete\nnote a [c]\n"
