"""A few whole numbers that a process shares with the workers it starts: what is written later, they read too.

Guarantee: workers made by fork, spawn and forkserver have the numbers of the process that started them; any other
copy (pickle, ``copy.deepcopy``) has the same values in memory of its own. A copy that came into another process, such
as one rank of several, is made its own by ``own``. Each number is read and written as a whole; several are not.
Cost: a few bytes in the memory that ``multiprocessing`` shares, whatever the number of objects.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawArray
from typing import Any


class SharedNumbers:
    """Numbers of 64 bits with a sign.

    Args:
        numbers: What they are at first.
    """

    def __init__(self, *numbers: int) -> None:
        self._memory, self._owner = RawArray("q", numbers), os.getpid()

    def __getitem__(self, place: int) -> int:
        return int(self._memory[place])

    def __setitem__(self, place: int, number: int) -> None:
        self._memory[place] = number

    def own(self) -> None:
        """Before another process than the one that made them starts workers of its own, or tells them something."""
        if self._owner != os.getpid():
            SharedNumbers.__init__(self, *self._memory)

    @property
    def foreign(self) -> bool:
        """In a worker: whether the process that started it writes elsewhere, so that nothing is heard here."""
        parent = multiprocessing.parent_process()
        return parent is None or parent.pid != self._owner

    def __getstate__(self) -> dict[str, Any]:
        starts_a_process = get_spawning_popen() is not None
        return {"memory": self._memory if starts_a_process else list(self._memory), "owner": self._owner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["memory"], list):
            SharedNumbers.__init__(self, *state["memory"])
        else:
            self._memory, self._owner = state["memory"], state["owner"]
