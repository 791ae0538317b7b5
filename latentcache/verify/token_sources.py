"""Checks of where documents come from: is every record still there, and is every record in the cache?

Decides by content: a record that only moved to another line is the same record. A file is opened where it may have
changed, or a document of it is to be read; where size and times prove it unchanged, its records are believed. A check
that is ended in time has looked at the documents whose record it has met. What the tokenizer makes of a record is
compared, exactly, only for records that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import StoreError
from latentcache.sources.records import Record, RecordScan
from latentcache.store.documents import as_items
from latentcache.store.token_generation import TokenGeneration
from latentcache.store.token_reader import TokenReader
from latentcache.store.unchanged import unchanged_sources
from latentcache.verify.entries import Checked
from latentcache.verify.findings import Finding
from latentcache.verify.selection import Deadline

#: Gives ids (n,) and runs (r, 2) of each record as the tokenizer makes them now; None for one that it refuses.
Retokenise = Callable[[Sequence[Record]], list[tuple[NDArray[np.integer], NDArray[np.uint32]] | None]]
#: Documents tokenised before the clock is looked at.
_CHUNK = 256


@dataclass(slots=True, kw_only=True)
class RecordsChecked:
    """What a look at the records came to."""

    by_document: dict[int, Finding] = field(default_factory=dict)
    others: list[Finding] = field(default_factory=list)
    """Records that are no documents of the generation."""
    unasked: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, dtype=np.intp))
    """Documents whose record had not been met when the time was over."""
    records: int = 0
    """Read and hashed."""
    kept: list[Record] = field(default_factory=list)
    """The records that were wanted, as far as they were met."""


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass over the records."""

    met: set[bytes]
    """Content hashes, as numpy spells them."""
    places: dict[tuple[str, int], bytes] = field(default_factory=dict)
    """Records that no document was made of, by file and line."""
    unread: Mapping[str, int]
    """Name -> position in the generation's sources, of files that are believed."""
    cut: bool = False
    """Whether the time was over before the last record."""


def check_records(
    generation: TokenGeneration,
    scan: RecordScan,
    *,
    chosen: NDArray[np.bool_] | None = None,
    wanted: NDArray[np.intp] | None = None,
    deadline: Deadline | None = None,
    reread: NDArray[np.intp] | None = None,
) -> RecordsChecked:
    """Compare a generation with its data as it is now.

    Args:
        generation: Whose documents are checked.
        scan: The data.
        chosen: (D,) which documents to look for; all where it is not given.
        wanted: Documents whose records are kept for tokenising.
        deadline: When to stop reading.
        reread: Documents whose files are read though their stats prove them unchanged; of all files, also of those
            without a document, where it is not given.

    Raises:
        SourceError: A file cannot be read.
    """
    documents = generation.documents
    chosen = np.ones(len(documents), dtype=np.bool_) if chosen is None else chosen
    unread = _unread(generation, scan, reread)
    checked, seen = RecordsChecked(), _Pass(met=_believed(generation, unread), unread=unread)
    stored = set(as_items(documents.content).tolist())
    keep = set() if wanted is None else set(as_items(documents.content[wanted]).tolist())
    scan = scan.but(unread)
    for record in scan:
        if deadline is not None and deadline.over:
            seen.cut = True
            break
        checked.records += 1
        content = record.content.rstrip(b"\0")  # as numpy spells it
        if content in keep:
            keep.remove(content)
            checked.kept.append(record)
        seen.met.add(content)
        if content not in stored:
            seen.places[record.source, record.line] = record.content
    _compare(generation, seen, chosen, checked)
    _refused(generation, scan, seen, checked)
    _touched(generation, scan, chosen, checked)
    return checked


def _unread(generation: TokenGeneration, scan: RecordScan, reread: NDArray[np.intp] | None) -> dict[str, int]:
    """Name -> position in the generation's sources, of files that need not be read."""
    if reread is None:
        return {}
    needed = set(np.unique(generation.documents.source[reread]).tolist())
    unchanged = unchanged_sources(generation, scan.stats())
    return {name: number for name, number in unchanged.items() if number not in needed}


def _believed(generation: TokenGeneration, unread: Mapping[str, int]) -> set[bytes]:
    """Contents of the records of files that are not read, also of refused ones, as numpy spells them."""
    documents = generation.documents
    own = documents.content[np.isin(documents.source, list(unread.values()))]
    refused = (bytes.fromhex(str(one.get("content", ""))) for one in generation.refused if one["name"] in unread)
    return {*as_items(own).tolist(), *(content.rstrip(b"\0") for content in refused if content)}


def recorded_refusals(generation: TokenGeneration) -> list[Finding]:
    """What the build refused, where nothing changed since."""
    return [_as_quarantined(one) for one in generation.refused]


