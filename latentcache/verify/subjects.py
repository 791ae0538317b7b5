"""What stands behind an entry: one sample of a picture cache, or all documents of a block of a token cache.

Decides which samples a selection takes. Pictures are drawn one by one. Of a token cache ``x%`` and ``N`` draw
documents; ``n/t`` takes whole blocks, by a hash of their keys: a block is read whole, so t slices read the cache once
and not t times. What was drawn is what a statement of confidence counts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from latentcache.store.column_files import parts
from latentcache.store.token_generation import AnyGeneration, TokenGeneration
from latentcache.verify.portions import of_rows
from latentcache.verify.selection import Depth, Selection, confidence


def field_of(generation: AnyGeneration) -> str:
    """Which tensor of a sample an entry holds."""
    return "input_ids" if isinstance(generation, TokenGeneration) else "latents"


def count_samples(generation: AnyGeneration) -> int:
    """S: pictures, or documents."""
    return len(generation.documents) if isinstance(generation, TokenGeneration) else len(generation.samples.names)


def name_of(generation: AnyGeneration, sample: int) -> str:
    """The name of a picture, or file and line of a document."""
    if isinstance(generation, TokenGeneration):
        return generation.documents.where(sample)
    name: str = generation.samples.names[sample]
    return name


def samples_of(generation: AnyGeneration, row: int) -> list[int]:
    """The samples that have the entry of one row."""
    if isinstance(generation, TokenGeneration):
        return list(np.flatnonzero(generation.documents.block == row).tolist())
    return [int(generation.rows.sample[row])]


def rows_with(generation: AnyGeneration, samples: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(R,) the rows that hold something of ``samples`` (S,)."""
    if not isinstance(generation, TokenGeneration):
        return of_rows(generation, samples)
    rows = np.zeros(len(generation.blocks), dtype=np.bool_)
    rows[generation.documents.block[samples]] = True
    return rows


def samples_with(generation: AnyGeneration, rows: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """(S,) the samples of which something lies in ``rows`` (R,)."""
    if isinstance(generation, TokenGeneration):
        held: NDArray[np.bool_] = rows[generation.documents.block]
        return held
    samples, sample = np.zeros(len(generation.samples.names), dtype=np.bool_), generation.rows.sample
    for part in parts(len(rows)):
        samples[sample[part][rows[part]]] = True
    return samples


def choose(generation: AnyGeneration, selection: Selection) -> NDArray[np.bool_]:
    """(S,) whether each sample is chosen."""
    total = count_samples(generation)
    if not isinstance(generation, TokenGeneration):
        return selection.choose(generation.samples.names, total)
    if not selection.slices:
        return selection.choose((), total)
    keys = (key.tobytes().hex() for key in generation.blocks.key)
    return samples_with(generation, selection.choose(keys, len(generation.blocks)))


def chosen_by(
    generation: AnyGeneration, selection: Selection | None
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]] | tuple[None, None]:
    """(S,) the samples and (R,) the rows that are chosen; None twice for all, which need not be written down."""
    if selection is None:
        return None, None
    chosen = choose(generation, selection)
    return chosen, rows_with(generation, chosen)


def every(generation: AnyGeneration, chosen: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """(S,) ``chosen`` as an array of its own, also where it is all."""
    return np.ones(count_samples(generation), dtype=np.bool_) if chosen is None else chosen.copy()


def stated(
    generation: AnyGeneration, depth: Depth, chosen: NDArray[np.bool_] | None, looked: NDArray[np.bool_]
) -> str:
    """What samples that are all clean say of the others, in one sentence; empty where nothing follows.

    Args:
        generation: What was checked.
        depth: How.
        chosen: (S,) what was drawn; None for all.
        looked: (S,) of which all is known. What a time limit left is the front of a shard and no draw.
    """
    drawn = depth.selection is not None or depth.max_duration_s is not None
    if not depth.reads or not drawn or not looked.any():
        return ""
    if looked.all():
        return confidence(len(looked), len(looked))
    if chosen is None or (chosen & ~looked).any():
        return ""
    if isinstance(generation, TokenGeneration) and depth.selection is not None and depth.selection.slices:
        return confidence(int(rows_with(generation, looked).sum()), len(generation.blocks), "blocks")
    return confidence(int(looked.sum()), len(looked))
