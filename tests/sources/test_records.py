import json
import pickle

import pytest

from latentcache.identity.stat import StatMemo
from latentcache.sources.records import Message, RecordScan, RecordSource, chat_record, record_size, text_record


def turns(**changes):
    asked = Message(role="user", content="2 + 2?")
    said = Message(**{"role": "assistant", "content": "4", "learned": True, **changes})
    return (asked, said)


def test_where_a_record_stands_is_no_part_of_its_content():
    assert text_record("a.jsonl", 1, "hello").content == text_record("b.jsonl", 9, "hello").content
    assert chat_record("a", 1, turns()).content == chat_record("b", 2, turns()).content


@pytest.mark.parametrize(
    "other",
    [
        {"content": "5"},
        {"role": "tool"},
        {"learned": False},
        {"fields": (("tool_calls", "[]"),)},
    ],
)
def test_all_of_a_turn_is_part_of_the_content(other):
    assert chat_record("a", 1, turns()).content != chat_record("a", 1, turns(**other)).content


def test_tools_and_their_order_are_part_of_the_content():
    one, two = json.dumps([{"a": 1, "b": 2}]), json.dumps([{"b": 2, "a": 1}])
    contents = {chat_record("a", 1, turns(), tools).content for tools in ("", one, two)}
    assert len(contents) == 3


def test_the_size_of_a_record_has_all_that_a_template_may_write():
    assert record_size(text_record("a", 1, "hello")) == 5
    assert record_size(chat_record("a", 1, turns())) == 7
    fields = (("reasoning_content", "y" * 20), ("tool_calls", "z" * 300))
    assert record_size(chat_record("a", 1, turns(fields=fields), "[4000]")) == 7 + 20 + 300 + 6


def test_a_text_is_no_conversation():
    assert text_record("a", 1, '[[],""]').content != chat_record("a", 1, ()).content


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(UnicodeEncodeError):
        text_record("a", 1, "\ud800")
    with pytest.raises(UnicodeEncodeError):
        chat_record("a", 1, turns(content="\ud800"))


def test_records_travel_between_processes():
    record = chat_record("a", 1, turns())
    assert pickle.loads(pickle.dumps(record)) == record


def test_a_scan_can_be_read_twice(tmp_path):
    memo = StatMemo(size=1, mtime_ns=0, ctime_ns=0, inode=0, device=0)

    def read(log, without, first):
        if "a" not in without:
            yield text_record("a", 1, "x")
            log.sources.append(RecordSource(name="a", stat=memo, content=bytes(16), records=1, refused=0))

    scan = RecordScan(tmp_path, read)
    assert list(scan.but(["a"])) == []
    assert (scan.sources, scan.refused, scan.notes) == ((), (), ())
    assert [r.text for r in scan] == [r.text for r in scan] == ["x"]
    assert [s.name for s in scan.sources] == ["a"]
