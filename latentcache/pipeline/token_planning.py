"""From what there is to what a build of tokens has to do: which documents are there, taken from elsewhere, or made.

Decides nothing about content. Guarantee: a record is tokenised only where no cache that was named holds its document
whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from latentcache.pipeline.token_known import Known
from latentcache.pipeline.token_report import TokenPlan, token_plan, with_work
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.pipeline.token_survey import TokenSurvey, first_of_each, refused_rows, todo_of
from latentcache.pipeline.token_taking import OtherCache, Taken, find_taken
from latentcache.sources.sample import Refusal
from latentcache.store.documents import as_items
from latentcache.token_recipe import TokenRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """The plan, and the records that it is about. N records."""

    plan: TokenPlan
    todo: NDArray[np.bool_]
    """(N,) whether a record's document is not in the cache yet."""
    taken: Taken
    """Which of those documents other caches have."""


def divide(
    settings: TokenSettings,
    recipe: TokenRecipe,
    work: TokenSurvey,
    known: Known,
    others: Sequence[OtherCache],
    refused: Mapping[bytes, Refusal],
) -> Divided:
    """Say of each record whether it is there, taken or made.

    Args:
        settings: What is asked for.
        recipe: What it comes to.
        work: All records.
        known: Documents that are committed.
        others: Caches to take from.
        refused: Records that the tokenizer refused before, by content hash.
    """
    todo = todo_of(work, known, refused)
    taken = find_taken(others, work.content, todo)
    ready, fresh = np.flatnonzero(todo & taken.there), todo & ~taken.there
    all_refused = (*work.refused, *refused_rows(work, refused))
    samples = len(work.content) + len(work.refused)
    plan = token_plan(settings, recipe, samples=samples, refused=all_refused, notes=work.notes)
    reused = int((known.find(work.content[first_of_each(work.content)]) >= 0).sum())
    plan = replace(plan, reused=reused, sources=len(work.sources))
    plan = with_work(
        plan,
        int(fresh.sum()),
        int(work.size[fresh].sum(dtype=np.int64)),
        settings.workers,
        taken=len(ready),
        tokens=taken.length(ready),
    )
    return Divided(plan=plan, todo=todo, taken=taken)


def refused_elsewhere(others: Sequence[OtherCache], known: Known) -> dict[bytes, Refusal]:
    """Records that the same tokenizer refused for another cache, and that no cache has a document of.

    Args:
        others: Those caches.
        known: Documents that are committed in the cache that is built.
    """
    refused = {content: refusal for other in others for content, refusal in other.refused.items()}
    if not refused:
        return {}
    contents = np.frombuffer(b"".join(refused), dtype=np.uint8).reshape(len(refused), -1)
    there = np.zeros(len(refused), dtype=np.bool_)
    for one in (known, *(other.known for other in others)):
        there |= one.find(contents) >= 0
    kept = {item for item, has in zip(as_items(contents).tolist(), there.tolist(), strict=True) if not has}
    return {content: refusal for content, refusal in refused.items() if content.rstrip(b"\0") in kept}
