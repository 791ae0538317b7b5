from dataclasses import replace

import numpy as np
import pytest
from small_tokens import build, opened, write_texts

from latentcache.identity.stat import RACY_NS
from latentcache.store.unchanged import unchanged_sources


@pytest.fixture(scope="module")
def generation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    (folder / "data").mkdir()
    for name in ("a", "b"):
        write_texts(folder / "data" / f"{name}.jsonl", [name])
    build(folder / "data", folder / "cache")
    found = opened(folder / "cache")[0]
    stat = found.sources.stat.copy()
    stat[:, 5] += 10 * RACY_NS  # hashed long after they were written
    return replace(found, sources=replace(found.sources, stat=stat))


def listed(generation):
    sources = generation.sources
    readings = [one.tobytes() for one in sources.reading]
    return [(name, sources.memo(number), readings[number]) for number, name in enumerate(sources.names)]


def test_files_whose_stat_and_reading_are_the_same(generation):
    assert unchanged_sources(generation, listed(generation)) == {"a.jsonl": 0, "b.jsonl": 1}


@pytest.mark.parametrize("field", ["size", "mtime_ns", "ctime_ns", "inode", "device"])
def test_another_stat_is_no_proof(generation, field):
    (name, stat, reading), other = listed(generation)
    changed = replace(stat, **{field: getattr(stat, field) + 1})
    assert unchanged_sources(generation, [(name, changed, reading), other]) == {"b.jsonl": 1}


def test_a_file_that_was_read_otherwise_or_is_there_twice_or_is_new_is_no_proof(generation):
    first, second = listed(generation)
    assert unchanged_sources(generation, [(*first[:2], bytes(16)), second]) == {"b.jsonl": 1}
    assert unchanged_sources(generation, [first, first, second]) == {"b.jsonl": 1}
    assert unchanged_sources(generation, [("c.jsonl", *first[1:]), (first[0], None, first[2])]) == {}


def test_a_file_that_was_young_when_it_was_hashed_is_no_proof(generation):
    stat = generation.sources.stat.copy()
    stat[:, 5] -= np.uint64(10 * RACY_NS)
    young = replace(generation, sources=replace(generation.sources, stat=stat))
    assert unchanged_sources(young, listed(young)) == {}


def test_a_cache_that_lacks_documents_or_never_said_is_no_proof(generation):
    parts = replace(generation, manifest={**generation.manifest, "complete": False})
    silent = replace(generation, sources=replace(generation.sources, reading=None))
    for known in (None, parts, silent):
        assert unchanged_sources(known, listed(generation)) == {}