def compare_tokens(
    reader: TokenReader,
    documents: Sequence[int],
    records: Sequence[Record],
    retokenise: Retokenise,
    checked: Checked,
    deadline: Deadline | None = None,
) -> int:
    """Notes documents of which the tokenizer makes other ids or runs now; gives how many it compared.

    Args:
        reader: The stored documents.
        documents: Those that were asked for.
        records: Their records, as far as they are there.
        retokenise: The tokenizer.
        checked: Where drift is noted, and damage that is met on the way.
        deadline: When to stop.
    """
    by_content = {record.content: record for record in records}
    contents = [reader.documents.content[number].tobytes() for number in documents]
    there = [(number, by_content[one]) for number, one in zip(documents, contents, strict=True) if one in by_content]
    compared = 0
    for start in range(0, len(there), _CHUNK):
        if deadline is not None and deadline.over:
            break
        part = there[start : start + _CHUNK]
        results = retokenise([record for _, record in part])
        for (number, _), result in zip(part, results, strict=True):
            if number not in checked.damage:
                compared += _compare_one(reader, number, result, checked)
    return compared


def _compare_one(
    reader: TokenReader,
    number: int,
    result: tuple[NDArray[np.integer], NDArray[np.uint32]] | None,
    checked: Checked,
) -> bool:
    """Compare one document; False where its block turns out to be damaged."""
    block = int(reader.documents.block[number])
    try:
        why = _difference(reader, number, result)
    except StoreError as error:
        checked.add(reader.generation, block, "corrupt", "payload", found=error.why or error.what)
        return False
    if why:
        path, (expected, found) = reader.documents.where(number), why
        parts = {"expected": expected, "found": found, "hint": _DRIFT}
        checked.damage[number].append(Finding(category="drift", reason="tokens", path=path, **parts))
    return True


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


def _compare(generation: TokenGeneration, seen: _Pass, chosen: NDArray[np.bool_], checked: RecordsChecked) -> None:
    """Documents whose record is gone or another one, and records without a document."""
    documents = generation.documents
    met = np.array(sorted(seen.met), dtype="S16")
    unmet = ~np.isin(as_items(documents.content), met) if len(met) else np.ones(len(documents), dtype=np.bool_)
    unasked = []
    for number in np.flatnonzero(unmet).tolist():
        name = documents.sources[int(documents.source[number])]
        now = seen.places.pop((name, int(documents.line[number])), None)
        if not chosen[number]:
            continue
        if now is None and seen.cut:
            unasked.append(number)
            continue
        reason = "source-removed" if now is None else "source-changed"
        sides = {"expected": documents.content[number].tobytes().hex()[:8]}
        sides["found"] = "no such record" if now is None else now.hex()[:8]
        checked.by_document[number] = Finding(category="stale", reason=reason, path=documents.where(number), **sides)
    checked.unasked = np.array(unasked, dtype=np.intp)
    refused = {bytes.fromhex(str(one["content"])) for one in generation.refused if one.get("content")}
    for (name, line), content in seen.places.items():
        if content not in refused:
            checked.others.append(Finding(category="missing", reason="not-built", path=f"{name}:{line}"))


def _refused(generation: TokenGeneration, scan: RecordScan, seen: _Pass, checked: RecordsChecked) -> None:
    """What is refused now, by the reading of the data or by the tokenizer as before.

    Of what was not read, what the build refused counts as refused still.
    """
    # Not by their paths: a line is a record of each data set that names its file, and each may be refused.
    found = []
    for refusal in scan.refused:
        path = f"{refusal.name}:{refusal.line}" if refusal.line else refusal.name
        parts = {"field": refusal.field, "found": refusal.detail, "hint": refusal.hint}
        found.append(Finding(category="quarantined", reason=refusal.cause, path=path, **parts))
    paths = {finding.path for finding in found}
    for one in generation.refused:
        content = bytes.fromhex(str(one.get("content", "")))
        met = content and content.rstrip(b"\0") in seen.met
        finding = _as_quarantined(one)
        if met or one["name"] in seen.unread or (seen.cut and finding.path not in paths):
            found.append(finding)
    checked.others += found


def _as_quarantined(refusal: Mapping[str, Any]) -> Finding:
    """A refusal as a generation keeps it, as a finding."""
    line = refusal.get("line")
    path = f"{refusal['name']}:{line}" if line else str(refusal["name"])
    field_name, detail, hint = (str(refusal.get(name, "")) for name in ("field", "detail", "hint"))
    parts = {"field": field_name, "found": detail, "hint": hint}
    return Finding(category="quarantined", reason=str(refusal["cause"]), path=path, **parts)


def _touched(
    generation: TokenGeneration, scan: RecordScan, chosen: NDArray[np.bool_], checked: RecordsChecked
) -> None:
    """Documents of files that were written or moved, and whose bytes are the same."""
    now = {source.name: source for source in scan.sources}
    documents = generation.documents
    for number, name in enumerate(documents.sources):
        found = now.get(name)
        same = found is not None and found.content == generation.sources.content[number].tobytes()
        if found is None or not same or generation.sources.memo(number).same_stat(found.stat):
            continue
        for document in np.flatnonzero(chosen & (documents.source == number)).tolist():
            finding = Finding(category="touched", reason="stat", path=documents.where(document))
            checked.by_document.setdefault(document, finding)
