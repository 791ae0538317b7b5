"""Texts to ids and loss spans: what an engine does, and the tokenizer's own one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from latentcache.encoders.text.special import Spans

Tokens = tuple[NDArray[Any], NDArray[np.uint32] | None]
"""(n,) ids of a text, and (r, 2) spans of the tokens that its spans (in characters) touch; None: without spans."""


class Engine(Protocol):
    """Turns texts into ids."""

    def takes(self, text: str) -> bool:
        """True if the engine gives the tokenizer's own ids for this text."""
        ...

    def encode(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """Ids and loss spans of each text; special tokens are written by their other names."""
        ...


class ReferenceEngine:
    """The Rust tokenizer itself.

    Its threads would change the process (they warn at a fork). They are off where the environment says so, as in
    workers of a build; elsewhere texts go one by one, which uses no threads.
    """

    def __init__(self, tokenizer: str, dtype: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._dtype = dtype

    def encode(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """Ids and loss spans of each text; special tokens are written by their other names."""
        if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() not in ("false", "0", "no", "off"):
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        elif any(touched is not None for touched in spans):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        else:  # without places in the text
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        results = list[Tokens]()
        for encoding, touched in zip(encodings, spans, strict=True):
            begins, ends = np.array([] if touched is None else encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            loss = None if touched is None else token_spans(begins, ends, touched)
            results.append((np.array(encoding.ids, dtype=self._dtype), loss))
        return results


def token_spans(begins: NDArray[np.int64], ends: NDArray[np.int64], spans: Spans) -> NDArray[np.uint32]:
    """(r, 2) first token and number of tokens of each run of tokens, (n,) begins and ends, that the spans touch."""
    learned = np.zeros(len(begins) + 2, dtype=np.int8)
    for begin, end in spans:
        learned[1:-1] |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    edges = np.flatnonzero(np.diff(learned))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.uint32).reshape(-1, 2)
