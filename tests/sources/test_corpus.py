import json
import subprocess
import sys

import pytest

from latentcache.errors import EmptySourceError, SourceError, SourceNotFoundError, UsageError
from latentcache.sources import corpus
from latentcache.sources.corpus import RecordOptions, is_corpus, scan_records

ONE = '{"text": "one"}\n'


def texts(data, **options):
    scan = scan_records(data, RecordOptions(**options))
    return [r.text for r in scan], scan


def test_a_single_file(tmp_path):
    (tmp_path / "a.jsonl").write_text(ONE)
    (record,) = scan_records(tmp_path / "a.jsonl")
    assert (record.text, record.source, record.line) == ("one", "a.jsonl", 1)


def test_a_folder_in_the_byte_order_of_its_names(tmp_path):
    for name in ("b.jsonl", "a/z.jsonl", "B.json", "é.ndjson"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    (tmp_path / ".hidden.jsonl").write_text(ONE)
    (tmp_path / "README.md").write_text("no data")
    found, scan = texts(tmp_path)
    assert found == ["B.json", "a/z.jsonl", "b.jsonl", "é.ndjson"]
    assert [source.name for source in scan.sources] == found


def test_text_files_are_used_where_there_are_no_records(tmp_path):
    (tmp_path / "a.txt").write_text("x\ny\n")
    assert texts(tmp_path)[0] == ["x\ny\n"]
    assert texts(tmp_path, text_lines=True)[0] == ["x", "y"]
    (tmp_path / "b.jsonl").write_text(ONE)
    found, scan = texts(tmp_path)
    assert (found, [note.cause for note in scan.notes]) == (["one"], ["text-unused"])


@pytest.mark.parametrize("name", ["more.csv", "more.TSV", "data-00000.arrow"])
def test_a_table_that_is_not_read_is_said_not_to_be(tmp_path, name):
    (tmp_path / "b.jsonl").write_text(ONE)
    (tmp_path / name).write_text("text\none\n")
    found, scan = texts(tmp_path)
    assert (found, [(note.cause, note.name) for note in scan.notes]) == (["one"], [("table-unused", name)])


def test_what_cannot_be_read_does_not_stop_the_rest(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text(ONE)
    (tmp_path / "d.jsonl.gz").write_bytes(b"\x1f\x8b")
    (tmp_path / "e.jsonl").symlink_to(tmp_path / "c.jsonl")
    found, scan = texts(tmp_path)
    assert found == ["one"]
    assert {item.name: item.cause for item in scan.refused} == {
        "a.jsonl": "not-utf8",
        "b.jsonl": "empty",
        "d.jsonl.gz": "compressed",
    }
    assert [(note.name, note.cause) for note in scan.notes] == [("e.jsonl", "link")]


def test_caches_are_no_data(tmp_path):
    (tmp_path / "a.jsonl").write_text(ONE)
    for name in ("x.latentcache", "cache/generations"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "cache/CURRENT").write_text("1")
    (tmp_path / "cache/r.jsonl").write_text(ONE)
    (tmp_path / "x.latentcache/r.jsonl").write_text(ONE)
    found, scan = texts(tmp_path)
    assert (found, sorted(note.name for note in scan.notes)) == (["one"], ["cache/", "x.latentcache/"])


def test_a_single_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SourceError, match="UTF-16"):
        list(scan_records(tmp_path / "a.jsonl"))


def test_a_list_that_breaks_after_records_were_given_is_an_error(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": ]')
    (tmp_path / "b.jsonl").write_text(ONE)
    with pytest.raises(SourceError, match=r"a\.json"):
        list(scan_records(tmp_path))


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
    for data in (tmp_path, tmp_path / "dataset_info.json"):
        scan = scan_records(data)
        assert [(r.source, r.messages[1].content) for r in scan] == [("a.json", "y"), ("parts/1.jsonl", "o")]
        assert [item.cause for item in scan.refused] == ["hub-dataset"]
    assert len(list(scan_records(tmp_path, RecordOptions(datasets=("two",))))) == 1
    with pytest.raises(UsageError, match="server"):
        scan_records(tmp_path, RecordOptions(datasets=("far",)))


def test_a_dataset_info_of_texts(tmp_path):
    (tmp_path / "c4_demo.jsonl").write_text(ONE)
    (tmp_path / "wiki_demo.txt").write_text("two\n\nthree\n")
    info = {name: {"file_name": name, "columns": {"prompt": "text"}} for name in ("c4_demo.jsonl", "wiki_demo.txt")}
    (tmp_path / "dataset_info.json").write_text(json.dumps(info))
    found, scan = texts(tmp_path)
    assert (found, scan.refused, scan.notes) == (["one", "two", "three"], (), ())


@pytest.mark.parametrize(
    ("file", "cause", "words"),
    [
        ("d.csv", "unread-form", "found .csv"),
        ("d", "unread-form", "no extension"),
        ("d.jsonl.gz", "compressed", "packed"),
        ("d.txt", "unread-form", "names others"),
    ],
)
def test_a_named_file_of_a_form_that_is_not_read_is_refused_once(tmp_path, file, cause, words):
    (tmp_path / file).write_text("instruction,output\na,b\n")
    (tmp_path / "dataset_info.json").write_text(json.dumps({"d": {"file_name": file}}))
    found, scan = texts(tmp_path)
    (item,) = scan.refused
    assert (found, item.name, item.line, item.cause) == ([], file, 0, cause)
    assert words in item.detail
    assert item.hint


def test_what_lies_beside_records_in_a_named_folder_is_noted(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/1.jsonl").write_text('{"instruction": "i", "output": "o"}\n')
    for name in ("README.md", "LICENSE.txt", "more.csv", "2.jsonl.gz"):
        (tmp_path / "parts" / name).write_text("one\ntwo\n")
    (tmp_path / "parts/3.jsonl").symlink_to(tmp_path / "parts/1.jsonl")
    (tmp_path / "dataset_info.json").write_text('{"d": {"file_name": "parts"}}')
    found, scan = texts(tmp_path)
    assert (len(found), [(item.name, item.cause) for item in scan.refused]) == (
        1,
        [("parts/2.jsonl.gz", "compressed")],
    )
    assert {(note.name, note.cause) for note in scan.notes} == {
        ("parts/3.jsonl", "link"),
        ("parts/LICENSE.txt", "table-unused"),
        ("parts/README.md", "table-unused"),
        ("parts/more.csv", "table-unused"),
    }


def test_names_without_a_dataset_info_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text(ONE)
    with pytest.raises(UsageError, match="dataset_info"):
        scan_records(tmp_path, RecordOptions(datasets=("x",)))


@pytest.mark.parametrize(("name", "words"), [("a.csv", "expected one of"), ("a.jsonl.gz", "packed")])
def test_other_files_are_refused_by_name(tmp_path, name, words):
    (tmp_path / name).write_text("x")
    with pytest.raises(UsageError) as caught:
        scan_records(tmp_path / name)
    assert words in caught.value.why


def test_nothing_there(tmp_path):
    with pytest.raises(SourceNotFoundError):
        scan_records(tmp_path / "none")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(EmptySourceError) as caught:
        scan_records(tmp_path)
    assert "1 .csv" in caught.value.why


def test_pyarrow_that_is_not_installed_is_an_error_with_the_command(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setattr(corpus, "find_spec", lambda name: None)
    with pytest.raises(SourceError) as caught:
        scan_records(tmp_path)
    assert (caught.value.slug, caught.value.fix) == ("extra-missing", "pip install 'latentcache[hf]'")


def test_what_is_meant_for_tokens(tmp_path):
    (tmp_path / "a.jsonl").write_text(ONE)
    assert is_corpus(tmp_path / "a.jsonl")
    assert not is_corpus(tmp_path)
    (tmp_path / "dataset_info.json").write_text("{}")
    assert is_corpus(tmp_path)


def test_reading_records_imports_nothing_heavy():
    heavy = "{'torch', 'transformers', 'tokenizers', 'pyarrow', 'datasets', 'PIL', 'lmdb'}"
    code = f"import sys, latentcache.sources.corpus; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
