import json
import subprocess
import sys

import pytest

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UsageError
from latentcache.sources.inventory import Inventory
from latentcache.sources.options import SourceOptions
from latentcache.sources.recognize import records
from latentcache.sources.recognize.records import read_dataset_info, saved_splits
from latentcache.sources.scan import scan
from latentcache.sources.splits import splits_of

ONE = '{"text": "one"}\n'


def records_of(data, **options):
    return scan(data, SourceOptions(kind="records", **options))


def texts(data, **options):
    found = records_of(data, **options)
    inputs = [value["record"] for _, value in found.job_inputs(range(len(found.samples)), ("record",))]
    return [one.text or one.messages[-1].content for one in inputs], found


def reasons(items):
    assert all(item.hint for item in items)
    return [(item.name, item.reason) for item in items]


def test_text_files_are_used_where_there_are_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("x\ny\n")
    assert texts(tmp_path)[0] == ["x\ny\n"]
    assert texts(tmp_path, text_lines=True)[0] == ["x", "y"]
    (tmp_path / "b.jsonl").write_text(ONE)
    found, listing = texts(tmp_path)
    assert (found, reasons(listing.notes)) == (["one"], [("a.txt", "text-unused")])


@pytest.mark.parametrize(("name", "text"), [("b.jsonl", " \n\n"), ("b.json", "[ ]")])
def test_a_file_without_records_is_noted(tmp_path, name, text):
    (tmp_path / "a.jsonl").write_text(ONE)
    (tmp_path / "bad.jsonl").write_text("{bad\n")
    (tmp_path / name).write_text(text)
    found, listing = texts(tmp_path)
    assert (found, reasons(listing.notes)) == (["one"], [(name, "unused")])
    assert scan(tmp_path, known=listing.samples, rejected=listing.rejected).notes == listing.notes


def test_a_damaged_parquet_file_beside_lines_is_one_of_records(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.jsonl").write_text(ONE)
    (tmp_path / "b.parquet").write_bytes(b"PAR1 cut short")
    listing = scan(tmp_path)
    assert (listing.data_kind, reasons(listing.rejected)) == ("records", [("b.parquet", "rows-damaged")])


@pytest.mark.parametrize("name", ["more.csv", "more.TSV", "data-00000.arrow"])
def test_a_table_that_is_not_read_is_reported(tmp_path, name):
    (tmp_path / "b.jsonl").write_text(ONE)
    (tmp_path / name).write_text("text\none\n")
    found, listing = texts(tmp_path)
    assert (found, reasons(listing.notes)) == (["one"], [(name, "table-unused")])


def test_a_single_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match="UTF-16"):
        records_of(tmp_path / "a.jsonl")


def test_dataset_info(tmp_path):
    (tmp_path / "a.json").write_text('[{"q": "x", "a": "y"}]')
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/1.jsonl").write_text('{"instruction": "i", "output": "o"}\n')
    info = {
        "one": {"file_name": "a.json", "columns": {"prompt": "q", "response": "a"}},
        "two": {"file_name": "parts"},
        "far": {"hf_hub_url": "org/x"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    (tmp_path / "loose.jsonl").write_text(ONE)
    for data in (tmp_path, tmp_path / "dataset_info.json"):
        found, listing = texts(data)
        assert (found, list(listing.samples.names)) == (["y", "o"], ["a.json:1", "parts/1.jsonl:1"])
        assert reasons(listing.rejected) == [("far", "hub-dataset")]
        assert reasons(listing.notes) == [("loose.jsonl", "unused")]
    assert texts(tmp_path, datasets=("two",))[0] == ["o"]
    with pytest.raises(UsageError, match="elsewhere"):
        records_of(tmp_path, datasets=("far",))


@pytest.mark.parametrize(
    ("file", "cause", "words"),
    [
        ("d.csv", "unread-form", "found .csv"),
        ("d", "unread-form", "no extension"),
        ("d.jsonl.gz", "compressed", "packed"),
        ("d.txt", "unread-form", "names others"),
    ],
)
def test_a_named_file_of_a_form_that_is_not_read_is_rejected_once(tmp_path, file, cause, words):
    (tmp_path / file).write_text("instruction,output\na,b\n")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {"file_name": file}}))
    found, listing = texts(tmp_path)
    (item,) = listing.rejected
    assert (found, item.name, item.line, item.reason) == ([], file, 0, cause)
    assert words in item.detail
    assert item.hint


def test_an_empty_folder(tmp_path):
    with pytest.raises(SourceNotFoundError):
        records_of(tmp_path / "none")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(EmptySourceError) as caught:
        records_of(tmp_path)
    assert "1 .csv" in caught.value.why


def test_pyarrow_that_is_not_installed_is_an_error_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(records, "find_spec", lambda name: None)
    with pytest.raises(SourceError) as caught:
        records_of(tmp_path)
    assert (caught.value.slug, caught.value.fix) == ("extra-missing", "pip install 'latentcache[hf]'")


