"""Captions as a trainer sees them: frequent tags, missing and equal captions, shares of sets with repeats."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from latentcache.fields.captions import BETWEEN
from latentcache.store.snapshot import Snapshot
from latentcache.verify.findings import shown_text

#: Tags, equal captions and sets that are shown, and names beside them.
_TAGS, _EQUAL, _SETS, _NAMED = 40, 12, 24, 5
#: Captions are lists of tags if their parts between commas have at most this many words on average.
_TAG_WORDS = 3.0
#: Words shorter than this say little about sentences.
_WORD = 4
_EXCERPT = 160


def caption_facts(snapshot: Snapshot) -> dict[str, Any] | None:
    """Facts of the captions; None if the samples have none."""
    held = snapshot.samples.inputs.get("caption")
    if held is None or held.text is None or not len(snapshot.samples):
        return None
    texts, names = list(held.text), snapshot.samples.names
    times = _times(snapshot)
    first: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, []).append(row)
    equal = sorted((rows for text, rows in first.items() if text.strip() and len(rows) > 1), key=len, reverse=True)
    missing = [row for text, rows in first.items() if not text.strip() for row in rows]
    kind, tags, captioned = _tags(texts, times)
    return {
        "captions": len(texts) - len(missing),
        "missing": len(missing),
        "missing_names": _names(names, missing),
        "chosen": snapshot.empty_by_choice,
        "several": sum(BETWEEN in text for text in first),
        "characters": int(np.median([len(text) for text in texts])),
        "equal": [
            {"text": _excerpt(texts[rows[0]]), "count": len(rows), "names": _names(names, rows)}
            for rows in equal[:_EQUAL]
        ],
        "equal_groups": len(equal),
        "equal_samples": sum(map(len, equal)),
        "tag_kind": kind,
        "tags": [
            {"text": shown_text(tag), "count": count, "share": count / max(captioned, 1)}
            for tag, count in tags.most_common(_TAGS)
        ],
        "distinct_tags": len(tags),
        "once": sum(count == 1 for count in tags.values()),
    }


def remark_facts(snapshot: Snapshot) -> list[dict[str, Any]]:
    """What the fields remark on their items, such as captions cut to the length of the model."""
    remarks = []
    for name, rows in snapshot.fields.items():
        if rows.kind is None or not len(rows):
            continue
        columns = {**rows.columns, **rows.ragged_columns, "length": rows.length}
        for reason, sentence, where in rows.kind.remarks(columns):
            samples = np.unique(np.asarray(rows.sample)[where])
            remarks.append({
                "field": name,
                "reason": reason,
                "text": sentence,
                "count": len(samples),
                "names": _names(snapshot.samples.names, samples[:_NAMED].tolist()),
            })  # fmt: skip
    return remarks


def set_facts(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Sets of the samples with their share of an epoch, repeats included; without sets their folders."""
    times, counts, weights = _times(snapshot), Counter[str](), Counter[str]()
    about = {str(part["folder"]): part for part in snapshot.source.get("sets", ()) if part.get("folder")}
    deepest = sorted(about, key=len, reverse=True)
    for name, number in zip(snapshot.samples.names, times, strict=True):
        inside = (folder for folder in deepest if name.startswith(f"{folder}/"))
        folder = next(inside, "") or name.rpartition("/")[0] or "."
        counts[folder] += 1
        weights[folder] += number
    total = max(sum(weights.values()), 1)
    return [
        {
            "name": shown_text(folder),
            "samples": counts[folder],
            "repeats": round(weight / counts[folder], 2),
            "share": weight / total,
            "regularization": bool(about.get(folder, {}).get("is_reg")),
        }
        for folder, weight in weights.most_common(_SETS)
    ]


def _times(snapshot: Snapshot) -> list[int]:
    """How often an epoch serves each sample."""
    column = snapshot.samples.columns.get("repeats")
    return [1] * len(snapshot.samples) if column is None else np.asarray(column).tolist()


def _tags(texts: Sequence[str], times: Sequence[int]) -> tuple[str, Counter[str], int]:
    """What was counted, in how many captions of an epoch each is, and the number of these captions."""
    every = [[variant for variant in text.split(BETWEEN) if variant.strip()] for text in texts]
    parts = [part for variants in every[:2000] for text in variants for part in text.split(",")]
    words = sum(len(part.split()) for part in parts)
    commas = sum(text.count(",") for variants in every[:2000] for text in variants)
    is_tags = bool(parts) and commas >= len(parts) / 2 and words / len(parts) <= _TAG_WORDS
    counts, captioned = Counter[str](), 0
    for variants, number in zip(every, times, strict=True):
        present = {tag for text in variants for tag in (_split_tags(text) if is_tags else _split_words(text))}
        captioned += number if variants else 0
        for tag in present:
            counts[tag] += number
    return ("tags" if is_tags else "words"), counts, captioned


def _split_tags(text: str) -> Iterator[str]:
    return (tag for part in text.split(",") if (tag := " ".join(part.split()).lower()))


def _split_words(text: str) -> Iterator[str]:
    return (word for word in re.findall(r"[^\W_]+", text.lower()) if len(word) >= _WORD)


def _names(names: Sequence[str], rows: Sequence[int]) -> list[str]:
    return [shown_text(names[row]) for row in rows[:_NAMED]]


def _excerpt(text: str) -> str:
    text = shown_text(text.replace(BETWEEN, " | "))
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."
