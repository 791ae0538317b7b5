"""Samples in a few buckets, and documents with loss spans, for property tests."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from latentcache.plan.batching import BatchPlan, Bucket
from latentcache.plan.documents import Corpus, begins
from latentcache.plan.mixing import mixture, occurrences
from latentcache.plan.samples import Blocks, SampleIndex, plan_epoch, plan_report

POLICIES = ["repeat", "drop", "partial", "pad"]
#: Frames, height and width of each bucket, and its tokens.
SIZES = [(1, 64, 64), (1, 64, 128), (1, 128, 192), (3, 128, 256), (1, 256, 256)]
TOKENS = [7, 10, 24, 16, 9]
BUCKETS = tuple(
    Bucket(label=f"64x{64 + 8 * number}", size=size, tokens=tokens)
    for number, (size, tokens) in enumerate(zip(SIZES, TOKENS, strict=True))
)
columns = st.lists(st.integers(0, 4), max_size=90).map(lambda numbers: np.array(numbers, dtype=np.int32))
seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10**9)


def plans(*policies, most=6):
    return st.builds(
        BatchPlan,
        batch_size=st.integers(1, most),
        world_size=st.integers(1, 5),
        remainder=st.sampled_from(policies or POLICIES),
    )


@st.composite
def budgets(draw, *policies):
    ranks, rounded = draw(st.sampled_from([(1, None), (2, None), (3, None), (1, 4), (2, 4), (4, 4), (2, 6)]))
    unit, least = draw(st.sampled_from([("pixels", 98_304), ("tokens", 24)]))
    budget = draw(st.integers(least * (rounded or ranks), least * 30))
    policy = draw(st.sampled_from(policies or POLICIES))
    return BatchPlan(**{f"batch_{unit}": budget}, multiple_of=rounded, world_size=ranks, remainder=policy)


def index_of(bucket, *, mixture=None, parts=(), shard=None, shuffle_block=4):
    blocks = None if shard is None else Blocks(shard=np.asarray(shard, np.int32), samples=shuffle_block)
    return SampleIndex(
        bucket=np.asarray(bucket, np.int32),
        buckets=BUCKETS,
        identify=lambda: "these",
        mixture=mixture,
        parts=parts,
        blocks=blocks,
    )


@st.composite
def loaders(draw, *policies):
    """Samples and batches: of a size, a budget or a size for each source; with weights or windows, or without."""
    bucket = draw(columns)
    first = draw(st.integers(0, len(bucket)))
    entries = [first, len(bucket) - first]
    has_sources = min(entries) > 0
    batches = draw(plans(*policies) | budgets(*policies))
    if has_sources and batches.batch_size is not None and draw(st.booleans()):
        batches = replace(batches, batch_size=(batches.batch_size, draw(st.integers(1, 4))))
    mix = None
    if has_sources and batches.remainder != "pad" and draw(st.booleans()):
        mix = mixture(["a", "b"], entries, [2, draw(st.integers(1, 4))])
    shard = np.arange(len(bucket)) // 5 if draw(st.booleans()) else None
    block = draw(st.integers(1, 40))
    parts = (("a", entries[0]), ("b", entries[1])) if has_sources else ()
    return index_of(bucket, mixture=mix, parts=parts, shard=shard, shuffle_block=block), batches


def part_of(index, report, rows):
    """The part of the report that counts some samples of one bucket and source."""
    numbers = index.apart(report.batches).bucket[rows]
    (number,) = set(numbers.tolist())
    return next(part for part in report.buckets if part.number == number)


def due(index, seed, epoch):
    """(N,) how often each sample is due in an epoch."""
    if index.mixture is None:
        return np.ones(len(index.bucket), dtype=np.int64)
    return occurrences(index.bucket, index.mixture, seed=seed, epoch=epoch)


def laid_out(index, batches, seed=0, epoch=0):
    return plan_report(index, batches), plan_epoch(index, batches, seed=seed, epoch=epoch)


def batches_of(plan):
    """[[BatchIndex of each rank] of each step]"""
    return [[plan.batch(step, rank) for rank in range(plan.world_size)] for step in range(len(plan))]


#: Documents as lists that say of each token if it is learned.
documents = st.lists(
    st.integers(0, 14).map(lambda length: [True] * length) | st.lists(st.booleans(), max_size=14), max_size=9
)


def corpus_of(documents):
    edges = [np.flatnonzero(np.diff([False, *learned, False])).reshape(-1, 2) for learned in documents]
    ends = np.concatenate([np.empty((0, 2), dtype=np.int64), *edges])
    return Corpus(
        length=np.array([len(learned) for learned in documents], dtype=np.uint32),
        span_ends=np.cumsum([len(spans) for spans in edges], dtype=np.int64),
        spans=np.column_stack([ends[:, 0], ends[:, 1] - ends[:, 0]]).astype(np.uint32),
        where=lambda number: f"made.jsonl:{number + 1}",
    )


def rows_of(plan):
    """[[(document, start, length), ...], ...]"""
    pieces = list(zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True))
    return [pieces[first:last] for first, last in zip(begins(plan.ends).tolist(), plan.ends.tolist(), strict=True)]


def tokens_of(row):
    """[(document, token), ...] in the order of a row's pieces."""
    return [(document, token) for document, start, length in row for token in range(start, start + length)]
