import numpy as np
from small_tokens import build, opened, write_texts

from latentcache.encoders.stub_tokeniser import StubTokeniser, stub_description
from latentcache.sources.corpus import scan_records
from latentcache.verify.token_sources import check_records, compare_tokens


def test_records_are_told_by_what_they_hold(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two", "three"])
    build(data, tmp_path / "cache")
    generation, reader = opened(tmp_path / "cache")
    write_texts(data, ["three", "changed", "one", "one"])
    checked, records = check_records(generation, scan_records(data), np.array([0, 1]))
    assert {number: one.reason for number, one in checked.by_document.items()} == {1: "source-changed"}
    assert (checked.records, checked.others) == (4, [])
    assert [record.text for record in records] == ["one"]

    def again(add_eos):
        tokeniser = StubTokeniser(stub_description(add_eos=add_eos))
        return lambda records: [(one.ids, one.runs) for one in tokeniser.tokenise(records)]

    wanted = np.array([0, 1])
    assert compare_tokens(reader, wanted, records, again(True)) == {}
    assert list(compare_tokens(reader, wanted, records, again(False))) == [0]
    refused = compare_tokens(reader, wanted, records, lambda records: [None])
    assert refused[0].found == "the tokenizer refuses it"
    other = compare_tokens(reader, wanted, records, lambda r: [(reader.ids(0), np.array([[0, 1]]))])
    assert other[0].found == "loss on [[0, 1]]"
