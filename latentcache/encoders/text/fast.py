"""Byte-level BPE by tiktoken's engine, fed with the ranks and the pattern of a ``tokenizer.json``.

Tokenizers that fit: BPE over bytes, with the splitting of GPT-2, Llama 3, Qwen 2 or GPT-4o, no normalizer or NFC, and
merges that agree with ranks. tiktoken merges any two neighbors whose bytes are a token, the reference only pairs that
are listed. Both agree if merging the bytes of a token by lower ranks alone ends in a pair that is listed for it; this
is checked for every token. Before use, the ids and loss spans of both are compared on almost every character of
Unicode beside a letter, a digit and a sign. They are also compared on the first megabyte of a worker's data. The
reference takes about 2 s of CPU for both. Needs the extra ``tokens``.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from latentcache.encoders.text.special import Spans
from latentcache.encoders.text.tokenizer import TextTokenizer, Tokens, token_spans
from latentcache.fields.protocol import Failure, Made
from latentcache.sources.records import Record, record_size, text_record

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{words}{_SHORT}?" for words in (_UPPER + "*" + _LOWER + "+", _UPPER + "+" + _LOWER + "*")
)
#: Splittings that take every character and mean the same to both regex engines. Compared for every code point of
#: Unicode 16 in tokenizers 0.23 and tiktoken 0.14: no difference.
KNOWN_SPLITS = frozenset(
    (
        _GPT2,
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
        rf"{_WORDS}|\p{{N}}|{_REST}",
        rf"{_CASED}|\p{{N}}{{1,3}}|{_REST}".replace(r"[\r\n]*", r"[\r\n/]*"),
    )
)
#: The engine's regex takes loss of 100 000 blanks and fails on a million ("Max stack size exceeded"). A run twice as
#: long as this holds a whole piece of this length that begins at a multiple of it.
_BLANKS = 50_000
#: Planes 0 and 1 and the tags, without big uniform blocks, surrogates, private use and the marks of special tokens.
_RANGES = ((1, 0x3400), (0xA000, 0xAC00), (0xD7A4, 0xD800), (0xF900, 0xFDD0), (0xFDD3, 0x20000), (0xE0000, 0xE01F0))
_FIRST_BYTES = 1 << 20
_BATCH = 256
#: GPT-2's spelling of bytes: printable ones of Latin-1 as themselves, the others as U+0100 and up in order.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_BYTE_OF = {chr(byte): byte for byte in _PLAIN}
_BYTE_OF |= {chr(256 + n): byte for n, byte in enumerate(byte for byte in range(256) if byte not in _PLAIN)}


class UnfitTokenizerError(ValueError):
    """A tokenizer does not fit the engine; its text says why."""


def fast_tokenizer(reference: TextTokenizer, records: Iterable[Record]) -> TextTokenizer | str:
    """The tokenizer with the fast engine, or the reason why it differs on characters or on these first records."""
    try:
        fast = reference.with_engine(TiktokenEngine(reference.tokenizer, reference.recipe.dtype))
    except UnfitTokenizerError as error:
        return f"no fast tokenization: {error}"
    except ModuleNotFoundError as error:
        if error.name != "tiktoken":
            raise
        return "no fast tokenization: tiktoken is not installed; `pip install 'latentcache[tokens]'`"
    trials = [*_characters(), *_first(records)]
    for start in range(0, len(trials), _BATCH):
        batch = trials[start : start + _BATCH]
        for record, mine, theirs in zip(batch, reference.tokenize(batch), fast.tokenize(batch), strict=True):
            if not _is_same(mine, theirs):
                return f"no fast tokenization: other ids than the tokenizer's for {record.source}:{record.line}"
    return fast


def _is_same(one: Made | Failure, other: Made | Failure) -> bool:
    if not isinstance(one, Made) or not isinstance(other, Made):
        return one == other
    return np.array_equal(one.array, other.array) and np.array_equal(one.columns["spans"], other.columns["spans"])


def _characters() -> Iterator[Record]:
    """Every character beside a letter, a digit and a sign, 64 in a document."""
    codes = [code for first, last in _RANGES for code in range(first, last)]
    for start in range(0, len(codes), 64):
        text = "".join(f"{chr(c)}a {chr(c)}1 {chr(c)}! {chr(c)} " for c in codes[start : start + 64])
        yield text_record("every character", start, text)


def _first(records: Iterable[Record]) -> Iterator[Record]:
    """The records of the first megabyte; a larger record would take gigabytes here and is skipped."""
    size = 0
    for record in records:
        if record_size(record) <= _FIRST_BYTES and size < _FIRST_BYTES:
            size += record_size(record)
            yield record


class TiktokenEngine:
    """tiktoken's engine; raises UnfitTokenizerError for a tokenizer to which it may give other ids."""

    def __init__(self, tokenizer: Mapping[str, Any], dtype: str) -> None:
        import tiktoken

        model, added = tokenizer["model"], tokenizer.get("added_tokens") or ()
        normalizer = tokenizer.get("normalizer") or {}
        _check_plain(model, added, normalizer)
        pattern, names = _pattern(tokenizer.get("pre_tokenizer") or {}), [str(token["content"]) for token in added]
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
        """Ids and loss spans of each text, as :meth:`ReferenceEngine.encode`."""
        return [self._tokens(text, own) for text, own in zip(texts, spans, strict=True)]

    def _tokens(self, text: str, spans: Spans | None) -> Tokens:
        ranks = self._encoding.encode_to_numpy(text, allowed_special=self._added, disallowed_special=())
        if spans is None:
            return self._ids[ranks], None
        if not text.isascii():  # places in characters become places in UTF-8
            spans = [(len(text[:begin].encode()), len(text[:end].encode())) for begin, end in spans]
        ends = np.cumsum(self._lengths[ranks])
        return self._ids[ranks], token_spans(ends - self._lengths[ranks], ends, spans)


