"""From what is to be tokenised to committed blocks: the marker, the word to followers, the fast path, the run.

Decides nothing about content: the documents of a build that is followed (``--stream``) are those that ``assemble``
will publish if the tokenizer refuses none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from latentcache.encoders.fastcheck import with_fast_path
from latentcache.encoders.tokenising import TokeniserDescription
from latentcache.failpoint import failpoint
from latentcache.pipeline.announcing import Announcer
from latentcache.pipeline.token_assemble import provenance_facts, source_facts
from latentcache.pipeline.token_inputs import token_marker
from latentcache.pipeline.token_report import TokenPlan
from latentcache.pipeline.token_run import TokenRun
from latentcache.pipeline.token_survey import TokenSurvey, todo_records
from latentcache.pipeline.token_taking import Taken, in_order
from latentcache.sources.records import Record, RecordScan
from latentcache.store.documents import as_items
from latentcache.store.durable import write_json, writing
from latentcache.store.token_coming import TokenAnnouncement, announce_tokens

#: Text for which the fast engine is tried: the trial costs 2 s of processor time, which 6 MB of text save again.
FAST_CHARACTERS = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenWork:
    """What a build has to tokenise."""

    scan: RecordScan
    survey: TokenSurvey
    todo: NDArray[np.bool_]
    """(N,) whether a record's document is not in the cache yet."""
    taken: Taken
    """Which of those documents other caches have."""
    before: int
    """Generation that is current, 0 without one."""


def make_documents(work: TokenWork, plan: TokenPlan, run: TokenRun) -> TokeniserDescription:
    """Tokenise and commit what is to do.

    Args:
        work: What that is.
        plan: Of the build.
        run: What does it; its ``refused`` are records that the tokenizer refused before, and is filled.

    Returns:
        The description that was followed, with what was found on the fast path.

    Raises:
        InterruptedBuildError: Asked to stop; what was acknowledged is committed.
        SourceError: A file is not what it was a moment ago.
        StoreError: The disk is full or fails.
        WorkerError: A process that tokenised died.
    """
    write_json(run.layout.building, token_marker(run.description.recipe, run.settings, plan.samples))
    with writing(run.layout.building):
        failpoint("plan-written")
    fresh, ready = work.todo & ~work.taken.there, np.flatnonzero(work.todo & work.taken.there)
    taken = work.taken.documents(work.survey.content, ready)
    with Announcer() as followers:
        if run.settings.stream:
            coming = token_announcement(work, run)
            followers.begin(announce_tokens(run.layout, coming), numbers_of(coming.content))
        if plan.characters >= FAST_CHARACTERS:
            try_fast_path(run, todo_records(work.scan, work.survey, fresh))
        run.told = followers.refused
        run(
            todo_records(work.scan, work.survey, fresh),
            plan.workers,
            lambda made: in_order(made, taken, np.flatnonzero(fresh), ready),
        )
    return run.description


def try_fast_path(run: TokenRun, first: Iterable[Record]) -> None:
    """Turn the fast engine on where it is right, and say why where it is not: nothing else explains a slow build.

    Args:
        run: Its description is replaced by the one that was found.
        first: The first records to tokenise.
    """
    tried = with_fast_path(run.description, first)
    if not tried.fast:
        for note in tried.notes[len(run.description.notes) :]:
            run.warned(note)
    run.description = tried


def token_announcement(work: TokenWork, run: TokenRun) -> TokenAnnouncement:
    """What a build will hold, as far as it is known before a record is tokenised."""
    survey, refused = work.survey, run.refused
    kept = np.array([content.tobytes() not in refused for content in survey.content], dtype=np.bool_)
    return TokenAnnouncement(
        recipe=run.description.recipe,
        content=survey.content[kept],
        source=survey.source[kept],
        line=survey.line[kept],
        sources=tuple(source.name for source in survey.sources),
        facts={
            "source": source_facts(run.settings),
            "provenance": provenance_facts(run.description, run.settings),
        },
        before=work.before,
    )


def numbers_of(content: NDArray[np.uint8]) -> Callable[[bytes], Sequence[int]]:
    """From the content of a record to the numbers of its documents.

    Args:
        content: (N, 16) content hashes, as they were announced.
    """
    items = as_items(content)
    order = np.argsort(items, kind="stable")
    ordered = items[order]

    def numbers(wanted: bytes) -> Sequence[int]:
        one = as_items(np.frombuffer(wanted, dtype=np.uint8)[None])[0]
        first, last = (int(np.searchsorted(ordered, one, side=side)) for side in ("left", "right"))
        found: list[int] = order[first:last].tolist()
        return found

    return numbers
