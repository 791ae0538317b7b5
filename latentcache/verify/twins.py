"""Entries that hold the very bytes of a wrong one: in another shard under the same key, or under the key of a twin.

A build takes an entry that it finds by key, and copies one that was made from the very same pixels. So what is wrong
although its checksum holds is taken out everywhere at once, or the next build would bring it back.
Cost: two passes over the indexes of all shards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import CacheDamagedError
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.key import KEY_BYTES
from latentcache.store.index import open_index
from latentcache.store.layout import CacheLayout

#: What decides an encoding beside the pixels: kind and size before the content in a key, recipe after it. The variant
#: between them does not: a picture takes over the latents of a mirror image that looks like it.
_KIND, _SIZE, _RECIPE = slice(0, 1), slice(2, 8), slice(8 + HASH_BYTES, KEY_BYTES)
#: Where a header has the checksum of its payload.
_PAYLOAD_CHECKSUM = slice(24, 32)
_MARK = f"S{HASH_BYTES + 1 + 6 + 8 + 8}"


def alike(layout: CacheLayout, wrong: Mapping[str, Collection[bytes]]) -> dict[str, set[bytes]]:
    """Shard in use -> keys of its entries with the pixels and the bytes of a wrong one.

    A shard whose index cannot be read has the keys of all that were found: a build would salvage it.

    Args:
        layout: The cache.
        wrong: Shard -> keys of entries in it that are wrong although they are whole.
    """
    if not any(wrong.values()):
        return {}
    broken, found = set[str](), dict[str, set[bytes]]()
    marks = [_marks(part[_with_keys(part, wrong.get(shard, ()))]) for shard, part in _parts(layout, broken)]
    known = np.unique(np.concatenate([*marks, np.empty(0, dtype=_MARK)]))
    for shard, part in _parts(layout, broken):
        same = part["key"][np.isin(_marks(part), known)]
        if len(same):
            found.setdefault(shard, set()).update(key.tobytes() for key in same)
    everywhere = set[bytes]().union(*map(set, wrong.values()), *found.values())
    return found | dict.fromkeys(broken, everywhere)


def _parts(layout: CacheLayout, broken: set[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """The rows of all indexes; the names of the shards that have none go into ``broken``."""
    for folder in layout.sealed_shards():
        try:
            for part in open_index(folder).slices():
                yield folder.name, part
        except CacheDamagedError:
            broken.add(folder.name)


def _marks(rows: NDArray[Any]) -> NDArray[Any]:
    """(n,) pixels, place and bytes of each entry as one item."""
    parts = (rows["facts"][:, :HASH_BYTES], *(rows["key"][:, part] for part in (_KIND, _SIZE, _RECIPE)))
    return _as_items(np.concatenate([*parts, rows["header"][:, _PAYLOAD_CHECKSUM]], axis=1))


def _with_keys(rows: NDArray[Any], keys: Collection[bytes]) -> NDArray[np.bool_]:
    """(n,) which entries have one of these keys."""
    return np.isin(_as_items(rows["key"]), np.array(list(keys), dtype=f"S{KEY_BYTES}"))


def _as_items(rows: NDArray[np.uint8]) -> NDArray[Any]:
    """(n,) one item for each row of bytes. Of two of one length, no zero at the end is lost."""
    return np.ascontiguousarray(rows).view(f"S{rows.shape[1]}").ravel()
