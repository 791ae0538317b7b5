"""Memory that a decode thread uses for one picture after the other.

Fresh memory costs a tenth of decoding: the system hands it over page by page and clears it (a JPEG of 1 MP into fresh
memory 6.3 ms of processor time, into memory used before 4.9; of 12 MP 73 and 64). Guarantee: never more than the
limit is kept; a larger picture gets memory of its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Of the byte budget of a build, all its decode threads together. It is held beside the budget.
SCRATCH_SHARE = 1 / 16


class Scratch:
    """One thread's; what lies in it is good until the next picture.

    Args:
        limit: Bytes that may be kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def memory(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """At least (num_bytes,), the same as before where that is enough; None for more than is kept."""
        if num_bytes > self.limit:
            return None
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, dtype=np.uint8)
        return self._memory


def scratch_for(budget_bytes: int, threads: int) -> Scratch:
    """For each of so many decode threads."""
    return Scratch(int(budget_bytes * SCRATCH_SHARE) // threads)


def apart(part: NDArray[np.uint8], whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``part`` in memory of its own, where it is a view of ``whole``."""
    return part.copy() if np.may_share_memory(part, whole) else part
