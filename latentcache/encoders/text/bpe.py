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

from latentcache.encoders.text.engines import Spans, Tokens, token_spans
from latentcache.value import Value

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


class ByteRanks(Value):
    """A byte-level BPE in the form of the engine."""

    pattern: str
    tokens: tuple[bytes, ...]
    """Bytes of the tokens in the order of their ranks, the 256 single bytes first."""
    ids: tuple[int, ...]
    """The id of each."""
    added: tuple[tuple[str, int], ...]
    """Added tokens, matched before anything else."""
    nfc: bool
    """True if texts are brought into normal form C first."""


def byte_ranks(tokenizer: Mapping[str, Any]) -> ByteRanks | str:
    """The ranks of a tokenizer, or the reason why it does not fit.

    Args:
        tokenizer: The parsed ``tokenizer.json``.
    """
    model = tokenizer["model"]
    reason = _unlike_bytes(model) or _unlike_added(tokenizer.get("added_tokens") or ())
    pattern = _pattern(tokenizer.get("pre_tokenizer"))
    normalizer = tokenizer.get("normalizer")
    if reason or not pattern:
        return reason or "its splitting into words is not known to be the same in both engines"
    if normalizer and normalizer.get("type") != "NFC":
        return f"its normalizer {normalizer.get('type')} is unknown to the fast engine"
    ranked = _ranked(model, {token["content"] for token in tokenizer.get("added_tokens") or ()})
    if isinstance(ranked, str):
        return ranked
    vocab = model["vocab"]
    added = tuple((token["content"], int(token["id"])) for token in tokenizer.get("added_tokens") or ())
    return ByteRanks(
        pattern=pattern,
        tokens=tuple(ranked.values()),
        ids=tuple(vocab[token] for token in ranked),
        added=added,
        nfc=bool(normalizer),
    )


class TiktokenEngine:
    """tiktoken's engine; an :class:`~latentcache.encoders.text.engines.Engine`.

    Args:
        ranks: From :func:`byte_ranks`.
        dtype: Of the ids.
    """

    def __init__(self, ranks: ByteRanks, dtype: str) -> None:
        first = len(ranks.tokens)
        added = {content: first + number for number, (content, _) in enumerate(ranks.added)}
        self._encoding = tiktoken.Encoding(
            "latentcache",
            pat_str=ranks.pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(ranks.tokens)},
            special_tokens=added,
        )
        self._added = set(added)
        self._nfc = ranks.nfc
        self._ids = np.array([*ranks.ids, *(number for _, number in ranks.added)], dtype=dtype)
        lengths = [len(token) for token in (*ranks.tokens, *(content.encode() for content, _ in ranks.added))]
        self._lengths = np.array(lengths, dtype=np.int64)

    def takes(self, text: str) -> bool:
        """True if a text fits: in the tokenizer's normal form, and without an endless run of blanks."""
        if len(text) > _BLANKS and any(text[n : n + _BLANKS].isspace() for n in range(0, len(text), _BLANKS)):
            return False
        return not self._nfc or text.isascii() or unicodedata.is_normalized("NFC", text)

    def encode(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """See :class:`~latentcache.encoders.text.engines.Engine`."""
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


def _unlike_bytes(model: Mapping[str, Any]) -> str:
    """Why a model is not a plain BPE over bytes; empty if it is one."""
    if model.get("type") != "BPE":
        return f"its model is {model.get('type')}, not BPE"
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            return f"its BPE has {name}"
    missing = [char for char in _BYTE_OF if char not in model["vocab"]]
    return f"{len(missing)} of 256 bytes are not in its vocabulary" if missing else ""


def _unlike_added(added: Sequence[Mapping[str, Any]]) -> str:
    """Why the fast engine cannot match the added tokens; empty if it can."""
    names = sorted(token["content"] for token in added)
    for token in added:
        if any(token.get(flag) for flag in _FLAGS):
            return f"its added token {token['content']!r} has rules for its neighbors"
    for one, other in pairwise(names):
        if other.startswith(one):
            return f"its added token {other!r} begins with another one"
    return ""


def _pattern(splitter: Mapping[str, Any] | None) -> str:
    """The splitting regex; empty if it is unknown."""
    steps = splitter.get("pretokenizers", []) if splitter and splitter.get("type") == "Sequence" else [splitter or {}]
    *before, last = steps or [{}]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return ""
    if last.get("use_regex", True):
        return _GPT2 if not before else ""
    if len(before) != 1 or before[0].get("type") != "Split":
        return ""
    split = before[0]
    pattern = str((split.get("pattern") or {}).get("Regex", ""))
    plain = split.get("behavior") in ("Isolated", "Removed") and split.get("invert") == (
        split["behavior"] == "Removed"
    )
    return pattern if plain and pattern in KNOWN_SPLITS else ""


def _ranked(model: Mapping[str, Any], added: set[str]) -> dict[str, bytes] | str:
    """Token -> bytes in the order of ranks, or why merges and ranks do not agree."""
    vocab = model["vocab"]
    ranked = {char: bytes([byte]) for char, byte in _BYTE_OF.items()}
    pairs: dict[str, set[tuple[str, str]]] = {}
    latest = ""
    for merge in model.get("merges") or ():
        left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
        token = left + right
        if token in pairs and token != latest:
            return f"merges of the token {token!r} are apart"
        if left not in ranked or right not in ranked or token not in vocab:
            return f"the merge {left!r} {right!r} uses tokens that no earlier merge makes"
        pairs.setdefault(token, set()).add((left, right))
        latest = token
        ranked.setdefault(token, ranked[left] + ranked[right])
    unmade = [token for token in vocab if token not in ranked and token not in added]
    if unmade and model.get("ignore_merges"):
        return f"{len(unmade)} tokens, as {unmade[0]!r}, come from no merge"
    return _disagreement(ranked, pairs) or ranked


def _disagreement(ranked: Mapping[str, bytes], pairs: Mapping[str, set[tuple[str, str]]]) -> str:
    """A token whose bytes merge by lower ranks to a pair that is not listed for it; empty if there is none."""
    ranks = {token: rank for rank, token in enumerate(ranked)}
    for token, listed in pairs.items():
        if len(token) > 2 and _last_pair(token, ranks) not in listed:
            return f"the token {token!r} merges from other pairs than its rank"
    return ""


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
