"""What the last build knew of files that are still the same: their records need not be read again.

Guarantee: the survey with it is the one without it, but for the sizes of records, which are estimated from their
tokens and asked for only where a block is lost. Cost: one ``stat`` a file and a copy of the columns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from latentcache.identity.content import HASH_BYTES
from latentcache.pipeline.token_checks import is_chat
from latentcache.pipeline.token_survey import KEEP_CHARACTERS, TokenSurvey, as_refusals, survey_records
from latentcache.sources.records import RecordScan, RecordSource
from latentcache.sources.sample import Refusal
from latentcache.store.token_generation import TokenGeneration
from latentcache.store.unchanged import unchanged_sources

#: Characters of a token, about; for plans of what is tokenised again though its file is the same.
_CHARACTERS = 4


def survey_changed(scan: RecordScan, known: TokenGeneration | None) -> TokenSurvey:
    """The survey of all records, for which only files that may have changed are read.

    Args:
        scan: Where records come from.
        known: The last generation, where its recipe is that of the build and what it refused stands; else None.

    Raises:
        SourceError: A file cannot be read.
    """
    twice = len({file.name for file in scan.files}) < len(scan.files)  # one file may be two data sets
    unchanged = unchanged_sources(None if twice else known, scan.stats())
    work = survey_records(scan.but(unchanged), keep=0 if twice else KEEP_CHARACTERS)
    if known is None or not unchanged:
        return work
    parts = {source.name: _part(work, number) for number, source in enumerate(work.sources)}
    refused = defaultdict(list)
    for refusal in as_refusals(known.refused):
        refused[refusal.name].append(refusal)
    parts |= {name: _remembered(known, number, refused[name]) for name, number in unchanged.items()}
    names = [file.name for file in scan.files if file.name in parts]
    return _joined([parts[name] for name in dict.fromkeys(names)], work)


def is_chat_data(scan: RecordScan, known: TokenGeneration | None) -> bool:
    """Whether there are conversations in any file; what is known of unchanged files is not looked up again.

    Texts and conversations may stand side by side: the template is in the recipe once there is one conversation.
    Texts come out the same with it and without it, as they never meet the template: their ids are those of the text
    and its ends, and all of them carry loss whatever ``loss`` says. Their keys differ, as the recipe does, so the
    first conversation among texts has them tokenised once more.

    Raises:
        SourceError: A file that may have changed cannot be read.
    """
    unchanged = unchanged_sources(known, scan.stats())
    if known is None or not unchanged:
        return is_chat(scan)
    used = set(np.unique(known.documents.source).tolist())
    remembered = {name for name, number in unchanged.items() if number in used}
    if is_chat(scan.but(remembered)):
        return True
    if not known.recipe.chat_template or len(unchanged) == len(known.sources):
        return bool(known.recipe.chat_template)
    # The conversations of the last build may have been in a file that is gone or another one now.
    return is_chat(scan.but({file.name for file in scan.files} - remembered))


def _part(work: TokenSurvey, number: int) -> TokenSurvey:
    """The records of one file."""
    rows = np.flatnonzero(work.source == number)
    columns = {name: getattr(work, name)[rows] for name in ("content", "source", "line", "size")}
    return replace(work, sources=(work.sources[number],), refused=(), notes=(), **columns)


def _remembered(known: TokenGeneration, number: int, refused: Sequence[Refusal]) -> TokenSurvey:
    """The records of one file as the last build knew them; those that the tokenizer refused are records too."""
    documents, sources = known.documents, known.sources
    rows = np.flatnonzero(documents.source == number)
    again = [refusal for refusal in refused if refusal.content]
    bad = np.frombuffer(b"".join(one.content for one in again), dtype=np.uint8).reshape(-1, HASH_BYTES)
    line = np.concatenate([documents.line[rows], np.array([one.line for one in again], dtype=np.uint32)])
    order = np.argsort(line, kind="stable")
    size = np.concatenate([documents.length[rows] * _CHARACTERS, np.zeros(len(again), dtype=np.uint32)])
    by_reading = tuple(refusal for refusal in refused if not refusal.content)
    assert sources.reading is not None
    source = RecordSource(
        name=str(sources.names[number]),
        stat=sources.memo(number),
        content=sources.content[number].tobytes(),
        records=len(line),
        refused=len(by_reading),
        reading=sources.reading[number].tobytes(),
    )
    return TokenSurvey(
        content=np.concatenate([documents.content[rows], bad])[order],
        source=np.zeros(len(line), dtype=np.int32),
        line=line[order],
        size=size[order].astype(np.uint32),
        sources=(source,),
        refused=by_reading,
        notes=(),
    )


def _joined(parts: Sequence[TokenSurvey], work: TokenSurvey) -> TokenSurvey:
    """All files in their order; refusals of what was read, and of what was not."""
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ("content", "line", "size")}
    counts = [len(part.line) for part in parts]
    return TokenSurvey(
        source=np.repeat(np.arange(len(parts), dtype=np.int32), counts),
        sources=tuple(part.sources[0] for part in parts),
        refused=(*work.refused, *(refusal for part in parts for refusal in part.refused)),
        notes=work.notes,
        kept=work.kept,
        has_texts=work.has_texts,
        **columns,
    )
