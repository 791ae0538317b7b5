"""Runs of whole fields: every job ends settled, whatever happens to workers."""

from __future__ import annotations

TEXTS = [f"word{number}" for number in range(40)]


def test_every_job_is_committed(toy):
    result = toy.run(TEXTS)
    assert sorted(result.read.sample.tolist()) == list(range(40))
    stored = toy.stored()
    assert {key.tobytes() for key in result.keys} == set(stored)
    assert (result.encoded, result.copied, result.failed, result.interrupted) == (len(stored), 0, (), False)
