"""Pipelines of a test module, made once each."""

from pathlib import Path

import pytest
from made_pipelines import make_pipeline


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """Create a pipeline by class name; returns the pipeline and its folder."""
    made: dict[str, tuple[object, Path]] = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = make_pipeline(name, folder), folder
        return made[name]

    return get
