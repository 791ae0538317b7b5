import os
import signal

import pytest

from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.errors import EncoderError, WorkerError
from latentcache.pipeline import token_pool
from latentcache.pipeline.token_pool import TokenPool, default_workers, units
from latentcache.sources.records import Message, chat_record, text_record


def records(count):
    return [text_record("a", number, f"text {number}") for number in range(count)]


def test_units_are_in_order_and_bounded(monkeypatch):
    monkeypatch.setattr(token_pool, "UNIT_RECORDS", 7)
    monkeypatch.setattr(token_pool, "UNIT_CHARACTERS", 30)
    made = records(40)
    found = list(units(made))
    assert [one for unit in found for one in unit] == made
    assert max(map(len, found)) == 5
    assert list(units([])) == []


def test_what_turns_carry_beside_their_text_fills_a_unit():
    """Such records are a megabyte in four; as 1024 they would be 256 MB, in this process and in a worker."""
    said = Message(role="assistant", content="", fields=(("tool_calls", "z" * (token_pool.UNIT_CHARACTERS // 4)),))
    asked = Message(role="user", content="q")
    found = list(units(chat_record("a", number, (asked, said)) for number in range(10)))
    assert [len(unit) for unit in found] == [4, 4, 2]


def test_few_texts_need_no_workers():
    assert default_workers(0) == default_workers(token_pool.WORTH_CHARACTERS) == 0
    assert default_workers(1 << 50) <= 32


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_records(workers, monkeypatch):
    monkeypatch.setattr(token_pool, "UNIT_RECORDS", 3)
    made = records(50)
    with TokenPool(stub_description(), workers) as pool:
        found = [pair for unit, results in pool.results(units(made)) for pair in zip(unit, results, strict=True)]
    assert [record for record, _ in found] == made
    assert all(bytes(result.ids[:-1].astype("u1")).decode() == record.text for record, result in found)
    assert all(result.content == record.content for record, result in found)


def test_a_worker_that_dies_is_said():
    with TokenPool(stub_description(), 1) as pool:
        os.kill(pool._workers[0]._process.pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="died") as caught:
            list(pool.results(units(records(3))))
    assert "signal 9" in caught.value.why
    assert caught.value.where == "a:0 to a:2"


def test_a_tokenizer_that_cannot_be_used_is_said_in_its_words(monkeypatch):
    monkeypatch.setattr(token_pool, "pack_description", lambda d: {"recipe": {}, **dict.fromkeys(_FIELDS, "")})
    with TokenPool(stub_description(), 1) as pool, pytest.raises(EncoderError, match="recipe"):
        list(pool.results(units(records(3))))


_FIELDS = ("tokenizer", "chat_template", "special", "fast", "delay_ms", "parts", "notes")
