"""Texts to ids, and to runs of tokens, by the ``tokenizers`` library: the reference that any other engine must equal.

A token is in a span when at least one of its characters is, as in transformers' own assistant masks: a token that
straddles the border of an answer is learned. Results do not depend on how texts are grouped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

Spans = Sequence[tuple[int, int]]


class Engine(Protocol):
    """Ids of texts in which control tokens stand under the names of ``guard``."""

    def ids(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """(n,) ids of each text."""

    def ids_and_runs(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[tuple[NDArray[Any], NDArray[np.uint32]]]:
        """(n,) ids, and (r, 2) runs of the tokens in the spans (in characters), of each text."""


class ReferenceEngine:
    """The Rust tokenizer itself.

    Args:
        tokenizer: ``tokenizer.json`` as text.
        dtype: Of the ids.
    """

    def __init__(self, tokenizer: str, dtype: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._dtype = dtype

    def id_of(self, token: str) -> int | None:
        """The id of one token."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def ids(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """(n,) ids of each text."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def ids_and_runs(
        self, texts: Sequence[str], spans: Sequence[Spans]
    ) -> list[tuple[NDArray[Any], NDArray[np.uint32]]]:
        """(n,) ids, and (r, 2) runs of the tokens in the spans, of each text."""
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        results = []
        for encoding, wanted in zip(encodings, spans, strict=True):
            places = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2)
            runs = runs_of(places[:, 0], places[:, 1], wanted)
            results.append((np.array(encoding.ids, dtype=self._dtype), runs))
        return results


def runs_of(begins: NDArray[np.int64], ends: NDArray[np.int64], spans: Spans) -> NDArray[np.uint32]:
    """(r, 2) first token and number of tokens of the runs that the spans touch.

    Args:
        begins: (n,) where each token begins.
        ends: (n,) where it ends; a token without extent belongs where it stands.
        spans: (begin, end) in the same measure.
    """
    learned = np.zeros(len(begins) + 2, dtype=np.int8)
    for begin, end in spans:
        learned[1:-1] |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    edges = np.flatnonzero(np.diff(learned))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.uint32).reshape(-1, 2)