def _check_plain(model: Mapping[str, Any], added: Sequence[Mapping[str, Any]], normalizer: Mapping[str, Any]) -> None:
    """Check that a model is a plain BPE over bytes, and that the engine can match the added tokens."""
    if normalizer.get("type", "NFC") != "NFC":
        raise UnfitTokenizerError(f"its normalizer {normalizer['type']} is unknown to the fast engine")
    if model.get("type") != "BPE":
        raise UnfitTokenizerError(f"its model is {model.get('type')}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise UnfitTokenizerError(f"its BPE has {name}")
    if missing := _BYTE_OF.keys() - model["vocab"].keys():
        raise UnfitTokenizerError(f"{len(missing)} of 256 bytes are not in its vocabulary")
    for token in added:
        if any(token.get(flag) for flag in ("single_word", "lstrip", "rstrip")):
            raise UnfitTokenizerError(f"its added token {token['content']!r} has rules for its neighbors")
    for one, other in pairwise(sorted(token["content"] for token in added)):
        if other.startswith(one):
            raise UnfitTokenizerError(f"its added token {other!r} begins with another one")


def _pattern(splitter: Mapping[str, Any]) -> str:
    """The splitting regex: of a byte-level step alone, or of one that splits and leaves the bytes to the other."""
    *before, last = splitter.get("pretokenizers") or [splitter]
    split = before[0] if len(before) == 1 else {}
    regex = "" if before else _GPT2
    if (split.get("behavior"), split.get("invert")) in (("Isolated", False), ("Removed", True)):
        regex = (split.get("pattern") or {}).get("Regex", "")
    fits = last.get("type") == "ByteLevel" and not last.get("add_prefix_space")
    if not fits or regex not in KNOWN_SPLITS or last.get("use_regex", True) == bool(before):
        raise UnfitTokenizerError("its splitting into words is not known to be the same in both engines")
    return regex


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
        if len(token) > 2 and _last_pair(token, ranks) not in listed:
            raise UnfitTokenizerError(f"the token {token!r} merges from other pairs than its rank")
    return ranked


def _last_pair(token: str, ranks: Mapping[str, int]) -> tuple[str, ...]:
    """The pair to which ranks below its own merge the characters of a token."""
    parts, limit = list(token), ranks[token]
    found = [ranks.get(left + right, limit) for left, right in pairwise(parts)]
    while len(parts) > 2 and (lowest := min(found)) < limit:
        place = found.index(lowest)
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
        del found[place]  # the pairs beside it are new, the others are as they were
        for pair in range(max(place - 1, 0), min(place + 1, len(found))):
            found[pair] = ranks.get(parts[pair] + parts[pair + 1], limit)
    return tuple(parts)