def test_reading_records_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'tokenizers', 'pyarrow', 'datasets', 'PIL', 'lmdb'}"
    code = f"import sys, latentcache.sources.scan, latentcache.verify.compare; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


LOCAL = {
    "plain": {"file_name": "plain.json"},
    "named": {"file_name": "named.jsonl", "columns": {"prompt": "q", "response": "a"}},
    "talk": {
        "file_name": "talk.json",
        "formatting": "sharegpt",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}
REJECTED = {
    "hub": ({"hf_hub_url": "org/name"}, "hub-dataset"),
    "script": ({"script_url": "make.py"}, "script-dataset"),
    "pairs": ({"file_name": "plain.json", "ranking": True}, "not-for-sft"),
    "pixels": ({"file_name": "plain.json", "columns": {"images": "images"}}, "not-for-sft"),
    "gone": ({"file_name": "gone.json"}, "not-found"),
    "out": ({"file_name": "../out.json"}, "outside-root"),
    "odd": ({"file_name": "plain.json", "formatting": "csv"}, "record-field"),
    "nameless": ({}, "record-field"),
    "listed": ({"file_name": "plain.json", "columns": ["a"]}, "record-field"),
}


@pytest.fixture
def folder(tmp_path):
    info = LOCAL | {name: entry for name, (entry, _) in REJECTED.items()}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    for entry in LOCAL.values():
        (tmp_path / entry["file_name"]).write_text("[]")
    return tmp_path


def test_local_entries_are_used_and_the_others_rejected_by_name(folder):
    datasets, rejected, _ = read_dataset_info(folder)
    assert [file for file, _ in datasets] == [entry["file_name"] for entry in LOCAL.values()]
    assert {item.name: item.reason for item in rejected} == {name: cause for name, (_, cause) in REJECTED.items()}
    assert all(item.hint and item.name in item.detail for item in rejected)


def test_unnamed_columns_and_tags_are_none(folder):
    form = read_dataset_info(folder, ["named"])[0][0][1]
    assert (form.prompt, form.query, form.response, form.system) == ("q", "", "a", "")
    form = read_dataset_info(folder, ["talk"])[0][0][1]
    assert (form.messages, form.role_tag) == ("messages", "role")
    assert form.roles == (("user", "user"), ("assistant", "assistant"))


@pytest.mark.parametrize(
    ("columns", "form", "text"),
    [
        ({"prompt": "body"}, "text", "body"),
        ({"prompt": "body", "response": "", "query": None}, "text", "body"),
        ({"prompt": "body", "query": "more"}, "alpaca", "text"),
        ({"prompt": "body", "system": "said"}, "alpaca", "text"),
        ({}, "alpaca", "text"),
    ],
)
def test_a_prompt_alone_is_text(tmp_path, columns, form, text):
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": {"file_name": "a.json", "columns": columns}}))
    (((_, found),), _, _) = read_dataset_info(tmp_path)
    assert (found.form, found.text) == (form, text)


def test_media_that_an_entry_of_text_does_not_name_are_unused_columns(tmp_path):
    (tmp_path / "a.json").write_text(
        json.dumps([{"body": "one", "image": "a.png"}, {"body": "two", "videos": ["v"]}])
    )
    entry = {"file_name": "a.json", "columns": {"prompt": "body"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"a": entry}))
    found, listing = texts(tmp_path)
    assert found == ["one", "two"]
    assert listing.rejected == ()


@pytest.mark.parametrize("text", ["[]", '{"a": 1}', "{", '{"a": {}, "a": {}}'])
def test_a_missing_file_is_an_error(tmp_path, text):
    (tmp_path / "dataset_info.json").write_text(text)
    with pytest.raises(SourceError):
        read_dataset_info(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"step": 7}', '{"_data_files": [{"name": "a"}]}', ""])
def test_the_files_that_a_saved_data_set_names(tmp_path, text):
    names = {"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(names))
    assert saved_splits(Inventory(tmp_path)) == {"": ["b.arrow", "a.arrow"]}
    (tmp_path / "state.json").write_text(text)
    assert saved_splits(Inventory(tmp_path)) == {}


def test_a_saved_split_without_its_files_is_an_error(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "test/state.json").write_text('{"_data_files": [{"filename": "a.arrow"}]}')
    with pytest.raises(SourceError, match=r"train/state\.json lists no files"):
        records_of(tmp_path)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("data/train-00000-of-00002.parquet data/a-00001-of-00002.parquet", "train a"),
        ("default/train/0.parquet default/test/0.parquet b.parquet", "train test "),
        ("train.jsonl val.jsonl my_eval-2.jsonl", "train validation test"),
        ("Test.jsonl latest.jsonl trained.jsonl", "test  "),
        ("train/test.jsonl train/b.jsonl", "train train"),
        ("train/a.jsonl cats/b.jsonl", " "),
        ("train-0.tar test-0.tar", "train test"),
        ("a.jsonl b.jsonl", " "),
    ],
)
def test_splits_by_the_names_of_files(names, splits):
    assert splits_of(names.split()) == splits.split(" ")
