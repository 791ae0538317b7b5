"""Byte-level BPE by tiktoken's engine, fed with the ranks and the pattern of a ``tokenizer.json``.

Tokenizers that fit: BPE over bytes, with the splitting of GPT-2, Llama 3, Qwen 2 or GPT-4o, no normalizer or NFC, and
merges that agree with ranks. tiktoken merges any two neighbours whose bytes are a token, the
reference only pairs that are listed; both do the same exactly when merging the bytes of every token by lower ranks
alone ends in a pair that is listed for it, and that is checked for every token. The ids of both are then
compared (``fastcheck``) before it is used. Needs the extra ``tokens``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import tiktoken

from latentcache.encoders.text.tokenizer import Spans, Tokens, token_spans

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
#: Splittings that take every character and mean the same to both regex engines. Compared for every code point of
#: Unicode 16 in tokenizers 0.23 and tiktoken 0.14: no difference.
KNOWN_SPLITS = frozenset(
    (
        _GPT2,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}",
        rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
#: The engine's regex takes loss of 100 000 blanks and fails on a million ("Max stack size exceeded"). A run twice as
#: long as this holds a whole piece of this length that begins at a multiple of it.
_BLANKS = 50_000
_FLAGS = ("single_word", "lstrip", "rstrip")


class UnfitTokenizerError(ValueError):
    """A tokenizer does not fit the engine; its text says why."""


class TiktokenEngine:
    """tiktoken's engine; raises UnfitTokenizerError for a tokenizer to which it may give other ids."""

    def __init__(self, tokenizer: Mapping[str, Any], dtype: str) -> None:
        model, added = tokenizer["model"], tokenizer.get("added_tokens") or ()
        _check_model(model)
        _check_added(added)
        normalizer = tokenizer.get("normalizer")
        if normalizer and normalizer.get("type") != "NFC":
            raise UnfitTokenizerError(f"its normalizer {normalizer.get('type')} is unknown to the fast engine")
        pattern, names = _pattern(tokenizer.get("pre_tokenizer")), [str(token["content"]) for token in added]
        ranked = _ranked(model, set(names))
        self._encoding = tiktoken.Encoding(
            "latentcache",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ranked.values())},
            special_tokens={name: rank for rank, name in enumerate(names, start=len(ranked))},
        )
        self._added, self._nfc = set(names), bool(normalizer)
        ids = [*(model["vocab"][token] for token in ranked), *(int(token["id"]) for token in added)]
        self._ids = np.array(ids, dtype=dtype)
        lengths = [len(token) for token in (*ranked.values(), *(name.encode() for name in names))]
        self._lengths = np.array(lengths, dtype=np.int64)

    def takes(self, text: str) -> bool:
        """True if a text fits: in the tokenizer's normal form, and without an endless run of blanks."""
        if len(text) > _BLANKS and any(text[n : n + _BLANKS].isspace() for n in range(0, len(text), _BLANKS)):
            return False
        return not self._nfc or text.isascii() or unicodedata.is_normalized("NFC", text)

    def encode(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """As :meth:`ReferenceEngine.encode`."""
        return [self._tokens(text, own) for text, own in zip(texts, spans, strict=True)]

    def _tokens(self, text: str, spans: Spans | None) -> Tokens:
        ranks = self._encoding.encode_to_numpy(text, allowed_special=self._added, disallowed_special=())
        if spans is None:
            return self._ids[ranks], None
        ends = np.cumsum(self._lengths[ranks])
        return self._ids[ranks], token_spans(ends - self._lengths[ranks], ends, _in_bytes(text, spans))


def _in_bytes(text: str, spans: Spans) -> list[tuple[int, int]]:
    """Places in characters as places in UTF-8."""
    if text.isascii():
        return list(spans)
    found, done, length = [], 0, 0
    for place in (place for span in spans for place in span):
        length += len(text[done:place].encode())
        found.append(length)
        done = place
    return list(zip(found[::2], found[1::2], strict=True))


def _check_model(model: Mapping[str, Any]) -> None:
    """Check that a model is a plain BPE over bytes."""
    if model.get("type") != "BPE":
        raise UnfitTokenizerError(f"its model is {model.get('type')}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise UnfitTokenizerError(f"its BPE has {name}")
    missing = [char for char in _BYTE_OF if char not in model["vocab"]]
    if missing:
        raise UnfitTokenizerError(f"{len(missing)} of 256 bytes are not in its vocabulary")


def _check_added(added: Sequence[Mapping[str, Any]]) -> None:
    """Check that the fast engine can match the added tokens."""
    for token in added:
        if any(token.get(flag) for flag in _FLAGS):
            raise UnfitTokenizerError(f"its added token {token['content']!r} has rules for its neighbors")
    for one, other in pairwise(sorted(token["content"] for token in added)):
        if other.startswith(one):
            raise UnfitTokenizerError(f"its added token {other!r} begins with another one")


def _pattern(splitter: Mapping[str, Any] | None) -> str:
    """The splitting regex."""
    steps = splitter.get("pretokenizers", []) if splitter and splitter.get("type") == "Sequence" else [splitter or {}]
    *before, last = steps or [{}]
    pattern = ""
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        if last.get("use_regex", True):
            pattern = "" if before else _GPT2
        elif len(before) == 1 and before[0].get("type") == "Split":
            split, said = before[0], str((before[0].get("pattern") or {}).get("Regex", ""))
            plain = (split.get("behavior"), split.get("invert")) in (("Isolated", False), ("Removed", True))
            pattern = said if plain and said in KNOWN_SPLITS else ""
    if not pattern:
        raise UnfitTokenizerError("its splitting into words is not known to be the same in both engines")
    return pattern


def _ranked(model: Mapping[str, Any], added: set[str]) -> dict[str, bytes]:
    """Token -> bytes in the order of ranks, checked to agree with the merges."""
    vocab = model["vocab"]
    ranked = {char: bytes([byte]) for char, byte in _BYTE_OF.items()}
    pairs: dict[str, set[tuple[str, str]]] = {}
    latest = ""
    for merge in model.get("merges") or ():
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        token = left + right
        if token in pairs and token != latest:
            raise UnfitTokenizerError(f"merges of the token {token!r} are apart")
        if left not in ranked or right not in ranked or token not in vocab:
            raise UnfitTokenizerError(f"the merge {left!r} {right!r} uses tokens that no earlier merge makes")
        pairs.setdefault(token, set()).add((left, right))
        latest = token
        ranked.setdefault(token, ranked[left] + ranked[right])
    unmade = [token for token in vocab if token not in ranked and token not in added]
    if unmade and model.get("ignore_merges"):
        raise UnfitTokenizerError(f"{len(unmade)} tokens, as {unmade[0]!r}, come from no merge")
    ranks = {token: rank for rank, token in enumerate(ranked)}
    for token, listed in pairs.items():
        # Bytes that merge by lower ranks to a pair that is not listed for the token.
        if len(token) > 2 and _last_pair(token, ranks) not in listed:
            raise UnfitTokenizerError(f"the token {token!r} merges from other pairs than its rank")
    return ranked


def _last_pair(token: str, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """The pair to which ranks below its own merge the characters of a token."""
    parts, limit = list(token), ranks[token]
    found = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
    while len(parts) > 2:
        lowest = min(found)
        if lowest >= limit:
            break
        place = found.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del found[place]  # the pairs beside it are new, the others are as they were
        if place:
            found[place - 1] = ranks.get(parts[place - 1] + parts[place], limit)
        if place < len(found):
            found[place] = ranks.get(parts[place] + parts[place + 1], limit)
    return tuple(parts)


def _byte_characters() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones of Latin-1 as themselves, the others as U+0100 and up in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
