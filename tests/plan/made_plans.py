"""Samples in a few buckets, and documents with loss spans, for property tests."""

import numpy as np
from hypothesis import strategies as st

from latentcache.plan.batching import BatchPlan, Bucket
from latentcache.plan.documents import Corpus, begins
from latentcache.plan.samples import Blocks, SampleIndex, plan_epoch, plan_report

POLICIES = ["repeat", "drop", "partial", "pad"]
columns = st.lists(st.integers(0, 4), max_size=120).map(lambda some: np.array(some, dtype=np.int32))
seeds = st.integers(-(2**63), 2**64)
epochs = st.integers(0, 10**9)


def plans(*policies, most=6):
    return st.builds(
        BatchPlan,
        batch_size=st.integers(1, most),
        world_size=st.integers(1, 5),
        remainder=st.sampled_from(policies or POLICIES),
    )


def index_of(bucket, *, mixture=None, shard=None, shuffle_block=4):
    widths = [64 + 8 * number for number in range(max(int(bucket.max(initial=-1)) + 1, 5))]
    buckets = tuple(Bucket(label=f"64x{width}") for width in widths)
    bucket = np.asarray(bucket, np.int32)
    blocks = None if shard is None else Blocks(shard=np.asarray(shard, np.int32), samples=shuffle_block)
    return SampleIndex(bucket=bucket, buckets=buckets, identify=lambda: "these", mixture=mixture, blocks=blocks)


def laid_out(index, batches, seed=0, epoch=0):
    return plan_report(index, batches), plan_epoch(index, batches, seed=seed, epoch=epoch)


def batches_of(plan):
    """[[BatchIndex of each rank] of each step]"""
    return [[plan.batch(step, rank) for rank in range(plan.world_size)] for step in range(len(plan))]


@st.composite
def documents(draw, most=9, longest=14):
    """[(length, [(first, number), ...])] with ascending, separate spans."""
    made = []
    for length in draw(st.lists(st.integers(0, longest), max_size=most)):
        loss = draw(st.one_of(st.just([True] * length), st.lists(st.booleans(), min_size=length, max_size=length)))
        spans, start = [], None
        for place, flag in enumerate([*loss, False]):
            if flag and start is None:
                start = place
            elif not flag and start is not None:
                spans.append((start, place - start))
                start = None
        made.append((length, spans))
    return made


def corpus_of(made):
    return Corpus(
        length=np.array([length for length, _ in made], dtype=np.uint32),
        span_ends=np.cumsum([len(spans) for _, spans in made], dtype=np.int64),
        spans=np.array([span for _, spans in made for span in spans], dtype=np.uint32).reshape(-1, 2),
        where=lambda number: f"made.jsonl:{number + 1}",
    )


def with_loss(made, document):
    return {place for first, number in made[document][1] for place in range(first, first + number)}


def rows_of(plan):
    """[[(document, start, length), ...], ...]"""
    pieces = list(zip(plan.document.tolist(), plan.start.tolist(), plan.length.tolist(), strict=True))
    return [pieces[first:last] for first, last in zip(begins(plan.ends).tolist(), plan.ends.tolist(), strict=True)]


def learned_columns(made, row, *, cross_document=False):
    """Compute the learned columns of a row from the documents."""
    found, place = set(), 0
    for document, start, length in row:
        for token in range(start, start + length):
            alone = place == 0 if cross_document else token == start
            if token in with_loss(made, document) and not alone:
                found.add(place)
            place += 1
    return found
