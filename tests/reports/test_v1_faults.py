"""Faults of version 1. Faults that other tests cover are tested beside their code."""

import os
import shlex

import pytest
import small_tokens
from small_cache import draw_four

from latentcache import BuildSettings, build_cache, merge_caches, open_cache


@pytest.fixture
def documents(tmp_path):
    data = small_tokens.write_texts(tmp_path / "t.jsonl", small_tokens.texts(40))
    small_tokens.build(data, tmp_path / "tokens")
    return tmp_path / "tokens"


def test_a_library_sets_no_variable_of_the_process(tmp_path):
    """Opening a tokenizer changed ``TOKENIZERS_PARALLELISM`` for the whole process."""
    small_tokens.write_texts(tmp_path / "t.jsonl", small_tokens.texts(3))
    before = dict(os.environ)
    build_cache(BuildSettings(data=str(tmp_path / "t.jsonl"), fields={"input_ids": {"tokenizer": "stub"}}, workers=0))
    assert dict(os.environ) == before


def test_text_is_a_path_in_every_public_function(tmp_path):
    """A path given as text raised AttributeError."""
    draw_four(tmp_path / "data")
    settings = {"latents": {"model": "stub", "resolutions": (64,), "bucket_step": 8}}
    for number in range(2):
        build_cache(
            BuildSettings(
                data=str(tmp_path / "data"), out=str(tmp_path / f"{number}"), fields=settings, part=f"{number}/2"
            )
        )
    report = merge_caches([str(tmp_path / "0"), str(tmp_path / "1")], str(tmp_path / "whole"))
    assert report.samples == 4
    assert len(open_cache(str(tmp_path / "whole")).loader(batch_size=1)) == 4


@pytest.mark.parametrize("more", [(), ("--pack", "512")])
def test_a_plan_of_records_names_the_options(run, documents, more):
    """``plan t.jsonl`` gave a fix that failed again."""
    data = documents.with_name("t.jsonl")
    error = run("plan", data, "--batch-size", "8", "--tokenizer", "stub", *more, "--json").error
    first, second = error["fix"].split("; ")
    for command in (first, second):
        assert run(*shlex.split(command)[1:]).status == 0
