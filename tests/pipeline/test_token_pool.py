import os
import signal

import pytest

from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.errors import EncoderError, WorkerError
from latentcache.failpoint import VARIABLE
from latentcache.pipeline import token_pool, token_process
from latentcache.pipeline.token_pool import TokenPool, default_workers, units
from latentcache.sources.records import Message, chat_record, text_record
from latentcache.sources.sample import Refusal


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


def asked(pool, made):
    return [result for _, results in pool.results(units(made)) for result in results]


def spoken(result):
    return result.cause if isinstance(result, Refusal) else bytes(result.ids[:-1].astype("u1")).decode()


def test_a_worker_that_is_killed_is_replaced_counted_and_said():
    said = []
    with TokenPool(stub_description(), 1, warn=said.append) as pool:
        os.kill(pool._workers[0].pid, signal.SIGKILL)
        assert [spoken(one) for one in asked(pool, records(3))] == ["text 0", "text 1", "text 2"]
        assert pool.restarts == len(said) == 1
    assert "signal 9" in said[0]
    assert "a:0 to a:2" in said[0]


@pytest.mark.parametrize("number", [0, 4, 8])
def test_a_record_that_crashes_its_worker_is_found_and_refused(monkeypatch, number):
    monkeypatch.setenv(VARIABLE, f"encoding@a#{number}:1:crash")
    monkeypatch.setattr(token_pool, "UNIT_RECORDS", 9)
    made = records(30)
    with TokenPool(stub_description(), 2) as pool:
        found = asked(pool, made)
    wanted = [record.text for record in made]
    wanted[number] = "tokenizer-crash"
    assert [spoken(one) for one in found] == wanted
    assert (found[number].name, found[number].line, found[number].content) == ("a", number, made[number].content)
    assert "signal 11" in found[number].detail
    assert 2 <= pool.restarts <= 6


def test_two_records_that_crash_their_workers(monkeypatch):
    monkeypatch.setenv(VARIABLE, "encoding@a#[25]:1:crash")
    with TokenPool(stub_description(), 1) as pool:
        found = [spoken(one) for one in asked(pool, records(7))]
    assert found == ["text 0", "text 1", "tokenizer-crash", "text 3", "text 4", "tokenizer-crash", "text 6"]


def test_workers_that_all_die_end_the_build_in_words(monkeypatch):
    monkeypatch.setenv(VARIABLE, "encoding@*:1:crash")
    with TokenPool(stub_description(), 1) as pool, pytest.raises(WorkerError, match="keep dying") as caught:
        asked(pool, records(4))
    assert "no record is to blame" in caught.value.why


def test_many_records_that_crash_end_the_build_in_words(monkeypatch):
    monkeypatch.setenv(VARIABLE, "encoding@a#*:1:crash")
    monkeypatch.setattr(token_pool, "_MAX_CONVICTED", 2)
    with TokenPool(stub_description(), 1) as pool, pytest.raises(WorkerError, match="keep dying") as caught:
        asked(pool, records(4))
    assert "3 records" in caught.value.why


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_that_memory_is_not_enough_for_is_refused_with_its_size(workers, monkeypatch):
    monkeypatch.setattr(token_pool, "UNIT_CHARACTERS", 100)
    made = [*records(2), text_record("b", 7, "x" * 1001), text_record("b", 8, "x" * 1000), *records(1)]
    memory = 1000 * token_pool.CHARACTER_BYTES
    with TokenPool(stub_description(), workers, host_memory=memory) as pool:
        found = asked(pool, made)
    assert [spoken(one)[:6] for one in found] == ["text 0", "text 1", "record", "xxxxxx", "text 0"]
    refused = found[2]
    assert (refused.cause, refused.name, refused.line) == ("record-too-large", "b", 7)
    assert "1,001 characters" in refused.detail
    assert f"--host-memory is {memory:,}" in refused.detail
    assert "--host-memory" in refused.hint


def test_an_ordinary_unit_is_tokenised_whatever_memory_there_is():
    with TokenPool(stub_description(), 2, host_memory=1) as pool:
        assert len(asked(pool, records(5000))) == 5000


def test_large_records_wait_for_each_other(monkeypatch):
    """Together they never hold more than there is, and none waits for ever."""
    monkeypatch.setattr(token_pool, "UNIT_CHARACTERS", 100)
    held, most = [], []

    class Budget(token_pool.ByteBudget):
        def acquire(self, size):
            done = super().acquire(size)
            held.append(size)
            most.append(sum(held))
            return done

        def release(self, size):
            held.remove(size)
            super().release(size)

    monkeypatch.setattr(token_pool, "ByteBudget", Budget)
    made = [text_record("b", number, f"{number:04}" + "x" * 600) for number in range(40)]
    memory = 1000 * token_pool.CHARACTER_BYTES
    with TokenPool(stub_description(), 3, host_memory=memory) as pool:
        assert len(asked(pool, made)) == 40
    assert len(most) == 40
    assert max(most) <= memory


def test_a_tokenizer_that_cannot_be_used_is_said_in_its_words(monkeypatch):
    monkeypatch.setattr(token_process, "pack_description", lambda d: {"recipe": {}, **dict.fromkeys(_FIELDS, "")})
    with TokenPool(stub_description(), 1) as pool, pytest.raises(EncoderError, match="recipe"):
        list(pool.results(units(records(3))))


_FIELDS = ("tokenizer", "chat_template", "special", "fast", "delay_ms", "parts", "notes")
