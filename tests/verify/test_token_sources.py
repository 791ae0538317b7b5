import numpy as np
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
