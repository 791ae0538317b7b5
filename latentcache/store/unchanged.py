"""Which source files of a token cache need not be read: their stats prove that their records are those it knows.

Guarantee: a doubt is a no. A file is taken for unchanged where its stat memo holds, it was not so young that it may
have changed unseen, and it is read in the same way; a generation that lacks documents proves nothing. Cost: one
``stat`` a file, by the caller.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from latentcache.identity.stat import StatMemo
from latentcache.store.token_generation import TokenGeneration


def unchanged_sources(
    generation: TokenGeneration | None, now: Iterable[tuple[str, StatMemo | None, bytes]]
) -> dict[str, int]:
    """Name -> position in the generation's sources, of files that need not be read.

    Args:
        generation: What is known.
        now: (name, stat, hash of how it is read) of each file; no stat where there is none.
    """
    if generation is None or not generation.complete or generation.sources.reading is None:
        return {}
    sources, files = generation.sources, list(now)
    assert sources.reading is not None
    times = Counter(name for name, _, _ in files)
    position = {name: number for number, name in enumerate(sources.names)}
    found = {}
    for name, stat, reading in files:
        number = position.get(name)
        if number is None or stat is None or times[name] > 1:
            continue
        if sources.reading[number].tobytes() == reading and sources.memo(number).trusts(stat):
            found[name] = number
    return found
