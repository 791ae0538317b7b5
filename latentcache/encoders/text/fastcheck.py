"""Prove that the fast engine gives the ids of the reference, before a worker uses it, also on its own first records.

Two trials: every character of Unicode but the big uniform blocks, beside a letter, a digit and a sign; and the first
megabyte of the data. After one difference in ids or loss spans the reference does everything, with a sentence that
says so. Cost: about 2 s of CPU, of the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np

from latentcache.encoders.text.tokenizer import TextTokenizer
from latentcache.fields.protocol import Made
from latentcache.sources.records import Record, record_size, text_record

_FIRST_BYTES = 1 << 20
_BATCH = 256
#: Planes 0 and 1 and the tags, without ideographs, Hangul, surrogates, private use and the three marks of
#: ``special``.
_RANGES = (
    (0x01, 0x3400),
    (0xA000, 0xAC00),
    (0xD7A4, 0xD800),
    (0xF900, 0xFDD0),
    (0xFDD3, 0x20000),
    (0xE0000, 0xE01F0),
)


def fast_tokenizer(reference: TextTokenizer, records: Iterable[Record]) -> TextTokenizer | str:
    """The tokenizer with the fast engine, or the reason why only the reference is right.

    ``records`` are the first ones of the data; a megabyte of them is tried.
    """
    try:
        from latentcache.encoders.text.bpe import TiktokenEngine, UnfitTokenizerError  # an extra
    except ModuleNotFoundError as error:
        if error.name != "tiktoken":
            raise
        return "no fast tokenization: tiktoken is not installed; `pip install 'latentcache[tokens]'`"
    try:
        fast = reference.with_engine(TiktokenEngine(reference.tokenizer, reference.recipe.dtype))
    except UnfitTokenizerError as error:
        return f"no fast tokenization: {error}"
    trials = (*_characters(), *_first(records))
    different = _first_difference(reference, fast, trials)
    if different is not None:
        return f"no fast tokenization: other ids than the tokenizer's for {different.source}:{different.line}"
    return fast


def _first_difference(one: TextTokenizer, other: TextTokenizer, trials: Sequence[Record]) -> Record | None:
    """The first record for which two tokenizers differ."""
    for start in range(0, len(trials), _BATCH):
        batch = trials[start : start + _BATCH]
        for record, mine, theirs in zip(batch, one.tokenize(batch), other.tokenize(batch), strict=True):
            if not _is_same(mine, theirs):
                return record
    return None


def _is_same(one: object, other: object) -> bool:
    if not isinstance(one, Made) or not isinstance(other, Made):
        return one == other
    return np.array_equal(one.array, other.array) and np.array_equal(one.columns["spans"], other.columns["spans"])


def _characters() -> Iterator[Record]:
    """Every character beside a letter, a digit and a sign, 64 in a document."""
    codes = [code for first, last in _RANGES for code in range(first, last)]
    for number, start in enumerate(range(0, len(codes), 64), start=1):
        text = "".join(f"{chr(c)}a {chr(c)}1 {chr(c)}! {chr(c)} " for c in codes[start : start + 64])
        yield text_record("every character", number, text)


def _first(records: Iterable[Record]) -> Iterator[Record]:
    """The records of the first megabyte; a larger record would take gigabytes here and is skipped."""
    size = 0
    for record in islice(records, 100_000):
        if record_size(record) > _FIRST_BYTES:
            continue
        yield record
        size += record_size(record)
        if size >= _FIRST_BYTES:
            return
