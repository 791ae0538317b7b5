"""Builds over many files of which few change: the others are not opened."""

import json

import numpy as np
import pytest
from made_templates import CHATML, untagged
from made_tokenizers import byte_level, save
from small_tokens import build, opened, spoken, tamper, write_texts

from latentcache.errors import UsageError
from latentcache.pipeline.token_memory import is_chat_data, survey_changed
from latentcache.pipeline.token_survey import survey_records
from latentcache.sources import lines
from latentcache.sources.corpus import RecordOptions, scan_records

CHAT = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
BROKEN = ("{no json",)


@pytest.fixture(autouse=True)
def trusted(monkeypatch):
    """Every file can be trusted at once."""
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)


@pytest.fixture
def read(monkeypatch):
    """Names of files that were opened, in order."""
    found, real = [], lines.open_source

    def seen(path):
        found.append(path.name)
        return real(path)

    monkeypatch.setattr(lines, "open_source", seen)
    return found


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "a.jsonl", ["one", "two", BROKEN])
    write_texts(tmp_path / "data" / "b.jsonl", ["three", "one"])
    write_texts(tmp_path / "data" / "c.jsonl", ["four"])
    return tmp_path / "data"


def test_one_changed_file_of_many_is_the_only_one_read(data, tmp_path, read):
    cache = tmp_path / "cache"
    build(data, cache, allow_failed="1")
    assert {*read} == {"a.jsonl", "b.jsonl", "c.jsonl"}
    write_texts(data / "b.jsonl", ["three", "five", "one"])
    read.clear()
    report = build(data, cache, allow_failed="1")
    assert {*read} == {"b.jsonl"}
    assert (report.encoded, report.cached, len(report.refused)) == (1, 4, 1)
    generation, reader = opened(cache)
    assert spoken(reader) == ["one", "two", "three", "five", "one", "four"]
    assert generation.documents.line.tolist() == [1, 2, 1, 2, 3, 1]
    assert [one["line"] for one in generation.refused] == [3]
    build(data, tmp_path / "fresh", allow_failed="1")
    assert opened(tmp_path / "fresh")[0].fingerprint == generation.fingerprint


def test_files_that_come_go_and_move(data, tmp_path, read):
    cache = tmp_path / "cache"
    build(data, cache, allow_failed="1")
    (data / "b.jsonl").unlink()
    write_texts(data / "aa.jsonl", ["new"])
    read.clear()
    build(data, cache, allow_failed="1")
    assert {*read} == {"aa.jsonl"}
    assert spoken(opened(cache)[1]) == ["one", "two", "new", "four"]
    (data / "c.jsonl").rename(data / "d.jsonl")
    read.clear()
    build(data, cache, allow_failed="1")
    assert {*read} == {"d.jsonl"}
    assert opened(cache)[0].documents.sources == ("a.jsonl", "aa.jsonl", "d.jsonl")


def test_the_survey_is_the_one_of_a_build_that_reads_all(data, tmp_path):
    tokenizer = str(save(byte_level(), tmp_path / "model", roles={"eos_token": "<|im_end|>"}))
    write_texts(data / "c.jsonl", ["four", "no character: \ufdd0", "six"])  # the tokenizer refuses one
    build(data, tmp_path / "cache", allow_failed="9", tokenizer=tokenizer)
    known = opened(tmp_path / "cache")[0]
    write_texts(data / "b.jsonl", ["three", "another", BROKEN])
    scan = scan_records(data)
    work = survey_changed(scan, known)
    expected = survey_records(scan)
    assert sorted(map(repr, work.refused)) == sorted(map(repr, expected.refused))
    assert [(s.name, s.content, s.reading) for s in work.sources] == [
        (s.name, s.content, s.reading) for s in expected.sources
    ]
    for name in ("content", "source", "line"):
        assert np.array_equal(getattr(work, name), getattr(expected, name)), name
    assert is_chat_data(scan, known) is False


def test_another_way_of_reading_reads_again(tmp_path, read):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one\ntwo\n")
    build(tmp_path / "data", tmp_path / "cache")
    build(tmp_path / "data", tmp_path / "cache", text_lines=True)
    assert spoken(opened(tmp_path / "cache")[1]) == ["one", "two"]
    whole, by_line = (scan_records(tmp_path / "data", RecordOptions(text_lines=on)).files[0] for on in (False, True))
    assert whole.reading != by_line.reading


def test_columns_of_a_dataset_info_are_part_of_how_a_file_is_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.json").write_text(json.dumps([{"q": "one", "p": "two", "r": "three"}]))
    for column in ("q", "p"):
        info = {"a": {"file_name": "a.json", "columns": {"prompt": column, "response": "r", "query": ""}}}
        (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(info))
        report = build(tmp_path / "data", tmp_path / "cache")
        assert (report.encoded, report.cached) == (1, 0)


