"""Checks of where entries come from: is every file still the one that was encoded, and is every file encoded?

A file whose stat memo holds is not opened; any other is hashed again, so a change is found also where size and
modification time were put back. Cost: columns of numbers, and one text for each name; objects only for what is odd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, UnusableSampleError
from latentcache.identity.stat import RACY_NS
from latentcache.sources.reading import read_source
from latentcache.sources.resolve import scan
from latentcache.sources.sample import Refusal, SampleColumns, Scan, unpack_identity
from latentcache.store.columns import StringColumn
from latentcache.store.generation import Generation, unpack_memo
from latentcache.verify.files import UNREADABLE, FileCheck, Question, SamePixels, removed, unusable_now
from latentcache.verify.findings import Finding, worst
from latentcache.verify.placements import Placements
from latentcache.verify.selection import Deadline

#: Samples that are objects at a time.
_SLICE = 1 << 14
#: First word of the cause of an old refusal -> what the file is, now that the cause is gone.
_WORTH_A_TRY = {
    "caption": ("stale", "caption-changed"),
    "empty": ("stale", "source-changed"),
    "changing": ("stale", "source-changed"),
}


@dataclass(slots=True, kw_only=True)
class SourcesChecked:
    """What a look at the sources came to."""

    by_sample: dict[int, Finding]
    others: list[Finding] = field(default_factory=list)
    """On files that are no samples of the generation."""
    unasked: list[int] = field(default_factory=list)
    """Samples whose file was to be read and was not, because the time was over."""
    stats: int = 0
    hashed: int = 0


def check_sources(
    generation: Generation,
    scan: Scan,
    *,
    full: bool,
    chosen: NDArray[np.bool_] | None = None,
    deadline: Deadline | None = None,
    same_pixels: SamePixels | None = None,
) -> SourcesChecked:
    """Compare a generation with its data folder as it is now.

    Args:
        generation: What was built.
        scan: What is there.
        full: Hash every file, whatever its stat says.
        chosen: (S,) which samples to look at; all where it is not given.
        deadline: When to stop reading files.
        same_pixels: Tells a metadata edit from a change.
    """
    columns, names = SampleColumns.of(scan.samples), generation.samples.names
    place, placements = _places(names, columns.names), Placements(generation)
    wanted = np.ones(len(names), dtype=np.bool_) if chosen is None else chosen
    check = FileCheck(root=scan.root, deadline=deadline or Deadline(None))
    if same_pixels is not None:
        check.pixels_of = lambda number, data: same_pixels(
            data, generation.recipe, placements.size(number), placements.placed(number)
        )
    said = {item.name: item for item in (*scan.notes, *scan.refused)}
    present = wanted & (place >= 0)
    answers = check.ask(_doubtful(generation, present, place, columns, full=full))
    found = {number: [answer] for number, answer in answers.items()}
    for number, finding in (*_captions(generation, present, place, columns), *placements.moved(present)):
        found.setdefault(number, []).append(finding)
    by_sample = {number: decided for number, own in found.items() if (decided := worst(own)) is not None}
    by_sample |= {number: _absent(names[number], said) for number in np.flatnonzero(wanted & (place < 0)).tolist()}
    others = _others(generation, scan, place, columns, check, full=full)
    unasked = [number for number in check.unasked if number >= 0]
    return SourcesChecked(
        by_sample=by_sample, others=others, unasked=unasked, stats=int(present.sum()), hashed=check.hashed
    )


def scan_now(data: Path) -> Scan:
    """The data folder as it is; an empty one is a scan without samples, not an error."""
    try:
        return scan(data)
    except EmptySourceError:
        return Scan(root=data, samples=())


def _places(names: StringColumn, found: Sequence[str]) -> NDArray[np.int32]:
    """(S,) where each sample is among those of the scan, -1 where it is not there.

    Both are in the order of names, so few are looked up: what lies between the first difference and the last.
    """
    place = np.full(len(names), -1, dtype=np.int32)
    front = _same_front(names, found)
    back = _same_back(names, found, min(len(names), len(found)) - front)
    place[:front] = np.arange(front)
    place[len(names) - back :] = np.arange(len(found) - back, len(found))
    places = {name: i for i, name in enumerate(found[front : len(found) - back], front)}
    for number in range(front, len(names) - back):
        place[number] = places.get(names[number], -1)
    return place


def _same_front(names: StringColumn, found: Sequence[str]) -> int:
    """How many names are the same from the first on."""
    shared = min(len(names), len(found))
    for start in range(0, shared, _SLICE):
        mine, theirs = (part[start : min(start + _SLICE, shared)] for part in (names, found))
        if mine != theirs:
            return start + next(i for i, pair in enumerate(zip(mine, theirs, strict=True)) if pair[0] != pair[1])
    return shared


def _same_back(names: StringColumn, found: Sequence[str], most: int) -> int:
    """How many names are the same from the last on, ``most`` at most."""
    pairs = zip(range(len(names) - 1, -1, -1), range(len(found) - 1, -1, -1), range(most), strict=False)
    return next((count for mine, theirs, count in pairs if names[mine] != found[theirs]), most)


def _doubtful(
    generation: Generation,
    present: NDArray[np.bool_],
    place: NDArray[np.int32],
    columns: SampleColumns,
    *,
    full: bool,
) -> Iterator[Question]:
    """The files whose stat does not prove that they are as they were."""
    names, contents = generation.samples.names, generation.samples.content
    for part in _slices(present):
        numbers = part
        if not full:
            stat = generation.samples.stat[part]
            same = (stat[:, :5] == columns.stats[place[part]]).all(axis=1)
            numbers = part[~same | _racy(stat)]
        for i, name in zip(numbers.tolist(), names.take(numbers), strict=True):
            memo, content = generation.samples.memo(i), contents[i].tobytes()
            yield Question(name=name, memo=memo, content=content, number=i)


def _slices(present: NDArray[np.bool_]) -> Iterator[NDArray[np.intp]]:
    """The numbers of what is there, some at a time."""
    for start in range(0, len(present), _SLICE):
        part: NDArray[np.intp] = np.flatnonzero(present[start : start + _SLICE]) + start
        yield part


def _racy(stat: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) whether each memo (n, 6) was taken when the file was too young to be trusted."""
    times = stat.view(np.int64)
    young: NDArray[np.bool_] = times[:, 5] - np.maximum(times[:, 1], times[:, 2]) < RACY_NS
    return young


