"""A worker as the build sees it; its memory is bounded for real."""

import sys

import pytest
from made_tokenizers import byte_level, save

from latentcache.encoders.describe_tokens import describe_tokeniser
from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.pipeline import token_process
from latentcache.pipeline.token_pool import TokenPool
from latentcache.pipeline.token_process import TokenProcess, WorkerGoneError, last_words
from latentcache.sources.records import text_record
from latentcache.sources.sample import Refusal


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tok")
    return describe_tokeniser(str(save(byte_level(), folder, eos_token="<|endoftext|>")), chat=False)


def test_it_answers_and_says_how_it_ended():
    worker = TokenProcess(stub_description())
    (found,) = worker.ask([text_record("a", 1, "hi")])
    assert bytes(found.ids[:-1].astype("u1")) == b"hi"
    worker.kill()
    with pytest.raises(WorkerGoneError, match="ended by signal 9"):
        worker.ask([text_record("a", 1, "hi")])
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of another process")
def test_a_record_that_takes_more_than_it_may_ends_its_worker_alone(described, monkeypatch):
    """500 000 words of one letter hold about 260 MB in the reference tokenizer."""
    monkeypatch.setattr(token_process, "BASE_BYTES", 128 << 20)
    monkeypatch.setattr("latentcache.pipeline.token_pool.CHARACTER_BYTES", 1)
    made = [text_record("a", 1, "one"), text_record("a", 2, "a b " * 500_000), text_record("a", 3, "three")]
    with TokenPool(described, 1, host_memory=16 << 20) as pool:
        ((_, found),) = list(pool.results([made]))
    assert [isinstance(one, Refusal) for one in found] == [False, True, False]
    assert (found[1].cause, found[1].line) == ("record-too-large", 2)
    assert "memory" in found[1].detail.lower()
    worker = TokenProcess(described)
    assert len(worker.ask(made[1:2], 1 << 30)[0].ids) > 500_000  # with enough of it there is nothing wrong
    with pytest.raises(WorkerGoneError):  # and it is held to less again
        worker.ask(made[1:2], 0)
    worker.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds the memory of another process")
def test_a_record_that_takes_more_than_its_share_is_made_with_all_there_is(described, monkeypatch):
    """What is cached does not depend on the number of workers."""
    monkeypatch.setattr(token_process, "BASE_BYTES", 128 << 20)
    monkeypatch.setattr("latentcache.pipeline.token_pool.CHARACTER_BYTES", 1)
    made, said = [text_record("a", 1, "a b " * 500_000)], []
    with TokenPool(described, 4, host_memory=480 << 20, warn=said.append) as pool:
        ((_, found),) = list(pool.results([made]))
        assert pool.restarts == len(said) == 1
    assert len(found[0].ids) > 500_000


def test_a_worker_hears_of_no_rust_threads_and_gets_no_pickle(monkeypatch):
    seen = {}

    class Popen(token_process.subprocess.Popen):
        def __init__(self, words, **given):
            seen.update(given, words=words)
            super().__init__(words, **given)

    monkeypatch.setattr(token_process.subprocess, "Popen", Popen)
    worker = TokenProcess(stub_description())
    assert len(worker.ask([text_record("a", 1, "hi")])) == 1
    worker.kill()
    worker.close()
    assert seen["env"]["TOKENIZERS_PARALLELISM"] == "false"
    assert seen["start_new_session"]
    assert seen["words"][:3] == [sys.executable, "-P", "-c"]


def test_last_words():
    assert last_words("") == ""
    assert last_words("Traceback\nValueError: no\n\n") == "ValueError: no"
    assert (
        last_words("memory allocation of 9 bytes failed\nskipping backtrace") == "memory allocation of 9 bytes failed"
    )