def test_what_was_lost_of_an_unchanged_file_is_made_again(data, tmp_path, read):
    cache = tmp_path / "cache"
    build(data, cache, allow_failed="1")
    expected = opened(cache)[0].fingerprint
    write_texts(data / "d.jsonl", ["more"])
    tamper(cache)
    index = next((cache / "shards").iterdir())
    read.clear()
    for path in sorted(index.iterdir()):
        path.unlink()
    assert build(data, cache, allow_failed="1").encoded == 5
    assert {*read} == {"a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"}
    (data / "d.jsonl").unlink()
    build(data, cache, allow_failed="1")
    assert opened(cache)[0].fingerprint == expected


def test_refused_records_are_looked_at_again_where_that_is_asked(data, tmp_path, read):
    build(data, tmp_path / "cache", allow_failed="1")
    read.clear()
    build(data, tmp_path / "cache", allow_failed="1", retry_failed=True)
    assert "a.jsonl" in read


def test_conversations_are_known_without_opening_them(tmp_path, read):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text(CHAT + "\n")
    build(tmp_path / "data", tmp_path / "cache")
    (tmp_path / "data" / "b.jsonl").write_text(CHAT.replace('"a"', '"b"') + "\n")
    read.clear()
    assert build(tmp_path / "data", tmp_path / "cache").encoded == 1
    assert {*read} == {"b.jsonl"}


def mixed(folder, text="a.jsonl", chat="b.jsonl"):
    folder.mkdir(exist_ok=True)
    write_texts(folder / text, ["one"])
    (folder / chat).write_text(CHAT + "\n")
    return folder


@pytest.mark.parametrize("names", [("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")])
def test_texts_and_conversations_stand_in_one_folder(tmp_path, names):
    tokenizer = save(byte_level(), tmp_path / "model", template=untagged(CHATML), roles={"eos_token": "<|im_end|>"})
    data = mixed(tmp_path / "data", *names)
    report = build(data, tmp_path / "c", tokenizer=str(tokenizer))
    generation, reader = opened(tmp_path / "c")
    assert (report.encoded, report.refused, generation.recipe.loss) == (2, (), "assistant")
    assert generation.recipe.chat_template
    text, chat = (generation.documents.sources.index(name) for name in names)
    (whole,) = generation.documents.runs(text).tolist()
    assert whole == [0, len(reader.ids(text))]
    (start, length), *_ = generation.documents.runs(chat).tolist()
    assert 0 < start < start + length <= len(reader.ids(chat))
    (data / names[1]).unlink()
    build(data, tmp_path / "texts", tokenizer=str(tokenizer))
    alone, other = opened(tmp_path / "texts")
    assert alone.recipe.recipe_id != generation.recipe.recipe_id
    assert np.array_equal(other.ids(0), reader.ids(text))  # the template is nothing to a text
    assert alone.documents.runs(0).tolist() == [whole]


def test_conversations_that_come_to_texts_learn_what_assistants_say(tmp_path, read):
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "a.jsonl", ["one"])
    build(tmp_path / "data", tmp_path / "cache")
    mixed(tmp_path / "data")
    build(tmp_path / "data", tmp_path / "cache")
    build(tmp_path / "data", tmp_path / "fresh")
    generation, fresh = (opened(tmp_path / name)[0] for name in ("cache", "fresh"))
    assert generation.recipe == fresh.recipe
    assert generation.recipe.loss == "assistant"
    assert generation.fingerprint == fresh.fingerprint


def test_unchanged_files_are_believed_where_one_of_them_must_be_the_conversations(tmp_path, read):
    data = mixed(tmp_path / "data")
    build(data, tmp_path / "cache")
    write_texts(data / "c.jsonl", ["more"])
    known = opened(tmp_path / "cache")[0]
    read.clear()
    assert is_chat_data(scan_records(data), known)
    assert {*read} == {"c.jsonl"}


def test_conversations_that_go_take_the_template_with_them(tmp_path, read):
    data = mixed(tmp_path / "data")
    build(data, tmp_path / "cache")
    (data / "b.jsonl").unlink()
    known = opened(tmp_path / "cache")[0]
    assert not is_chat_data(scan_records(data), known)
    mixed(data, "a.jsonl", "d.jsonl")
    assert is_chat_data(scan_records(data), known)


def test_plain_text_files_are_not_opened_for_their_kind(tmp_path, read):
    (tmp_path / "a.txt").write_text("one")
    assert not is_chat_data(scan_records(tmp_path), None)
    assert read == []


def test_texts_beside_conversations_need_their_ends(tmp_path):
    tokenizer = str(save(byte_level(), tmp_path / "model", template=untagged(CHATML)))
    data = mixed(tmp_path / "data", "b.jsonl", "a.jsonl")
    with pytest.raises(UsageError, match="eos_token"):
        build(data, tmp_path / "cache", tokenizer=tokenizer)
    build(data, tmp_path / "cache", tokenizer=tokenizer, add_eos=False)
    (data / "b.jsonl").unlink()
    build(data, tmp_path / "chats", tokenizer=tokenizer)
