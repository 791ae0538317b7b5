import json

import numpy as np
from made_tokenizers import byte_level, save
from small_tokens import build, opened, write_texts

from latentcache.encoders.stub_tokeniser import StubTokeniser, stub_description
from latentcache.sources.corpus import scan_records
from latentcache.verify.entries import Checked
from latentcache.verify.token_sources import check_records, compare_tokens


def test_records_are_told_by_what_they_hold(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two", "three"])
    build(data, tmp_path / "cache")
    generation, reader = opened(tmp_path / "cache")
    write_texts(data, ["three", "changed", "one", "one"])
    checked = check_records(generation, scan_records(data), wanted=np.array([0, 1]))
    assert {number: one.reason for number, one in checked.by_document.items()} == {1: "source-changed"}
    assert (checked.records, checked.others) == (4, [])
    assert [record.text for record in checked.kept] == ["one"]

    def again(add_eos):
        tokeniser = StubTokeniser(stub_description(add_eos=add_eos))
        return lambda records: [(one.ids, one.runs) for one in tokeniser.tokenise(records)]

    def drift(retokenise):
        found = Checked()
        assert compare_tokens(reader, [0, 1], checked.kept, retokenise, found) == 1
        return {number: one.found for number, (one,) in found.damage.items()}

    assert drift(again(True)) == {}
    assert list(drift(again(False))) == [0]
    assert drift(lambda records: [None]) == {0: "the tokenizer refuses it"}
    assert drift(lambda records: [(reader.ids(0), np.array([[0, 1]]))]) == {0: "loss on [[0, 1]]"}


def said(checked):
    return {(one.category, one.reason, one.path) for one in (*checked.by_document.values(), *checked.others)}


def test_files_that_are_the_same_are_believed_unless_all_are_to_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    tokenizer = str(save(byte_level(), tmp_path / "model", roles={"eos_token": "<|im_end|>"}))
    data = tmp_path / "data"
    data.mkdir()
    write_texts(data / "a.jsonl", ["one", ("{no json",), "no character: \ufdd0"])
    write_texts(data / "b.jsonl", ["two", "one", "three"])
    build(data, tmp_path / "cache", tokenizer=tokenizer, allow_failed="2")
    generation = opened(tmp_path / "cache")[0]
    write_texts(data / "b.jsonl", ["two", "one", "four"])
    found = {}
    for full, wanted, records in ((False, [], 3), (True, [], 5), (False, [0], 5)):
        kept = np.array(wanted, dtype=np.intp)
        checked = check_records(generation, scan_records(data), wanted=kept, reread=None if full else kept)
        assert (checked.records, len(checked.kept)) == (records, len(wanted))
        found[full, len(wanted)] = said(checked)
    assert found[False, 0] == found[True, 0] == found[False, 1]
    assert {("stale", "source-changed", "b.jsonl:3"), ("quarantined", "no-json", "a.jsonl:2")} <= found[False, 0]
    assert len(found[False, 0]) == 3


def test_a_line_that_two_data_sets_refuse_is_two_refusals(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_text('{"q": "one", "a": "two"}\n{"q": 5, "a": 6}\n')
    columns = [{"prompt": "q", "response": "a"}, {"prompt": "a", "response": "q"}]
    info = {str(number): {"file_name": "a.jsonl", "columns": some} for number, some in enumerate(columns)}
    (data / "dataset_info.json").write_text(json.dumps(info))
    report = build(data, tmp_path / "cache", allow_failed="2")
    checked = check_records(opened(tmp_path / "cache")[0], scan_records(data))
    assert [(one.path, one.field) for one in checked.others] == [("a.jsonl:2", "q"), ("a.jsonl:2", "a")]
    assert len(report.refused) == 2
