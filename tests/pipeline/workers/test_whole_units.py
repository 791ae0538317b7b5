"""A producer without ``prepare`` encodes jobs in lists; failures of such a call."""

import pytest

from latentcache.errors import EncoderError

TEXTS = [f"word{number}" for number in range(40)]


def calls(toy):
    """Count the calls of ``make`` by number of jobs."""
    marks = (toy.folder / "marks").glob("make-[0-9]*")
    return {int(path.name.removeprefix("make-")): path.stat().st_size for path in marks}


def test_jobs_are_made_by_the_batch_and_not_prepared(lines, words, tmp_path):
    result = lines.run(TEXTS, workers=0)
    assert (result.encoded, result.failed, len(result.read.sample)) == (40, [], 0)
    assert calls(lines) == {8: 5}  # units of 16, 16 and 8 in batches of 8
    assert lines.times("prepare", "word3") == 0
    made = sorted(lines.stored().values())
    words.folder = tmp_path / "words"
    words.folder.mkdir()
    words.run(TEXTS, workers=0)
    assert made == sorted(words.stored().values())


def test_a_job_that_fails_in_the_call_is_reported_with_its_content(lines):
    (job,) = lines.jobs(["bad fail-make"])
    result = lines.run(["a", "bad fail-make", "c"], workers=0)
    ((sample, failure),) = result.failed
    assert (sample, failure.reason, failure.content, result.encoded) == (1, "bad-toy", job.content, 2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_memory_is_halved(lines, workers):
    """Only the failing job is lost; a worker with a memory limit is replaced."""
    result = lines.run(["a", "b memory-make", "c"], workers=workers)
    assert [(sample, failure.reason) for sample, failure in result.failed] == [(1, "out-of-memory")]
    assert result.encoded == 2


def test_an_item_of_another_type_is_a_fault_of_the_encoder(lines, monkeypatch):
    from tests.pipeline.workers.toy_kinds import ToyProducer

    made_of = ToyProducer.made_of

    def wide(self, word, variant=0):
        made = made_of(self, word, variant)
        made.array = made.array.astype("int64")
        return made

    monkeypatch.setattr(ToyProducer, "made_of", wide)
    with pytest.raises(EncoderError, match="another shape or type"):
        lines.run(["a", "b"], workers=0)