def _absent(name: str, said: Mapping[str, Refusal]) -> Finding:
    """A sample of the generation that is no usable sample now; ``said`` is what the scan says of names."""
    above = (name[: end + 1] for end, letter in enumerate(name) if letter == "/")
    now = next((said[place] for place in (name, *above) if place in said), None)
    if now is None:
        return removed(name, "no such file")
    if now.name != name and now.cause not in UNREADABLE:  # its folder is passed over as a whole
        return removed(name, f"{now.name}: {now.cause}, {now.detail}")
    if now.cause in ("unlisted", "hidden"):
        return removed(name, now.detail)
    return unusable_now(name, now.cause, now.detail)


def _captions(
    generation: Generation, present: NDArray[np.bool_], place: NDArray[np.int32], columns: SampleColumns
) -> Iterator[tuple[int, Finding]]:
    """Samples whose caption is another one now."""
    recorded, now = generation.samples.captions, columns.captions
    if not len(recorded.data) and not any(now):
        return
    for part in _slices(present):
        for i, j, old in zip(part.tolist(), place[part].tolist(), recorded.take(part), strict=True):
            if old != now[j]:
                yield i, _caption(generation.samples.names[i], old, now[j])


def _caption(name: str, old: str, new: str) -> Finding:
    return Finding(
        category="stale",
        reason="caption-changed",
        path=name,
        expected=_short(old) or "(no caption)",
        found=_short(new) or "(no caption)",
        hint="latents are not touched by this: a build only records the new caption",
    )


def _others(
    generation: Generation,
    scan: Scan,
    place: NDArray[np.int32],
    columns: SampleColumns,
    check: FileCheck,
    *,
    full: bool,
) -> list[Finding]:
    """Files that are no sample of the generation: refused then, refused now, or new."""
    fresh_ones = np.ones(len(columns.names), dtype=np.bool_)
    fresh_ones[place[place >= 0]] = False
    new = {columns.names[i]: i for i in np.flatnonzero(fresh_ones).tolist()}
    refused = {str(item["name"]): item for item in generation.refused}
    asked_for = {*refused, *(item.name for item in scan.refused)}
    names = {name for name in generation.samples.names if name in asked_for} if asked_for else set[str]()
    recorded = {name: item for name, item in refused.items() if name not in names}
    asked = [_question(item, -1 - i) for i, item in enumerate(recorded.values()) if item["name"] in new]
    doubtful = [q for q in asked if q.content and (full or not _proven(q, columns.stats[new[q.name]]))]
    answers = check.ask(doubtful)
    changed = {question.name: answers.get(question.number) for question in doubtful}
    findings = [_quarantined(item) for item in scan.refused if item.name not in names]
    refused_now = {item.name for item in scan.refused}
    for name, item in recorded.items():
        if name in new:
            findings.append(_refused_then(item, changed.get(name), name, scan.root))
        elif name not in refused_now:
            findings.append(_absent(name, {note.name: note for note in scan.notes}))
    fresh = (name for name in new if name not in recorded)
    return findings + [Finding(category="missing", reason="not-built", path=name) for name in fresh]


def _proven(question: Question, now: NDArray[np.uint64]) -> bool:
    return question.memo is not None and question.memo.trusts(unpack_identity(now.tolist()))


def _refused_then(item: Mapping[str, Any], answer: Finding | None, name: str, root: Path) -> Finding:
    """A file that the build refused and that the scan takes now: only other bytes or words make it worth a try."""
    if answer is not None and answer.category == "stale":
        return answer
    cause = str(item["cause"])
    if item.get("content") or not (cause.startswith("caption") or _readable(root / name)):
        return _recorded(item)
    category, reason = _WORTH_A_TRY.get(cause.partition("-")[0], ("missing", "not-built"))
    return Finding(category=category, reason=reason, path=name, found=f"refused as {cause}; it can be read now")


def _readable(path: Path) -> bool:
    try:
        read_source(path)
    except UnusableSampleError:
        return False
    return True


def _question(item: Mapping[str, Any], number: int) -> Question:
    memo = unpack_memo(item["stat"]) if item.get("stat") else None
    content = bytes.fromhex(item.get("content", ""))
    return Question(name=str(item["name"]), memo=memo, content=content, number=number)


def _quarantined(item: Refusal) -> Finding:
    return Finding(category="quarantined", reason=item.cause, path=item.name, found=item.detail, hint=item.hint)


def _recorded(item: Mapping[str, Any]) -> Finding:
    return Finding(
        category="quarantined",
        reason=str(item["cause"]),
        path=str(item["name"]),
        found=str(item.get("detail", "")),
        hint=str(item.get("hint", "")),
    )


def _short(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
