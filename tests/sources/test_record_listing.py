import os

import pytest

from latentcache.identity.stat import RACY_NS
from latentcache.sources.record_listing import list_files


@pytest.fixture
def data(tmp_path):
    (tmp_path / "data" / "sub").mkdir(parents=True)
    for name in ("a.jsonl", "sub/b.jsonl", "dataset_info.json"):
        (tmp_path / "data" / name).write_text("{}\n")
    return tmp_path / "data"


def proven(data, said=None):
    later = list_files(data).newest_ns + RACY_NS
    return list_files(data).proves(said or list_files(data).as_json(later))


@pytest.mark.parametrize("name", [".", "a.jsonl", "dataset_info.json"])
def test_the_same_files_are_proven_and_a_change_is_not(data, name):
    path = data / name
    found = list_files(path)
    said = found.as_json(found.newest_ns + RACY_NS)
    assert proven(path, said)
    os.utime(data / "a.jsonl", ns=(1, 1))
    assert not proven(path, said)


@pytest.mark.parametrize("change", ["new.txt", "sub/new.jsonl"])
def test_a_new_file_is_no_proof(data, change):
    found = list_files(data)
    said = found.as_json(found.newest_ns + RACY_NS)
    (data / change).write_text("x")
    assert not proven(data, said)
    assert not proven(data / "dataset_info.json", said)


def test_files_that_were_too_young_prove_nothing(data):
    found = list_files(data)
    assert not found.proves(found.as_json(found.newest_ns + RACY_NS - 1))
    assert found.files == 3
