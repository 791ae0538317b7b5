import json
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from small_tokens import write_texts

from latentcache.errors import SourceError
from latentcache.pipeline.token_survey import (
    as_refusals,
    first_of_each,
    refused_rows,
    survey_records,
    todo_records,
    token_refusal_json,
)
from latentcache.sources import record_files
from latentcache.sources.corpus import scan_records
from latentcache.sources.lines import parse_json
from latentcache.sources.sample import Refusal


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data").mkdir()
    write_texts(tmp_path / "data" / "b.jsonl", ["three", "one"])
    write_texts(tmp_path / "data" / "a.jsonl", ["one", ("bad",), "two"])
    return tmp_path / "data"


def test_records_in_order_with_their_places(data):
    work = survey_records(scan_records(data))
    assert [source.name for source in work.sources] == ["a.jsonl", "b.jsonl"]
    assert (work.source.tolist(), work.line.tolist()) == ([0, 0, 1, 1], [1, 3, 1, 2])
    assert work.size.tolist() == [3, 3, 5, 3]
    assert [one.line for one in work.refused] == [2]
    assert first_of_each(work.content).tolist() == [0, 1, 2]


def test_the_second_pass_gives_what_is_to_do(data):
    scan = scan_records(data)
    work = survey_records(scan)
    todo = np.array([False, True, True, False])
    assert [record.text for record in todo_records(scan, work, todo)] == ["two", "three"]
    assert list(todo_records(scan, work, ~todo & False)) == []


@pytest.fixture
def parsed(monkeypatch):
    """Lines that were parsed."""
    lines = []

    def parse(text):
        lines.append(text)
        return parse_json(text)

    monkeypatch.setattr(record_files, "parse_json", parse)
    return lines


@pytest.mark.parametrize(
    ("keep", "kept", "again"),
    [(0, [], 5), (600, [], 5), (1100, ["a.jsonl"], 2), (2062, ["a.jsonl"], 2), (1 << 20, ["a.jsonl", "b.jsonl"], 0)],
)
def test_the_first_files_are_kept_whole_while_there_is_room(data, parsed, keep, kept, again):
    scan = scan_records(data)
    work = survey_records(scan, keep=keep)
    assert list(work.kept) == kept
    parsed.clear()
    records = list(todo_records(scan, work, np.ones(4, dtype=np.bool_)))
    assert [record.text for record in records] == ["one", "two", "three", "one"]
    assert len(parsed) == again
    some = todo_records(scan, work, np.array([False, True, False, True]))
    assert [record.text for record in some] == ["two", "one"]


TURNS = {
    "many": [{"role": role, "content": "ok"} for _ in range(30) for role in ("user", "assistant")],
    "thought": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "4", "reasoning_content": "y" * 9_000},
    ],
    "called": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "w", "arguments": {"file": "z" * 9_000}}}]},
        {"role": "tool", "content": "ok"},
        {"role": "assistant", "content": "done"},
    ],
    "named": [{"role": role, "content": "ok", "name": "joe"} for _ in range(30) for role in ("user", "assistant")],
}


@pytest.mark.parametrize("turns", TURNS)
def test_what_is_kept_of_conversations_is_what_there_is_room_for(tmp_path, turns):
    """The second file has three times what there is room for and more; no turn has more than two letters of text."""
    line, keep = f"{json.dumps({'messages': TURNS[turns]})}\n", 1 << 20
    (tmp_path / "a.jsonl").write_text(20 * line)
    (tmp_path / "b.jsonl").write_text(350 * line)
    scan, peaks = scan_records(tmp_path), []
    survey_records(scan)  # what is imported and made once is no part of it
    for room in (0, keep):
        tracemalloc.start()
        work = survey_records(scan, keep=room)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert list(work.kept) == (["a.jsonl"] if room else [])
    assert peaks[1] - peaks[0] < 1.2 * keep


@pytest.mark.parametrize("kept", ["a", "b", "c", "ac", "bc"])
def test_what_is_kept_and_what_is_read_come_in_the_order_of_the_files(data, parsed, kept):
    write_texts(data / "c.jsonl", ["five", "six"])
    scan = scan_records(data)
    whole = survey_records(scan, keep=1 << 20)
    work = replace(whole, kept={name: whole.kept[name] for name in (f"{letter}.jsonl" for letter in kept)})
    for name in work.kept:
        (data / name).unlink()  # whoever opens it fails
    found = [(record.source, record.line) for record in todo_records(scan, work, np.ones(6, dtype=np.bool_))]
    assert found == [(work.sources[s].name, line) for s, line in zip(work.source, work.line, strict=True)]


@pytest.mark.parametrize("lines", [["three"], ["other", "one"], ["new", "three", "one"]])
def test_a_file_that_changes_meanwhile_is_noticed(data, lines):
    scan = scan_records(data)
    work = survey_records(scan)
    write_texts(data / "b.jsonl", lines)
    with pytest.raises(SourceError):
        list(todo_records(scan, work, np.ones(4, dtype=np.bool_)))


def test_a_refusal_stands_for_each_of_its_records(data):
    work = survey_records(scan_records(data))
    refusal = Refusal(name="x", cause="c", content=work.content[0].tobytes())
    found = refused_rows(work, {refusal.content: refusal})
    assert [(one.name, one.line, one.cause) for one in found] == [("a.jsonl", 1, "c"), ("b.jsonl", 2, "c")]
    assert refused_rows(work, {}) == []


def test_refusals_are_kept_and_made_whole():
    made = [
        Refusal(name="a", cause="c", detail="d", hint="h", content=b"x" * 16, line=3, field="f"),
        Refusal(name="b", cause="c"),
    ]
    assert as_refusals([token_refusal_json(one) for one in made]) == made
