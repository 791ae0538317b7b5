"""Memory that a decode thread reuses for all its images.

Fresh memory costs a tenth of decoding, because the system clears it page by page (a JPEG of 1 MP into fresh memory
6.3 ms of processor time, into reused memory 4.9; of 12 MP 73 and 64). Guarantee: at most the limit is kept; a larger
image gets fresh memory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

#: Largest memory that one decode thread keeps: an image of 14 MP.
KEPT_BYTES = 40 << 20


class Scratch:
    """Memory of one thread; its content is valid until the next image.

    Args:
        limit: Bytes that may be kept.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit = limit
        self._memory: NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def memory(self, num_bytes: int) -> NDArray[np.uint8] | None:
        """At least (num_bytes,), reused if it is large enough; None for more than is kept."""
        if num_bytes > self.limit:
            return None
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes, dtype=np.uint8)
        return self._memory


def own_memory(part: NDArray[np.uint8], whole: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """``part``, copied if it shares memory with ``whole``."""
    return part.copy() if np.may_share_memory(part, whole) else part
