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
from latentcache.sources.corpus import scan_records
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
