import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from latentcache.store.layout import CacheLayout
from latentcache.store.plans import PlanFolder

FACTS = {"fingerprint": "ab", "kind": "packed", "max_length": 4096}
COLUMNS = {"ends": np.array([2, 3]), "length": np.array([5, 7, 4096], dtype=np.uint32), "none": np.empty(0, np.int32)}


@pytest.fixture
def folder(tmp_path):
    return PlanFolder(CacheLayout(tmp_path))


def same(found):
    return found is not None and {name: column.tolist() for name, column in found.items()} == {
        name: column.tolist() for name, column in COLUMNS.items()
    }


def test_what_was_kept_comes_back(folder):
    assert folder.load(FACTS) is None
    assert folder.save(FACTS, COLUMNS)
    assert same(folder.load(FACTS))
    assert folder.load(FACTS | {"max_length": 2048}) is None
    assert sorted(path.suffix for path in folder.folder.iterdir()) == [".json", ".npy"]


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("suffix", [".json", ".npy"])
@pytest.mark.parametrize("how", [flipped, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"{}")])
def test_damage_is_said_and_counts_as_lost(folder, suffix, how):
    folder.save(FACTS, COLUMNS)
    (path,) = folder.folder.glob(f"*{suffix}")
    how(path)
    with pytest.warns(UserWarning, match="cannot be used and is made again"):
        assert folder.load(FACTS) is None
    assert folder.save(FACTS, COLUMNS)
    assert same(folder.load(FACTS))


def test_a_plan_under_the_name_of_another_is_not_believed(folder):
    folder.save(FACTS, COLUMNS)
    other = FACTS | {"fingerprint": "cd"}
    for path in list(folder.folder.iterdir()):
        path.rename(folder._path(other).with_suffix(path.suffix))
    with pytest.warns(UserWarning, match="made again"):
        assert folder.load(other) is None


def test_columns_that_are_not_there_are_damage(folder):
    folder.save(FACTS, COLUMNS)
    (path,) = folder.folder.glob("*.json")
    said = json.loads(path.read_text())
    said["columns"][0][1] = 9
    path.write_text(json.dumps(said))
    with pytest.warns(UserWarning, match="made again"):
        assert folder.load(FACTS) is None


def test_where_nothing_may_be_written_nothing_is_kept(tmp_path):
    folder = PlanFolder(CacheLayout(tmp_path / "gone"))
    assert not folder.save(FACTS, COLUMNS)
    assert folder.load(FACTS) is None


def test_numbers_that_do_not_fit_are_not_kept(folder):
    assert not folder.save(FACTS, {"ends": np.array([1 << 32])})
    assert folder.load(FACTS) is None


def test_many_writers_at_once(folder):
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda _: folder.save(FACTS, COLUMNS), range(40)))
    assert same(folder.load(FACTS))
    assert len(list(folder.folder.iterdir())) == 2


def test_plans_that_are_there_and_whole(folder, recwarn):
    assert list(folder.kept()) == []
    made = [({"kind": "packed", "max_length": length}, {"a": np.arange(length)}) for length in (3, 4, 5)]
    for facts, columns in made:
        folder.save(facts, columns)
    assert sorted(facts["max_length"] for facts, _ in folder.kept()) == [3, 4, 5]
    paths = sorted(folder.folder.glob("*.json"))
    paths[0].write_text("{")
    paths[1].with_suffix(".npy").write_bytes(b"")
    ((facts, columns),) = folder.kept()
    assert columns["a"].tolist() == list(range(facts["max_length"]))
    assert len(recwarn) == 0
