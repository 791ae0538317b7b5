import json

import pytest

from latentcache.errors import SourceError, UsageError
from latentcache.sources.saved import is_saved, saved_files


def test_the_files_that_the_state_names(tmp_path):
    assert not is_saved(tmp_path)
    (tmp_path / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "b.arrow"}, {"filename": "a.arrow"}]})
    )
    assert is_saved(tmp_path)
    assert list(saved_files(tmp_path)) == [(tmp_path / name, name) for name in ("b.arrow", "a.arrow")]


def test_of_a_dict_the_files_of_train(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test", "train"]}')
    (tmp_path / "train").mkdir()
    (tmp_path / "train/state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}]}))
    assert is_saved(tmp_path)
    assert list(saved_files(tmp_path)) == [(tmp_path / "train/a.arrow", "train/a.arrow")]


def test_a_saved_dict_without_train_names_its_splits(tmp_path):
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(UsageError) as caught:
        list(saved_files(tmp_path))
    assert "test" in caught.value.fix


def test_what_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(SourceError, match=r"state\.json"):
        list(saved_files(tmp_path))
