"""Texts to ids and loss spans by the ``tokenizers`` library: the reference that any other engine must equal.

A token is in a span if at least one of its characters is, as in transformers' own assistant masks: a token that
straddles the border of an answer carries loss. Results do not depend on the grouping of texts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Spans = Sequence[tuple[int, int]]
Tokens = tuple[NDArray[Any], NDArray[np.uint32] | None]
"""(n,) ids of a text, and (r, 2) spans of the tokens that its spans (in characters) touch; None: without spans."""


class ReferenceEngine:
    """The Rust tokenizer itself.

    Several threads of the tokenizer would change the process (they warn at a fork) and help only large batches. They
    are off where the environment says so, as in workers of a build; elsewhere texts go one by one, which uses no
    threads.

    Args:
        tokenizer: ``tokenizer.json`` as text, without truncation and padding.
        dtype: Of the ids.
    """

    def __init__(self, tokenizer: str, dtype: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._dtype = dtype

    def encode(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """Ids and loss spans of each text; special tokens are written by the names of ``special``."""
        if not _threads_are_off():
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        elif any(own is not None for own in spans):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        else:  # without places in the text
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, dtype=self._dtype), None if own is None else _touched(encoding.offsets, own))
            for encoding, own in zip(encodings, spans, strict=True)
        ]


def _touched(offsets: Sequence[tuple[int, int]], spans: Spans) -> NDArray[np.uint32]:
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    return token_spans(places[:, 0], places[:, 1], spans)


def token_spans(begins: NDArray[np.int64], ends: NDArray[np.int64], spans: Spans) -> NDArray[np.uint32]:
    """(r, 2) first token and number of tokens of each run of tokens that the spans touch.

    Args:
        begins: (n,) begin of each token.
        ends: (n,) its end; a token without extent counts at its begin.
        spans: (begin, end) in the same unit.
    """
    learned = np.zeros(len(begins) + 2, dtype=np.int8)
    for begin, end in spans:
        learned[1:-1] |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    edges = np.flatnonzero(np.diff(learned))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.uint32).reshape(-1, 2)


def _threads_are_off() -> bool:
    return os.environ.get("TOKENIZERS_PARALLELISM", "").lower() in ("false", "0", "no", "off")
