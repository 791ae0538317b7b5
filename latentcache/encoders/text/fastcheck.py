"""True if the fast engine gives the ids of the reference: tried before a build uses it, on its own first records.

Three trials: every character of Unicode but the big uniform blocks, beside a letter, a digit and a sign; random
documents of a fixed seed, made of what tokenizers disagree on; and the first megabyte of the data. One difference in
ids or in runs, and the reference does all, with a sentence that says so. Cost: about 2 s of CPU, the reference's.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from latentcache.encoders.text.describe import noted
from latentcache.encoders.text.opening import open_both
from latentcache.encoders.text.protocol import TokenizedDocument, TokenizerDescription
from latentcache.sources.records import Record, record_size, text_record

_FIRST_BYTES = 1 << 20
_RANDOM_DOCUMENTS = 200
_BATCH = 256
#: Planes 0 and 1 and the tags, without ideographs, Hangul, surrogates, private use and our own three names.
_RANGES = (
    (0x01, 0x3400),
    (0xA000, 0xAC00),
    (0xD7A4, 0xD800),
    (0xF900, 0xFDD0),
    (0xFDD3, 0x20000),
    (0xE0000, 0xE01F0),
)
_PIECES = (
    " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u0301", "'s", "'LL", "'", "\u2019s", "a", "word",
    "'t", "'re", "'ve", "'m", "'ll", "'d",
    " Word", "\u00e9", "\u00df", "\u1e9e", "\u4e2d", "\u0639", "\U0001f600", "1", "123", "12345", "\u0663", "\u00b2",
    "!", "...", "()", "_", "\x00", "\x85", "\u2028", "\ufffd", "<|", "|>", "\u00c5", "A\u030a", "\u2126", "//", "-->",
)  # fmt: skip


def with_fast_path(description: TokenizerDescription, records: Iterable[Record]) -> TokenizerDescription:
    """The description with the fast engine on where it may be, and with the sentence that says what was found.

    Args:
        description: With ``fast`` off.
        records: The first records of the data; not more than a megabyte of them is looked at.
    """
    if not description.tokenizer:
        return description
    both = open_both(description)
    if isinstance(both, str):
        return noted(description, fast=False, note=f"no fast tokenization: {both}")
    reference, fast = both
    trials = (*_characters(), *_random_documents(_controls(description)), *_first(records))
    for start in range(0, len(trials), _BATCH):
        batch = trials[start : start + _BATCH]
        pairs = zip(batch, reference.tokenize(batch), fast.tokenize(batch), strict=True)
        different = next((record for record, one, other in pairs if not _same(one, other)), None)
        if different is not None:
            place = f"{different.source}:{different.line}"
            note = f"no fast tokenization: it gave other ids than the tokenizer for {place}"
            return noted(description, fast=False, note=note)
    note = f"fast tokenization: the same ids as the tokenizer's for {len(trials)} documents"
    return noted(description, fast=True, note=note)


def _same(one: object, other: object) -> bool:
    if not isinstance(one, TokenizedDocument) or not isinstance(other, TokenizedDocument):
        return one == other
    return np.array_equal(one.ids, other.ids) and np.array_equal(one.runs, other.runs)


def _controls(description: TokenizerDescription) -> list[str]:
    return [token for _, token in description.special]


def _characters() -> Iterator[Record]:
    """Every character beside a letter, a digit and a sign, 64 in a document."""
    codes = [code for first, last in _RANGES for code in range(first, last)]
    for number, start in enumerate(range(0, len(codes), 64), start=1):
        text = "".join(f"{chr(c)}a {chr(c)}1 {chr(c)}! {chr(c)} " for c in codes[start : start + 64])
        yield text_record("every character", number, text)


def _random_documents(controls: list[str]) -> Iterator[Record]:
    draw = random.Random(0)
    pieces = [*_PIECES, *controls]
    for number in range(1, _RANDOM_DOCUMENTS + 1):
        text = "".join(draw.choices(pieces, k=draw.randrange(1, 400)))
        yield text_record("random documents", number, text)


def _first(records: Iterable[Record]) -> Iterator[Record]:
    """The records of the first megabyte; one that is larger would take gigabytes here and is passed over."""
    size = 0
    for record in islice(records, 100_000):
        if record_size(record) > _FIRST_BYTES:
            continue
        yield record
        size += record_size(record)
        if size >= _FIRST_BYTES:
            return
