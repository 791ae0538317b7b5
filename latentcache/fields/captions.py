"""Texts of a caption's variants: several captions of one sample, and its tags in other orders.

A pure function of the caption, the number of the variant and :class:`CaptionVariants`. Tags are those of
``process_caption`` in kohya-ss/sd-scripts (``library/train_util.py``). It splits at ``caption_separator``, keeps the
first ``keep_tokens`` tags or those up to ``keep_tokens_separator`` in place, and shuffles the rest. A second
``keep_tokens_separator`` begins kept tags at the end.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.strings import Strings
from latentcache.identity.content import checksum
from latentcache.value import Value

#: Between the captions of one sample. No caption contains it.
BETWEEN = "\0"
#: Variants of a sample at most; the numbers from here on are those of prompts.
MOST_VARIANTS = 250
#: Variants of shuffled tags, if no number is given.
DEFAULT_VARIANTS = 4
_ATTEMPTS = 32


class CaptionVariants(Value):
    """Texts that are made of a caption. Variant v is caption ``v % captions`` in tag order ``v // captions``."""

    number: int = 1
    """Stored variants of a sample at most."""
    reorder: bool = False
    """True: variants have their tags in other orders."""
    keep: str = "0"
    """Tags at the start that keep their place: a number, or the text that ends them."""
    separator: str = ","

    def __post_init__(self) -> None:
        if not self.separator or not self.keep:
            name = "keep_tags" if self.separator else "tag_separator"
            raise UsageError("must not be empty", argument=name, value="", fix="leave it out")

    def rule(self) -> dict[str, Any]:
        """Return the settings that decide a variant's text; empty if every variant is a caption as it is written."""
        return {name: value for name, value in asdict(self).items() if name != "number"} if self.reorder else {}

    def count(self, text: str) -> int:
        """Count the stored variants of a caption: every one of several captions equally often."""
        captions = text.split(BETWEEN)
        orders = 1
        if self.reorder:
            tags = max(len(self._parts(caption)[1]) for caption in captions)
            orders = min(math.factorial(min(tags, 20)), self.number)
        return max(min(orders, self.number // len(captions)) * len(captions), min(len(captions), self.number))

    def text(self, text: str, variant: int) -> str:
        """The text of one variant."""
        captions = text.split(BETWEEN)
        caption = captions[variant % len(captions)]
        if not self.reorder:
            return caption
        first, middle, last = self._parts(caption)
        tags = [*first, *_shuffled(middle, variant // len(captions), caption.encode()), *last]
        return f"{self.separator.rstrip()} ".join(tags)

    def _parts(self, caption: str) -> tuple[list[str], list[str], list[str]]:
        """Tags that are kept at the start, tags that are shuffled, tags that are kept at the end."""
        if not self.keep.isdecimal():
            first, end, rest = caption.partition(self.keep)
            middle, _, last = rest.partition(self.keep)
            if end:
                return self._tags(first), self._tags(middle), self._tags(last)
        tags = self._tags(caption)
        kept = int(self.keep) if self.keep.isdecimal() else 0
        return tags[:kept], tags[kept:], []

    def _tags(self, text: str) -> list[str]:
        return [tag for part in text.split(self.separator) if (tag := part.strip())]


def further_captions(texts: Strings) -> NDArray[np.intp]:
    """Captions beyond the first one of each text that has several."""
    between = np.flatnonzero(np.asarray(texts.data) == ord(BETWEEN))
    counts = np.bincount(np.searchsorted(np.asarray(texts.ends), between, side="right"))
    return counts[counts > 0]


def captions_at_most(texts: Strings) -> int:
    """Most captions of one of these texts."""
    return int(further_captions(texts).max(initial=0)) + 1


def _shuffled(tags: list[str], number: int, seed: bytes) -> list[str]:
    """The tags in order ``number``: 0 is as written. No two orders are equal while there are different ones left."""
    orders = [tags]
    attempt = 0
    while len(orders) <= number:
        attempt += 1
        prefix = b"tags" + attempt.to_bytes(4, "little")
        draws = [checksum(prefix + tag.to_bytes(4, "little") + seed) for tag in range(len(tags))]
        shuffled = [tags[tag] for tag in sorted(range(len(tags)), key=draws.__getitem__)]
        if shuffled not in orders or attempt > _ATTEMPTS * (number + 1):
            orders.append(shuffled)
    return orders[number]
