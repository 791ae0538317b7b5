"""Checks of where entries come from: is every file still the one that was encoded, and is every file encoded?

A file whose stat memo holds is not opened; any other is hashed again, so a change is found also where size and
modification time were put back. Memory: what is odd, and else a part of the folder and of the columns at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, UnusableSampleError
from latentcache.identity.stat import RACY_NS
from latentcache.sources.reading import read_source
from latentcache.sources.resolve import Listing
from latentcache.sources.sample import Refusal, SampleColumns, Scan, unpack_identity
from latentcache.store.generation import Generation, unpack_memo
from latentcache.verify.abreast import Stretch, abreast
from latentcache.verify.files import UNREADABLE, FileCheck, Question, SamePixels, removed, unusable_now
from latentcache.verify.findings import Finding, worst
from latentcache.verify.placements import Placements
from latentcache.verify.selection import Deadline

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
    found: Scan | Listing,
    *,
    full: bool,
    chosen: NDArray[np.bool_] | None = None,
    deadline: Deadline | None = None,
    same_pixels: SamePixels | None = None,
) -> SourcesChecked:
    """Compare a generation with its data folder as it is now.

    Args:
        generation: What was built.
        found: What is there.
        full: Hash every file, whatever its stat says.
        chosen: (S,) which samples to look at; all where it is not given.
        deadline: When to stop reading files.
        same_pixels: Tells a metadata edit from a change.
    """
    names, placements = generation.samples.names, Placements(generation)
    check = FileCheck(root=found.root, deadline=deadline or Deadline(None))
    if same_pixels is not None:
        check.pixels_of = lambda number, data: same_pixels(
            data, generation.recipe, placements.size(number), placements.placed(number)
        )
    met = _Met()
    answers = check.ask(_doubtful(generation, found, chosen, met, full=full))
    gone = set(met.absent)
    moved = ((number, finding) for number, finding in placements.moved(chosen) if number not in gone)
    own = {number: [answer] for number, answer in answers.items()}
    for number, finding in chain(met.captions, moved):
        own.setdefault(number, []).append(finding)
    by_sample = {number: decided for number, several in own.items() if (decided := worst(several)) is not None}
    refused, notes = ((), ()) if met.empty else (found.refused, found.notes)
    said = {item.name: item for item in (*notes, *refused)}
    by_sample |= {
        number: _absent(name, said) for number, name in zip(met.absent, names.take(met.absent), strict=True)
    }
    others = _others(generation, refused, notes, met.new, check, full=full)
    unasked = [number for number in check.unasked if number >= 0]
    return SourcesChecked(by_sample=by_sample, others=others, unasked=unasked, stats=met.stats, hashed=check.hashed)


@dataclass(slots=True)
class _Met:
    """What came up while samples and files were gone through together, beside files to be read."""

    stats: int = 0
    """Samples whose file is there."""
    captions: list[tuple[int, Finding]] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    new: dict[str, NDArray[np.uint64]] = field(default_factory=dict)
    """Files that are no samples, with their stats (5,)."""
    empty: bool = False


def _doubtful(
    generation: Generation, found: Scan | Listing, chosen: NDArray[np.bool_] | None, met: _Met, *, full: bool
) -> Iterator[Question]:
    """The files whose stat does not prove that they are as they were; all else goes into ``met``."""
    samples = generation.samples
    for stretch in abreast(samples.names, _parts(found, met)):
        files, part, place = stretch.found, stretch.samples, stretch.place
        met.new |= {files.names[i]: files.stats[i].copy() for i in stretch.fresh}
        wanted = np.ones(len(place), dtype=np.bool_) if chosen is None else chosen[part]
        met.absent += (np.flatnonzero(wanted & (place < 0)) + part.start).tolist()
        own = np.flatnonzero(wanted & (place >= 0))
        met.stats += len(own)
        if not len(own):
            continue
        met.captions += _captions(generation, stretch, own)
        stat = samples.stat[part][own]
        if not full:
            same = (stat[:, :5] == files.stats[place[own]]).all(axis=1)
            doubtful = ~same | _racy(stat)
            own, stat = own[doubtful], stat[doubtful]
        contents = samples.content[part][own] if len(own) else stat
        for i, memo, content in zip(own.tolist(), stat.tolist(), contents, strict=True):
            name = files.names[place[i]]
            yield Question(name=name, memo=unpack_memo(memo), content=content.tobytes(), number=part.start + i)


def _parts(found: Scan | Listing, met: _Met) -> Iterator[SampleColumns]:
    """The files; a folder in which nothing is a picture is one without samples, not an error."""
    try:
        yield from found.parts()
    except EmptySourceError:
        met.empty = True


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


def _captions(generation: Generation, stretch: Stretch, own: NDArray[np.intp]) -> Iterator[tuple[int, Finding]]:
    """Samples ``own`` of a stretch whose caption is another one now."""
    recorded, now = generation.samples.captions, stretch.found.captions
    if not len(recorded.data) and not any(now):
        return
    first = stretch.samples.start
    for i, j, old in zip(own.tolist(), stretch.place[own].tolist(), recorded.take(own + first), strict=True):
        if old != now[j]:
            yield first + i, _caption(stretch.found.names[j], old, now[j])


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
    refused_now: Sequence[Refusal],
    notes: Sequence[Refusal],
    new: Mapping[str, NDArray[np.uint64]],
    check: FileCheck,
    *,
    full: bool,
) -> list[Finding]:
    """Files that are no sample of the generation: refused then, refused now, or new."""
    refused = {str(item["name"]): item for item in generation.refused}
    asked_for = {*refused, *(item.name for item in refused_now)}
    names = {name for name in generation.samples.names if name in asked_for} if asked_for else set[str]()
    recorded = {name: item for name, item in refused.items() if name not in names}
    asked = [_question(item, -1 - i) for i, item in enumerate(recorded.values()) if item["name"] in new]
    doubtful = [q for q in asked if q.content and (full or not _proven(q, new[q.name]))]
    answers = check.ask(doubtful)
    changed = {question.name: answers.get(question.number) for question in doubtful}
    findings = [_quarantined(item) for item in refused_now if item.name not in names]
    still, noted = {item.name for item in refused_now}, {note.name: note for note in notes}
    for name, item in recorded.items():
        if name in new:
            findings.append(_refused_then(item, changed.get(name), name, check.root))
        elif name not in still:
            findings.append(_absent(name, noted))
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
