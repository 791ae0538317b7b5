"""Checks of where documents come from: is every record still there, and is every record in the cache?

Decides by content: a record that only moved to another line is the same record. Where names, sizes and times of all
files prove that nothing changed, no file is opened; else only those that may have changed. What the tokenizer makes
of a record is compared, exactly, only for records that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from latentcache.sources.records import Record, RecordScan
from latentcache.store.documents import as_items
from latentcache.store.token_generation import TokenGeneration
from latentcache.store.token_reader import TokenReader
from latentcache.store.unchanged import unchanged_sources
from latentcache.verify.findings import Finding

#: Gives ids (n,) and runs (r, 2) of each record as the tokenizer makes them now; None for one that it refuses.
Retokenise = Callable[[Sequence[Record]], list[tuple[NDArray[np.integer], NDArray[np.uint32]] | None]]


@dataclass(slots=True, kw_only=True)
class RecordsChecked:
    """What a look at the records came to."""

    by_document: dict[int, Finding] = field(default_factory=dict)
    others: list[Finding] = field(default_factory=list)
    """Records that are no documents of the generation."""
    drift: dict[int, Finding] = field(default_factory=dict)
    records: int = 0
    """Read and hashed."""
    retokenised: int = 0


def check_records(
    generation: TokenGeneration, scan: RecordScan, wanted: NDArray[np.intp], *, full: bool = True
) -> tuple[RecordsChecked, list[Record]]:
    """Compare a generation with its data as it is now.

    Args:
        generation: Whose documents are checked.
        scan: The data.
        wanted: Documents whose records are kept for tokenising.
        full: Read every file; else those whose stats prove them unchanged are believed, but for ``wanted``.

    Returns:
        The findings, and the records of ``wanted`` as far as they are there.

    Raises:
        SourceError: A file cannot be read.
    """
    checked = RecordsChecked()
    documents = generation.documents
    stored = set(as_items(documents.content).tolist())
    refused = {bytes.fromhex(str(one["content"])) for one in generation.refused if one.get("content")}
    keep = set(as_items(documents.content[wanted]).tolist())
    unread = {} if full else unchanged_sources(generation, scan.stats())
    needed = set(documents.source[wanted].tolist())
    unread = {name: number for name, number in unread.items() if number not in needed}
    met = _believed(generation, unread)
    places: dict[tuple[str, int], bytes] = {}
    kept: dict[bytes, Record] = {}
    scan = scan.but(unread)
    for record in scan:
        checked.records += 1
        content = record.content.rstrip(b"\0")  # as numpy spells it
        met.add(content)
        if content in keep:
            kept.setdefault(content, record)
        if content not in stored:
            places[record.source, record.line] = record.content
    _compare(generation, met, places, refused, checked)
    _refused(generation, scan, met, checked)
    believed = [one for one in generation.refused if one["name"] in unread and not one.get("content")]
    checked.others += [as_quarantined(one) for one in believed]
    _touched(generation, scan, checked)
    return checked, list(kept.values())


def _believed(generation: TokenGeneration, unread: Mapping[str, int]) -> set[bytes]:
    """Contents of the records of files that are not read, also of refused ones, as numpy spells them."""
    documents = generation.documents
    own = documents.content[np.isin(documents.source, list(unread.values()))]
    refused = (bytes.fromhex(str(one.get("content", ""))) for one in generation.refused if one["name"] in unread)
    return {*as_items(own).tolist(), *(content.rstrip(b"\0") for content in refused if content)}


def compare_tokens(
    reader: TokenReader, documents: NDArray[np.intp], records: Sequence[Record], retokenise: Retokenise
) -> dict[int, Finding]:
    """Documents of which the tokenizer makes other ids or runs now.

    Args:
        reader: The stored documents.
        documents: Those that were asked for.
        records: Their records.
        retokenise: The tokenizer.
    """
    by_content = {record.content: record for record in records}
    contents = [reader.documents.content[number].tobytes() for number in documents.tolist()]
    pairs = zip(documents.tolist(), contents, strict=True)
    there = [(number, by_content[one]) for number, one in pairs if one in by_content]
    results = retokenise([record for _, record in there])
    findings = {}
    for (number, _), result in zip(there, results, strict=True):
        why = _difference(reader, number, result)
        if why:
            path, (expected, found) = reader.documents.where(number), why
            findings[number] = Finding(
                category="drift", reason="tokens", path=path, expected=expected, found=found, hint=_DRIFT
            )
    return findings


_DRIFT = "the tokenizer library, or our code, makes other tokens of this record now than it did when it was stored"


def _difference(
    reader: TokenReader, number: int, result: tuple[NDArray[np.integer], NDArray[np.uint32]] | None
) -> tuple[str, str] | None:
    """What is stored and what is made now, where they differ."""
    stored, runs = reader.ids(number), reader.documents.runs(number)
    if result is None:
        return f"{len(stored)} tokens", "the tokenizer refuses it"
    ids, new_runs = result
    if not np.array_equal(ids, stored):
        length = min(len(ids), len(stored))
        differing = np.flatnonzero(ids[:length] != stored[:length])
        at = int(differing[0]) if len(differing) else length
        mine, theirs = stored[at : at + 3].tolist(), ids[at : at + 3].tolist()
        return f"{len(stored)} tokens, from {at}: {mine}", f"{len(ids)} tokens, from {at}: {theirs}"
    if not np.array_equal(new_runs, runs):
        return f"loss on {runs.tolist()}", f"loss on {new_runs.tolist()}"
    return None


def _compare(
    generation: TokenGeneration,
    met: set[bytes],
    places: dict[tuple[str, int], bytes],
    refused: set[bytes],
    checked: RecordsChecked,
) -> None:
    """Documents whose record is gone or another one, and records without a document."""
    documents = generation.documents
    known = (
        np.isin(as_items(documents.content), np.array(sorted(met), dtype="S16"))
        if met
        else np.zeros(len(documents), dtype=np.bool_)
    )
    for number in np.flatnonzero(~known).tolist():
        name = documents.sources[int(documents.source[number])]
        now = places.pop((name, int(documents.line[number])), None)
        reason = "source-removed" if now is None else "source-changed"
        sides = {"expected": documents.content[number].tobytes().hex()[:8]}
        sides["found"] = "no such record" if now is None else now.hex()[:8]
        checked.by_document[number] = Finding(category="stale", reason=reason, path=documents.where(number), **sides)
    for (name, line), content in places.items():
        if content not in refused:
            checked.others.append(Finding(category="missing", reason="not-built", path=f"{name}:{line}"))


def _refused(generation: TokenGeneration, scan: RecordScan, met: set[bytes], checked: RecordsChecked) -> None:
    """What is refused now, by the reading of the data or by the tokenizer as before."""
    for refusal in scan.refused:
        path = f"{refusal.name}:{refusal.line}" if refusal.line else refusal.name
        parts = {"field": refusal.field, "found": refusal.detail, "hint": refusal.hint}
        checked.others.append(Finding(category="quarantined", reason=refusal.cause, path=path, **parts))
    for one in generation.refused:
        content = bytes.fromhex(str(one.get("content", "")))
        if content and content.rstrip(b"\0") in met:
            checked.others.append(as_quarantined(one))


def as_quarantined(refusal: object) -> Finding:
    """A refusal as a generation keeps it, as a finding."""
    assert isinstance(refusal, dict)
    line = refusal.get("line")
    path = f"{refusal['name']}:{line}" if line else str(refusal["name"])
    field_name, detail, hint = (str(refusal.get(name, "")) for name in ("field", "detail", "hint"))
    parts = {"field": field_name, "found": detail, "hint": hint}
    return Finding(category="quarantined", reason=str(refusal["cause"]), path=path, **parts)


def _touched(generation: TokenGeneration, scan: RecordScan, checked: RecordsChecked) -> None:
    """Documents of files that were written or moved, and whose bytes are the same."""
    now = {source.name: source for source in scan.sources}
    documents = generation.documents
    for number, name in enumerate(documents.sources):
        found = now.get(name)
        same = found is not None and found.content == generation.sources.content[number].tobytes()
        if found is None or not same or generation.sources.memo(number).same_stat(found.stat):
            continue
        for document in np.flatnonzero(documents.source == number).tolist():
            finding = Finding(category="touched", reason="stat", path=documents.where(document))
            checked.by_document.setdefault(document, finding)
