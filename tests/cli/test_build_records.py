import pytest
from made_tokenizers import byte_level, save, unigram
from small_tokens import write_texts

from latentcache.cli.token_build import show_accounts


@pytest.fixture
def data(tmp_path):
    return write_texts(tmp_path / "a.jsonl", ["one", "two", ("bad",)])


def test_the_contract_of_counts(run, data):
    found = run("build", data, "--tokenizer", "stub", "--json")
    assert found.status == 1
    assert found.json["counts"] == {"samples": 3, "encoded": 2, "cached": 0, "quarantined": 1}
    assert found.json["fields"] == {"input_ids": {"encoded": 2, "cached": 0}}
    (item,) = found.json["items"]
    assert (item["category"], item["path"], item["line"]) == ("quarantined", "a.jsonl", 3)
    assert (found.json["kind"], found.json["tokens"]["tokens"]) == ("tokens", 8)
    again = run("build", data, "--allow-failed", "1", "--json")
    assert (again.status, again.json["counts"]["encoded"], again.json["counts"]["cached"]) == (0, 0, 2)
    report = data.parent / "a.jsonl.latentcache" / "reports" / "build" / "report.json"
    assert report.exists()


def test_what_people_see(run, data):
    found = run("build", data, "--tokenizer", "stub", "--workers", "0")
    assert "2 tokenized, 0 reused, 1 quarantined (more than --allow-failed 0: exit status 1)" in found.out
    assert "quarantined a.jsonl:3 [" in found.out
    assert "2 documents, 8 tokens, 100.0% with loss" in found.out
    assert "3 records of 1 file" in found.err
    assert "2 documents to tokenise" in found.err
    assert "dry run: 0 documents would be tokenized, 2 reused" in run("build", data, "--dry-run").out


@pytest.mark.parametrize("flag", ["--json", "--quiet", "--workers=0"])
def test_a_build_without_the_fast_engine_says_so_and_json_stays_json(run, data, flag, monkeypatch):
    monkeypatch.setattr("latentcache.pipeline.token_making.FAST_CHARACTERS", 1)
    folder = save(unigram(), data.parent / "model", roles={"eos_token": "</s>"})
    found = run("build", data, "--tokenizer", folder, "--allow-failed", "1", flag)
    assert found.status == 0
    assert "warning: no fast tokenisation: " in found.err
    assert "no fast tokenisation" not in found.out
    assert (found.json if flag == "--json" else {"kind": "tokens"})["kind"] == "tokens"


@pytest.mark.parametrize(
    ("words", "slug"),
    [
        (["--resolution", "64", "--tokenizer", "stub"], "usage"),
        ([], "usage"),
        (["--tokenizer", "nothing/at/all"], "model-not-found"),
        (["--tokenizer", "stub", "--loss", "some"], "usage"),
    ],
)
def test_rejections(run, data, words, slug):
    found = run("build", data, *words, "--json")
    assert found.status == 2
    assert found.error["slug"] == slug
    assert not (data.parent / "a.jsonl.latentcache").exists()


def test_events_name_every_block(run, data, tmp_path):
    run("build", data, "--tokenizer", "stub", "--events", tmp_path / "events", "--quiet")
    assert (tmp_path / "events").read_text().count('"commit"') == 1


def test_accounts_without_a_document(capsys):
    show_accounts({}, split_control=True)
    assert "no document" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "taken"), [([], "plain text"), (["--control-tokens"], "control tokens")])
def test_what_became_of_control_strings_is_said(run, tmp_path, words, taken):
    tokenizer = save(byte_level(), tmp_path / "model", roles={"eos_token": "<|im_end|>"})
    data = write_texts(tmp_path / "a.jsonl", ["one <|im_end|>", "two"])
    said = f"1 control string in 1 record: taken as {taken}"
    assert said in run("build", data, "--tokenizer", tokenizer, "--workers", "0", *words).out
    assert said in run("info", tmp_path / "a.jsonl.latentcache").out


def test_a_record_that_memory_is_not_enough_for_is_quarantined_and_tried_again(run, tmp_path):
    """4 000 000 characters at 320 bytes each are more than 1 GB."""
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "fine"}\n{"text": "' + "x" * 4_000_000 + '"}\n{"text": "too"}\n')
    done = run("build", data, "--tokenizer", "stub", "--host-memory", str(1 << 30), "--json")
    found = done.json
    assert (done.status, found["counts"]["encoded"], found["counts"]["quarantined"]) == (1, 2, 1)
    (item,) = found["items"]
    assert (item["reason"], item["path"], item["line"]) == ("record-too-large", "a.jsonl", 2)
    assert "4,000,000 characters" in item["found"]
    assert "1,073,741,824" in item["found"]
    assert "--host-memory" in item["hint"]
    cache = tmp_path / "a.jsonl.latentcache"
    assert run("verify", cache, "--json").json["counts"]["quarantined"] == 1
    found = run("build", data, "--tokenizer", "stub", "--host-memory", str(2 << 30), "--json").json
    assert (found["exit_code"], found["counts"]["encoded"], found["counts"]["cached"]) == (0, 1, 2)


def test_a_record_that_ends_its_workers_is_quarantined_and_workers_are_counted(run, tmp_path, monkeypatch):
    data = tmp_path / "a.jsonl"
    data.write_text("".join(f'{{"text": "{number}"}}\n' for number in range(20)))
    monkeypatch.setenv("LATENTCACHE_FAILPOINT", "encoding@a.jsonl#9:1:crash")
    done = run("build", data, "--tokenizer", "stub", "--workers", "1", "--json")
    assert (done.status, done.json["counts"]["encoded"]) == (1, 19)
    (item,) = done.json["items"]
    assert (item["reason"], item["line"]) == ("tokenizer-crash", 9)
    assert 2 <= done.json["worker_restarts"] <= 7
    assert "given out again" in done.err
    monkeypatch.delenv("LATENTCACHE_FAILPOINT")
    assert run("build", data, "--tokenizer", "stub", "--json").json["counts"]["encoded"] == 0
    found = run("build", data, "--tokenizer", "stub", "--retry-failed", "--json").json
    assert (found["exit_code"], found["counts"]["encoded"], found["worker_restarts"]) == (0, 1, 0)


@pytest.mark.parametrize("command", ["build", "build --dry-run", "info", "verify", "gc"])
def test_a_folder_in_the_place_of_current_is_called_so(run, tmp_path, command):
    """It was called a folder that may not be written, after all the work."""
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "one"}\n')
    run("build", data, "--tokenizer", "stub")
    cache = tmp_path / "a.jsonl.latentcache"
    (cache / "CURRENT").unlink()
    (cache / "CURRENT").mkdir()
    (cache / "CURRENT" / "mine").write_text("kept")
    name, *more = command.split()
    found = run(name, data if name == "build" else cache, *more, "--json")
    assert (found.status, found.error["slug"]) == (3, "cache-damaged")
    assert found.error["what"] == "CURRENT cannot be read or written: there is a folder in its place"
    assert found.error["fix"].startswith("mv ")
    (cache / "CURRENT").rename(tmp_path / "elsewhere")
    assert run("build", data, "--tokenizer", "stub", "--json").json["counts"]["encoded"] == 0
