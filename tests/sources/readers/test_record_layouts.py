import json
import subprocess
import sys

import pytest
from made_folders import reasons

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError
from latentcache.sources.options import SourceOptions
from latentcache.sources.readers import records
from latentcache.sources.scan import scan
from latentcache.sources.splits import splits_of

ONE = '{"text": "one"}\n'


def records_of(data, **options):
    return scan(data, SourceOptions(kind="records", **options))


def texts(data, **options):
    listing = records_of(data, **options)
    inputs = [value["record"] for _, value in listing.job_inputs(range(len(listing.samples)), ("record",))]
    return [record.text or record.messages[-1].content for record in inputs], listing


def test_text_files_are_used_where_there_are_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("x\ny\n")
    assert texts(tmp_path)[0] == ["x\ny\n"]
    assert texts(tmp_path, text_lines=True)[0] == ["x", "y"]
    (tmp_path / "b.jsonl").write_text(ONE)
    contents, listing = texts(tmp_path)
    assert (contents, reasons(listing.notes)) == (["one"], [("a.txt", "text-unused")])


@pytest.mark.parametrize(("name", "text"), [("b.jsonl", " \n\n"), ("b.json", "[ ]")])
def test_a_file_without_records_is_noted(tmp_path, name, text):
    (tmp_path / "a.jsonl").write_text(ONE)
    (tmp_path / "bad.jsonl").write_text("{bad\n")
    (tmp_path / name).write_text(text)
    contents, listing = texts(tmp_path)
    assert (contents, reasons(listing.notes)) == (["one"], [(name, "unused")])
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
    contents, listing = texts(tmp_path)
    assert (contents, reasons(listing.notes)) == (["one"], [(name, "table-unused")])


def test_a_single_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match="UTF-16"):
        records_of(tmp_path / "a.jsonl")


def test_dataset_info_of_llama_factory_is_refused_with_the_way_out(tmp_path):
    (tmp_path / "a.json").write_text('[{"instruction": "x", "output": "y"}]')
    info = {"one": {"file_name": "a.json", "columns": {"prompt": "instruction"}}, "far": {"hf_hub_url": "org/x"}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    with pytest.raises(SourceError, match="not followed") as caught:
        records_of(tmp_path)
    assert "one file of records as DATA" in caught.value.fix
    assert texts(tmp_path / "a.json")[0] == ["y"]
    (tmp_path / "dataset_info.json").unlink()
    assert texts(tmp_path)[0] == ["y"]


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


@pytest.mark.parametrize(("module", "may_import"), [("sources.scan", set()), ("verify.compare", {"lmdb"})])
def test_reading_records_imports_nothing_heavy(module, may_import):
    heavy = {"torch", "transformers", "tokenizers", "pyarrow", "datasets", "PIL", "lmdb"} - may_import
    code = f"import sys, latentcache.{module}; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


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
