"""Checks of where entries come from: is every file still the one that was encoded, and is every file encoded?

A file whose stat memo holds is not opened; any other is hashed again, so a change is found also where size and
modification time were put back. Contents decide, never times: a file that was only touched is not stale.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import UnusableSampleError
from latentcache.geometry.buckets import BucketTable
from latentcache.geometry.placement import place, refusal
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.reading import hint_for, read_source
from latentcache.sources.sample import Refusal, Sample, Scan
from latentcache.store.generation import Generation, unpack_memo
from latentcache.verify.findings import Finding, worst

_THREADS = 4
#: Causes of a refusal that mean "could not be looked at" rather than "is not usable".
_UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
#: Causes that mean that the file went away.
_GONE = frozenset({"not-found", "vanished"})
#: First word of the cause of an old refusal -> what the file is, now that the cause is gone.
_WORTH_A_TRY = {
    "caption": ("stale", "caption-changed"),
    "empty": ("stale", "source-changed"),
    "changing": ("stale", "source-changed"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    """One file to be compared with what was recorded of it."""

    name: str
    memo: StatMemo | None
    content: bytes
    now: StatMemo


def check_sources(generation: Generation, scan: Scan, *, full: bool) -> tuple[dict[int, Finding], list[Finding]]:
    """Compare a generation with its data folder as it is now.

    Args:
        generation: What was built.
        scan: What is there.
        full: Hash every file, whatever its stat says.

    Returns:
        Findings by sample number of the generation, and those for files that are not samples of it.
    """
    present = {sample.name: sample for sample in scan.samples}
    said = {item.name: item for item in (*scan.notes, *scan.refused)}
    contents = _compare(generation, present, scan.root, full=full)
    tables = generation.recipe.geometry.tables()
    buckets = _buckets_of(generation)
    findings: dict[int, Finding] = {}
    for number, name in enumerate(generation.samples.names):
        sample = present.get(name)
        if sample is None:
            findings[number] = _absent(name, said)
            continue
        own = (
            contents.get(name),
            _caption(generation, number, sample),
            _geometry(generation, number, tables, buckets),
        )
        found = worst([finding for finding in own if finding is not None])
        if found is not None:
            findings[number] = found
    return findings, _others(generation, scan, present, full=full)


def _compare(generation: Generation, present: Mapping[str, Sample], root: Path, *, full: bool) -> dict[str, Finding]:
    """What the bytes of each file say: stale, touched, unverifiable, or nothing where they are as recorded."""
    samples = generation.samples
    stats, contents = samples.stat.tolist(), samples.content.tobytes()
    questions = []
    for number, name in enumerate(samples.names):
        if name in present:
            content = contents[16 * number : 16 * number + 16]
            now = present[name].stat
            questions.append(_Question(name=name, memo=unpack_memo(stats[number]), content=content, now=now))
    return _ask(questions, root, full=full)


def _ask(questions: Sequence[_Question], root: Path, *, full: bool) -> dict[str, Finding]:
    doubtful = [q for q in questions if full or q.memo is None or not q.memo.trusts(q.now)]
    pool = ThreadPoolExecutor(_THREADS)
    try:
        answers = pool.map(lambda question: _answer(question, root), doubtful)
        return {q.name: answer for q, answer in zip(doubtful, answers, strict=True) if answer is not None}
    finally:
        pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for


def _answer(question: _Question, root: Path) -> Finding | None:
    """Hash one file again."""
    try:
        data, memo = read_source(root / question.name)
    except UnusableSampleError as error:
        return _unusable(question.name, error.slug, error.what)
    found = content_hash(data)
    if found != question.content:
        return Finding(
            category="stale",
            reason="source-changed",
            path=question.name,
            expected=question.content.hex(),
            found=found.hex(),
        )
    if question.memo is None or question.memo.same_stat(memo):
        return None
    return Finding(category="touched", reason="stat-changed", path=question.name)


def _absent(name: str, said: Mapping[str, Refusal]) -> Finding:
    """A sample of the generation that is no usable sample now; ``said`` is what the scan says of names."""
    above = (name[: end + 1] for end, letter in enumerate(name) if letter == "/")
    now = next((said[place] for place in (name, *above) if place in said), None)
    if now is None:
        return _removed(name, "no such file")
    if now.name != name and now.cause not in _UNREADABLE:  # its folder is passed over as a whole
        return _removed(name, f"{now.name}: {now.cause}, {now.detail}")
    if now.cause in ("unlisted", "hidden"):
        return _removed(name, now.detail)
    return _unusable(name, now.cause, now.detail)


def _removed(name: str, found: str) -> Finding:
    return Finding(category="stale", reason="source-removed", path=name, expected="the file", found=found)


def _unusable(name: str, cause: str, detail: str) -> Finding:
    """A file of the generation that cannot be read, or not be used, as it is now."""
    if cause in _UNREADABLE:
        return Finding(category="unverifiable", reason=cause, path=name, found=detail, hint=hint_for(cause))
    if cause in _GONE:
        return _removed(name, detail)
    reason = "caption-changed" if cause.startswith("caption") else "source-changed"
    return Finding(category="stale", reason=reason, path=name, found=f"{cause}: {detail}", hint=hint_for(cause))


def _caption(generation: Generation, number: int, sample: Sample) -> Finding | None:
    recorded = generation.samples.captions[number]
    if recorded == sample.caption:
        return None
    return Finding(
        category="stale",
        reason="caption-changed",
        path=sample.name,
        expected=_short(recorded) or "(no caption)",
        found=_short(sample.caption) or "(no caption)",
        hint="latents are not touched by this: a build only records the new caption",
    )


def _geometry(
    generation: Generation, number: int, tables: Sequence[BucketTable], buckets: Mapping[int, set[Size]]
) -> Finding | None:
    """Whether today's rule puts the picture where it was put."""
    size = Size(*generation.samples.original_size[number].tolist())
    expected = {place(size, table).bucket for table in tables if not refusal(size, table)}
    found = buckets.get(number, set())
    if expected == found:
        return None
    if found < expected and not generation.complete:  # a repair took them out
        lost = " ".join(sorted(map(str, expected - found)))
        name = generation.samples.names[number]
        return Finding(category="missing", reason="entry-lost", path=name, expected=lost, found="it was removed")
    return Finding(
        category="stale",
        reason="geometry-changed",
        path=generation.samples.names[number],
        expected=" ".join(sorted(map(str, expected))),
        found=" ".join(sorted(map(str, found))),
    )


