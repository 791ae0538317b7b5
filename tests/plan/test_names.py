from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import UsageError
from latentcache.plan.names import name_of, refuse_namesakes, told_apart


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/data/cats.latentcache", "cats"),
        ("cats", "cats"),
        (Path("/a/b.c/"), "b.c"),
        (".latentcache", ".latentcache"),
    ],
)
def test_a_data_set_is_called_as_its_folder_wherever_that_is(path, name):
    assert name_of(path) == name


def test_a_link_is_called_as_itself(tmp_path):
    """Ranks that read copies through links of one name have one order."""
    (tmp_path / "job-7-cats").mkdir()
    (tmp_path / "cats.latentcache").symlink_to(tmp_path / "job-7-cats")
    assert name_of(tmp_path / "cats.latentcache") == "cats"
    assert name_of(tmp_path / "cats.latentcache" / "..") == tmp_path.name


def test_a_folder_that_is_named_by_where_one_is(tmp_path, monkeypatch):
    (tmp_path / "dogs.latentcache").mkdir()
    monkeypatch.chdir(tmp_path / "dogs.latentcache")
    assert name_of(".") == name_of("../dogs.latentcache") == "dogs"


@given(st.lists(st.sampled_from(["cats", "dogs", "birds"])))
def test_the_same_name_is_told_apart_by_how_often_it_came_before(names):
    found = told_apart(names)
    refuse_namesakes(found)
    assert [name.split(" (")[0] for name in found] == names
    for name in set(names):
        own = [one for one in found if one.split(" (")[0] == name]
        assert own == [name, *(f"{name} ({number})" for number in range(2, len(own) + 1))]


def test_namesakes_are_refused():
    with pytest.raises(UsageError, match="two data sets are called 'cats'") as caught:
        refuse_namesakes(["cats", "dogs", "cats"])
    assert "names=" in caught.value.fix
