"""Sizes of 10,000 images are those of each trainer's own code."""

import pytest
from checkouts import HERE, checkout, said_by
from trainer_vectors import compare

pytestmark = pytest.mark.peers
#: Trainer -> its checkout and folder of packages.
CODE = {
    "ai-toolkit": ("ai-toolkit-27a03a9", "venv-ai-toolkit"),
    "musubi": ("musubi-tuner-30c658c", "venv-musubi"),
    "onetrainer": ("mgds-3a6994a", "venv-onetrainer"),
}


@pytest.mark.parametrize("trainer", CODE)
def test_sizes_are_those_of_its_own_code(trainer):
    folder, python = checkout(*CODE[trainer])
    vectors = said_by([python, HERE / f"sizes_{trainer.replace('-', '_')}.py", folder, "200"])
    assert len(vectors) >= 10_000
    compare(trainer, vectors)