def _buckets_of(generation: Generation) -> dict[int, set[Size]]:
    found: dict[int, set[Size]] = {}
    pairs = zip(generation.rows.sample.tolist(), generation.rows.bucket.tolist(), strict=True)
    for sample, bucket in pairs:
        found.setdefault(sample, set()).add(generation.buckets[bucket])
    return found


def _others(generation: Generation, scan: Scan, present: Mapping[str, Sample], *, full: bool) -> list[Finding]:
    """Files that are no sample of the generation: refused then, refused now, or new."""
    names = set(generation.samples.names)
    recorded = {str(item["name"]): item for item in generation.refused if item["name"] not in names}
    questions = [_question(item, present[name]) for name, item in recorded.items() if name in present]
    changed = _ask([q for q in questions if q.content], scan.root, full=full)
    findings = [_quarantined(item) for item in scan.refused if item.name not in names]
    refused_now = {item.name for item in scan.refused}
    for name, item in recorded.items():
        if name in present:
            findings.append(_refused_then(item, changed.get(name), present[name], scan.root))
        elif name not in refused_now:
            findings.append(_absent(name, {note.name: note for note in scan.notes}))
    new = (name for name in present if name not in names and name not in recorded)
    findings += [Finding(category="missing", reason="not-built", path=name) for name in new]
    return findings


def _refused_then(item: Mapping[str, Any], answer: Finding | None, sample: Sample, root: Path) -> Finding:
    """A file that the build refused and that the scan takes now: only other bytes or words make it worth a try."""
    if answer is not None and answer.category == "stale":
        return answer
    cause = str(item["cause"])
    if item.get("content") or not (cause.startswith("caption") or _readable(root / sample.name)):
        return _recorded(item)
    category, reason = _WORTH_A_TRY.get(cause.partition("-")[0], ("missing", "not-built"))
    return Finding(
        category=category, reason=reason, path=sample.name, found=f"refused as {cause}; it can be read now"
    )


def _readable(path: Path) -> bool:
    try:
        read_source(path)
    except UnusableSampleError:
        return False
    return True


def _question(item: Mapping[str, Any], sample: Sample) -> _Question:
    memo = unpack_memo(item["stat"]) if item.get("stat") else None
    return _Question(name=sample.name, memo=memo, content=bytes.fromhex(item.get("content", "")), now=sample.stat)


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
