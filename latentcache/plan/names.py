"""What data sets of a mixture are called: by the name their order, their counts and a checkpoint know each.

Guarantee: no two of a mixture have one name; a cache that is moved, or read from another machine, keeps its own as
long as the last part of its path does. All ranks must see the same names: theirs is one order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from latentcache.errors import UsageError


def name_of(path: str | os.PathLike[str]) -> str:
    """What the data set at a path is called where nobody says: ``/data/cats.latentcache`` is ``cats``.

    A link is called as itself: one rank may read a copy on a disk of its own through a link of the same name.
    """
    found = Path(path).absolute()
    last = (found.resolve() if found.name == ".." else found).name
    return last.removesuffix(".latentcache") or last


def told_apart(names: Sequence[str]) -> list[str]:
    """The names, with a number behind those that came before: ``cats``, ``cats (2)``; their order counts."""
    met: Counter[str] = Counter()
    found: list[str] = []
    for name in names:
        met[name] += 1
        found.append(name if met[name] == 1 else f"{name} ({met[name]})")
    return found


def refuse_namesakes(names: Sequence[str]) -> None:
    """See that each data set has a name of its own.

    Raises:
        UsageError: Two have the same.
    """
    double = [name for name, times in Counter(names).items() if times > 1]
    if double:
        raise UsageError(
            f"two data sets are called {double[0]!r}",
            why="their order and their counts are known by their names",
            fix="names=[...] with another one for each",
        )
