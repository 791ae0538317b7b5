"""Pipelines, made once each."""

from pathlib import Path

import pytest
from made_pipelines import make_pipeline


@pytest.fixture(scope="session")
def pipelines(tmp_path_factory):
    """Create a pipeline by class name; returns the pipeline and its folder."""
    pipelines_by_name: dict[str, tuple[object, Path]] = {}

    def get(name):
        if name not in pipelines_by_name:
            folder = tmp_path_factory.mktemp(name)
            pipelines_by_name[name] = make_pipeline(name, folder), folder
        return pipelines_by_name[name]

    return get
