import copy
import pickle
from dataclasses import field, replace
from functools import cached_property

import numpy as np
import pytest

from latentcache.value import Value


class Size(Value):
    """An example."""

    width: int
    height: int = 1
    names: dict[str, int] = field(default_factory=dict)
    note: str = field(default="", repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.width < 0:
            raise ValueError("negative")

    @cached_property
    def area(self):
        return self.width * self.height


class Named(Size):
    """A value with one more field."""

    name: str = ""


class Column(Value, eq=False):
    """A value with an array."""

    numbers: np.ndarray


def test_values_are_frozen_checked_and_replaced():
    size = Size(width=2, height=3)
    with pytest.raises(AttributeError, match="width"):
        size.width = 3
    assert replace(size, width=4) == Size(width=4, height=3)
    with pytest.raises(ValueError, match="negative"):
        replace(size, width=-1)


def test_values_are_equal_by_their_fields():
    size = Size(width=2, height=3)
    assert size.area == 6
    assert size == Size(width=2, height=3, note="x") == copy.deepcopy(size) == pickle.loads(pickle.dumps(size))
    assert size != Size(width=2) != Named(width=2)
    assert len({Named(width=1, names=()), Named(width=1, names=()), Named(width=2, names=())}) == 2
    column = Column(numbers=np.arange(3))
    assert column == column != Column(numbers=np.arange(3))
    assert len({column, column}) == 1
