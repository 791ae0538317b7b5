"""Token caches in memory, and what rows of them must hold, worked out token by token."""

import numpy as np

from latentcache.loader.token_cache import TokenCache, documents_fingerprint
from latentcache.store.documents import MemoryTokens
from latentcache.token_recipe import TokenRecipe

EOS = 1


def recipe(**changes):
    return TokenRecipe(**({"tokenizer": "ab" * 16, "num_ids": 1000, "eos_id": EOS} | changes))


def texts(count=40, longest=30, seed=0):
    """Documents of random ids that end with EOS."""
    random = np.random.default_rng(seed)
    return [[*random.integers(2, 1000, random.integers(1, longest)).tolist(), EOS] for _ in range(count)]


def cache_of(ids, spans=None, *, plans=None, pad=None, **changes):
    store = MemoryTokens(ids, spans)
    made = recipe(**({"loss": "all" if spans is None else "assistant"} | changes))
    fingerprint = documents_fingerprint(store, made)
    return TokenCache(store=store, recipe=made, fingerprint=fingerprint, plans=plans, pad=pad)


def chats(count=40, longest=30, seed=0):
    """Documents, and for each some runs with loss, the last of which ends with it."""
    random = np.random.default_rng(seed)
    ids = texts(count, longest, seed)
    spans = []
    for document in ids:
        half = len(document) // 2
        first = [(0, int(random.integers(1, half)))] if half > 2 and random.random() < 0.5 else []
        spans.append([*first, (half, len(document) - half)])
    return ids, spans


def expected_row(view, row, width, ids, spans=None):
    """The lists a row must be, from the plan and the documents alone."""
    (part,) = view.parts
    plan, settings = part.plan, view.settings
    out = {name: [] for name in ("input_ids", "labels", "position_ids", "seq_idx")}
    for number, piece in enumerate(plan.pieces(row)):
        document, start, length = (int(column[piece]) for column in (plan.document, plan.start, plan.length))
        runs = [(0, len(ids[document]))] if spans is None else spans[document]
        loss = {place for first, count in runs for place in range(first, first + count)}
        for token in range(start, start + length):
            alone = not out["labels"] if plan.crossing else token == start
            out["labels"].append(ids[document][token] if token in loss and not alone else -100)
            out["input_ids"].append(ids[document][token])
            out["position_ids"].append(token - start)
            out["seq_idx"].append(number + 1)
    count = len(out["input_ids"])
    fillings = {"input_ids": [settings.pad_id] * (width - count), "labels": [-100] * (width - count),
                "position_ids": list(range(width - count)), "seq_idx": [0] * (width - count),
                "attention_mask": [0] * (width - count)}  # fmt: skip
    out["attention_mask"] = [1] * count
    left = settings.padding_side == "left"
    rows = {name: fillings[name] + out[name] if left else out[name] + fillings[name] for name in out}
    if not settings.isolated:
        del rows["position_ids"], rows["seq_idx"]
    return rows
