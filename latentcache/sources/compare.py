"""Is every sample still what a snapshot recorded, and is every sample of DATA in the snapshot?

Contents decide, never times. A file whose stat memo is trusted is not opened; any other is hashed, so a change is
found also if size and time were put back. Records are matched as a multiset: by file, line and content, then by file
and content (moved to another line), then by file and line (changed). What the snapshot rejected is matched likewise.
Cost: 1 us per sample, 0.1 ms per MB hashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.clips import focus_of
from latentcache.fields.registry import field_kind
from latentcache.fields.strings import Strings
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.archives.members import Hashed, hashed_images, places
from latentcache.sources.causes import hint_for
from latentcache.sources.images import repeats_of
from latentcache.sources.known import hash_rows, match_names, racy
from latentcache.sources.scan import Listing
from latentcache.value import Value

#: Reasons that mean "could not be looked at" rather than "is not usable".
_UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
_GONE_WORDS = "it is not there any more"
_GONE = frozenset({"not-found", "unlisted", "hidden"})


class State(IntEnum):
    """What became of a sample."""

    OK = 0
    TOUCHED = 1
    MOVED = 2
    CAPTION_CHANGED = 3
    CHANGED = 4
    REMOVED = 5
    UNREADABLE = 6
    NOT_CHECKED = 7
    REPEATS_CHANGED = 8
    FOCUS_CHANGED = 9
    INPUT_CHANGED = 10


#: State -> category and reason of contract.md, and hint; the reasons of UNREADABLE and INPUT_CHANGED are those of the
#: file.
_WORDS: Mapping[State, tuple[str, str, str]] = {
    State.OK: ("ok", "", ""),
    State.TOUCHED: ("touched", "stat-changed", ""),
    State.MOVED: ("touched", "line-changed", ""),
    State.CAPTION_CHANGED: ("stale", "caption-changed", "no entry is affected: a build only records the new caption"),
    State.CHANGED: ("stale", "source-changed", ""),
    State.REMOVED: ("stale", "source-removed", ""),
    State.UNREADABLE: ("unverifiable", "io-error", ""),
    State.NOT_CHECKED: ("", "", ""),
    State.REPEATS_CHANGED: ("stale", "repeats-changed", "no entry is affected: a build only records the new number"),
    State.FOCUS_CHANGED: ("stale", "focus-changed", "with --crop focus a build encodes the image again"),
    State.INPUT_CHANGED: ("stale", "mask-changed", "a build makes it again for this sample, and nothing else"),
}


def _value(samples: SampleTable, row: int, state: State) -> str:
    if state == State.MOVED:
        return f"line {samples.where(row)[1]}"
    if state == State.CAPTION_CHANGED:
        text = samples.inputs["caption"].text
        said = text[row] if text is not None else ""
        return (said if len(said) <= 80 else said[:79] + "…") or "(no caption)"
    if state == State.CHANGED:
        held = next(iter(samples.inputs.values()))
        content = np.asarray(held.content[row]).tobytes().hex()
        return content if held.line is None else content[: HASH_BYTES // 2]
    if state == State.REPEATS_CHANGED:
        return f"{repeats_of(samples)[row]} repeats per epoch"
    if state == State.FOCUS_CHANGED:
        return "the point {:g}, {:g}".format(*focus_of(samples)[row].tolist())
    return {State.REMOVED: "the sample", State.UNREADABLE: "a file that can be read"}.get(state, "")


class Found(Value):
    """What there is to say of one sample, file or record."""

    category: str
    reason: str
    path: str
    line: int = 0
    field: str = ""
    expected: str = ""
    found: str = ""
    hint: str = ""


@dataclass(slots=True, kw_only=True)
class Compared:
    """A snapshot's samples (S) against a listing, in columns."""

    samples: SampleTable
    now: Listing
    state: NDArray[np.uint8]
    """(S,) a ``State`` each."""
    place: NDArray[np.int64]
    """(S,) row of the listing's samples; -1: none."""
    new: NDArray[np.intp]
    """Rows of the listing that the snapshot neither has nor rejected: missing, not built."""
    others: tuple[Found, ...] = ()
    """On samples and records that the snapshot rejected, or that are rejected now."""
    hashed: int = 0
    _details: dict[int, tuple[str, str]] = field(default_factory=dict, repr=False)
    """Row -> reason and words, if the state does not say it all."""

    @property
    def checked(self) -> int:
        """Samples that were looked at."""
        return int((self.state != State.NOT_CHECKED).sum())

    def rows(self, state: State) -> NDArray[np.intp]:
        """Samples in a state."""
        return np.flatnonzero(self.state == state)

    def found(self, row: int) -> Found:
        """What there is to say of one sample."""
        state, now = State(int(self.state[row])), int(self.place[row])
        (category, reason, hint), (path, line) = _WORDS[state], self.samples.where(row)
        cause, words = self._details.get(row, ("", ""))
        name = cause if state == State.INPUT_CHANGED else ""
        reason = f"{name}-changed" if name else cause if state == State.UNREADABLE else reason
        hint = hint if name or not cause else hint_for(cause)
        words = words or (_value(self.now.samples, now, state) if now >= 0 else _GONE_WORDS)
        said = {"expected": _value(self.samples, row, state), "found": words, "hint": hint}
        return Found(category=category, reason=reason, path=path, line=line, field=name, **said)


def compare(
    samples: SampleTable,
    now: Listing,
    *,
    rejected: Sequence[Rejected] = (),
    full: bool = False,
    chosen: NDArray[np.bool_] | None = None,
    inputs: Collection[str] = (),
) -> Compared:
    """Compare a snapshot's samples with DATA as it is now (records: scanned without ``known`` to read every file).

    Args:
        samples: Of the snapshot.
        now: Of DATA.
        rejected: What the snapshot rejected and has no sample for.
        full: Hash every image, whatever its stat says.
        chosen: (S,) samples to look at; all by default.
        inputs: Those that fields are made of; masks and control images are compared if they are among them.
    """
    own = "record" if now.data_kind == "records" else "image"
    if own == "record":
        state, place = _records_paired(samples, now.samples, rejected)
    else:
        labels, there = Strings.of(item.label for item in rejected), now.samples.names
        place = np.concatenate([match_names(samples.names, there), match_names(labels, there)])
        state = np.full(len(place), State.OK, dtype=np.uint8)
    count, met = len(samples), np.zeros(len(now.samples) + 1, dtype=np.bool_)
    met[place] = True  # the last one is for -1
    new = np.flatnonzero(~met[:-1])
    found = Compared(samples=samples, now=now, state=state[:count], place=place[:count], new=new)
    if chosen is not None:
        found.state[~chosen] = State.NOT_CHECKED
    rows = np.flatnonzero((found.state == State.OK) & (found.place >= 0))
    if own == "record" and now.samples is not samples:
        _records(found, rows)
    elif own == "image":
        _images(found, rows, sorted(set(inputs).intersection(samples.inputs) - {"image", "caption"}), full=full)
    said = {item.label: item for item in (*now.notes, *now.rejected) if own == "image" or not item.line}
    rows = np.flatnonzero((found.state == State.OK) & (found.place < 0))
    found.state[rows] = State.REMOVED
    of_file = np.asarray(samples.inputs[own].file)[rows]
    names = samples.files.names.take(of_file) if own == "record" else samples.names.take(rows)
    for row, name in zip(rows.tolist(), names, strict=True) if said else ():
        found.state[row], words = _absent(name, said)
        if words[1]:
            found._details[row] = words
    _rejected(found, own, rejected, state[count:], place[count:], said)
    return found


def _records(found: Compared, rows: NDArray[np.intp]) -> None:
    """Records that are as they were, in files that were written with the same bytes."""
    old, new = found.samples.files, found.now.samples.files
    before = np.asarray(found.samples.inputs["record"].file)[rows]
    now = np.full(len(old.names), -1, dtype=np.int64)
    now[before] = found.now.samples.inputs["record"].file[found.place[rows]]  # one for all records of a file
    there = np.flatnonzero(now >= 0)
    same = (np.asarray(old.content)[there] == new.content[now[there]]).all(axis=1)
    moved = (np.asarray(old.stat)[there, :5] != new.stat[now[there], :5]).any(axis=1)
    touched = np.zeros(len(now), dtype=np.bool_)
    touched[there] = same & moved
    found.state[rows[touched[before]]] = State.TOUCHED


def _images(found: Compared, rows: NDArray[np.intp], further: Sequence[str], *, full: bool) -> None:
    state, after = found.state, found.now.samples
    _hash(found, rows, "image", full=full)
    for name in further:
        some, held = rows[state[rows] <= State.TOUCHED], after.inputs.get(name)
        then = np.asarray(found.samples.inputs[name].file)[some] >= 0
        now = then & False if held is None else held.file[found.place[some]] >= 0
        for row, gone in zip(some[then != now].tolist(), then[then != now].tolist(), strict=True):
            state[row] = State.INPUT_CHANGED
            found._details[row] = (name, f"no {name} any more" if gone else f"a {name} that was not there")
        _hash(found, some[then & now], name, full=full)
    columns: Mapping[State, Callable[[SampleTable], Any]] = {
        State.FOCUS_CHANGED: focus_of,
        State.CAPTION_CHANGED: lambda samples: samples.inputs["caption"].content,
        State.REPEATS_CHANGED: repeats_of,
    }
    for word, column in columns.items():
        if word == State.CAPTION_CHANGED and "caption" not in found.samples.inputs:
            continue
        rows = rows[state[rows] <= State.TOUCHED]
        before, later = column(found.samples), column(after)
        if before is not later:
            differs = np.asarray(before)[rows] != np.asarray(later)[found.place[rows]]
            state[rows[differs.any(axis=tuple(range(1, differs.ndim)))]] = word


def _hash(found: Compared, rows: NDArray[np.intp], name: str, *, full: bool) -> None:
    """Hash the files whose stat does not prove them, of one input that all of the samples have."""
    if not len(rows):  # DATA may not have this input any more
        return
    now, before = found.now, found.samples.inputs[name]
    memos = np.ascontiguousarray(np.asarray(found.samples.files.stat)[np.asarray(before.file)[rows]])
    stats = now.samples.files.stat[np.asarray(now.samples.inputs[name].file)[found.place[rows]], :5]
    moved, content = (memos[:, :5] != stats).any(axis=1), np.asarray(before.content)
    asked = content[rows].any(axis=1) & (full | moved | racy(memos))
    touched = set(rows[asked & moved].tolist())
    reads = hashed_images(now.root, now.samples, found.place[rows[asked]], name)
    for row, (_, read) in zip(rows[asked].tolist(), reads, strict=True):
        found.hashed += 1
        state, (cause, words) = _verdict(read, content[row].tobytes())
        if name != "image" and state != State.OK:
            path = places(now.samples, found.place[[row]], name)[0]["path"]
            state, cause, words = State.INPUT_CHANGED, name, f"{path}: {words}"
        if words:
            found._details[row] = cause, words
        if state != State.OK or name == "image":
            found.state[row] = State.TOUCHED if state == State.OK and row in touched else state


def _rejected(
    found: Compared,
    own: str,
    then: Sequence[Rejected],
    state: NDArray[np.uint8],
    place: NDArray[np.int64],
    said: Mapping[str, Rejected],
) -> None:
    """Files and records that are rejected now, and (R,) those that the snapshot rejected."""
    now, still = found.now, Strings.of(item.label for item in found.now.rejected)
    is_sample = match_names(still, found.samples.names) >= 0 if own == "image" else [False] * len(still)
    others = [_quarantined(item) for item, one in zip(now.rejected, is_sample, strict=True) if not one]
    labels = set(still)
    for item, word, row in zip(then, state.tolist(), place.tolist(), strict=True):
        if row >= 0 and own == "image":
            others.append(_image_rejected(now, item, row))
        elif row >= 0 and word != State.CHANGED:
            others.append(_quarantined(item, line=now.samples.where(row)[1]))
        elif row >= 0:
            others.append(_recorded(item, ("stale", "source-changed"), _value(now.samples, row, State.CHANGED)))
        elif item.label not in labels:
            became, (cause, words) = _absent(item.name, said)
            category, reason, _ = _WORDS[became]
            others.append(_recorded(item, (category, cause if became == State.UNREADABLE else reason), words))
    found.others = tuple(others)


def _image_rejected(now: Listing, item: Rejected, row: int) -> Found:
    if item.reason.startswith("caption"):
        return _recorded(item, ("stale", "caption-changed"), f"rejected as {item.reason}; it can be read now")
    kind = field_kind(item.target) if item.target else None
    if kind is not None and kind.inputs[0] == "caption":
        content = np.asarray(now.samples.inputs["caption"].content[row]).tobytes()
        if content == (item.content or bytes(HASH_BYTES)):
            return _quarantined(item)
        return _recorded(item, ("stale", "caption-changed"), _value(now.samples, row, State.CAPTION_CHANGED))
    names = kind.inputs if kind is not None and not item.stat else ("image",)
    there = [name for name in names if name in now.samples.inputs and now.samples.inputs[name].file[row] >= 0]
    reads = [read for name in there for _, read in hashed_images(now.root, now.samples, np.array([row]), name)]
    read = next((one for one in reads if isinstance(one, UnusableSampleError)), reads[0])
    if len(reads) > 1 and not isinstance(read, UnusableSampleError):
        read = content_hash(b"".join(one[0] for one in reads if isinstance(one, tuple))), read[1]
    state, (cause, words) = _verdict(read, item.content)
    if state != State.CHANGED or (not item.content and (cause or len(there) < len(names))):
        return _quarantined(item)
    if item.content or item.reason not in _GONE:
        return _recorded(item, ("stale", "source-changed"), words)
    return _recorded(item, ("missing", "not-built"), f"rejected as {item.reason}; it can be read now")


def _records_paired(
    samples: SampleTable, now: SampleTable, rejected: Sequence[Rejected]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(S + R,) state and row of the listing of each record and each rejected one, by place and content."""
    state = np.full(len(samples) + len(rejected), State.OK, dtype=np.uint8)
    place = np.full(len(state), -1, dtype=np.int64)
    if now is samples:  # no file has changed
        place[: len(samples)] = np.arange(len(samples))
        return state, place
    old, new = samples.inputs["record"], now.inputs["record"]
    assert old.line is not None
    assert new.line is not None
    names = _numbered(now.files.names)
    numbers = match_names(_numbered(samples.files.names), names)[np.asarray(old.file)]
    apart = dict.fromkeys(item.name for item in rejected)
    number_of = dict(zip(apart, match_names(Strings.of(apart), names).tolist(), strict=True))
    content = hash_rows(item.content or bytes(HASH_BYTES) for item in rejected)
    mine = (
        np.concatenate([numbers, np.array([number_of[item.name] for item in rejected], dtype=np.int64)]),
        np.concatenate([np.asarray(old.line), np.array([item.line for item in rejected], dtype=np.uint32)]),
        np.concatenate([np.asarray(old.content), content]),
    )
    theirs = new.file, new.line, new.content
    left, right = np.flatnonzero(mine[0] >= 0), np.arange(len(now))
    for word in (State.OK, State.MOVED, State.CHANGED):
        by = {"by_line": word != State.MOVED, "by_content": (by_content := word != State.CHANGED)}
        one, other = _pairs(_keys(mine, left, **by), _keys(theirs, right, **by))
        if by_content:  # two contents of one key: a chance of 2**-64
            equal = (mine[2][left[one]] == theirs[2][right[other]]).all(axis=1)
            one, other = one[equal], other[equal]
        state[left[one]], place[left[one]] = word, right[other]
        left, right = np.delete(left, one), np.delete(right, other)
    return state, place


def _keys(
    columns: Sequence[NDArray[Any]], rows: NDArray[np.intp], *, by_line: bool, by_content: bool
) -> NDArray[np.uint64]:
    """(n,) a number for each row, by its file and what else is asked for."""
    file, line, content = (column[rows] for column in columns)
    key = file.astype(np.uint64) << np.uint64(32) | line.astype(np.uint64) * np.uint64(by_line)
    if not by_content:
        return key
    return key * np.uint64(0x9E37_79B9_7F4A_7C15) ^ np.ascontiguousarray(content).view(np.uint64)[:, 0]


def _pairs(mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of equal keys in both; the k-th of several equal ones is paired with the k-th."""
    if np.array_equal(mine, theirs):
        return np.arange(len(mine)), np.arange(len(mine))
    order, other = np.argsort(mine, kind="stable"), np.argsort(theirs, kind="stable")
    mine, theirs = mine[order], theirs[other]
    rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
    place = np.searchsorted(theirs, mine) + rank
    inside = np.flatnonzero(place < len(theirs))
    met = inside[theirs[place[inside]] == mine[inside]]
    return order[met], other[place[met]]


def _numbered(names: Strings) -> Strings:
    """Names of which the second and further ones of a kind carry their number."""
    if len(set(names)) == len(names):
        return names
    seen = Counter[str]()
    return Strings.of(f"{name}\0{seen.update([name]) or seen[name]}" for name in names)


def _absent(name: str, said: Mapping[str, Rejected]) -> tuple[State, tuple[str, str]]:
    """What became of a sample that is not in the listing; ``said`` is what the listing says of names."""
    ends = [end for end, letter in enumerate(name) if letter == "/"]
    above = (name.rpartition(":")[0], *(name[:end] for end in ends), *(name[: end + 1] for end in ends))
    now = next((said[place] for place in (name, *above) if place in said), None)
    if now is None:
        return State.REMOVED, ("", "")
    if now.name != name and now.reason not in _UNREADABLE:  # its folder is passed over as a whole
        return State.REMOVED, ("", f"{now.name}: {now.reason}, {now.detail}")
    return _unusable(now.reason, now.detail)


def _verdict(read: Hashed, content: bytes) -> tuple[State, tuple[str, str]]:
    if isinstance(read, UnusableSampleError):
        return _unusable(read.slug, read.what)
    return (State.OK, ("", "")) if read[0] == content else (State.CHANGED, ("", read[0].hex()))


def _unusable(cause: str, detail: str) -> tuple[State, tuple[str, str]]:
    if cause in _UNREADABLE:
        return State.UNREADABLE, (cause, detail)
    if cause in _GONE:
        return State.REMOVED, (cause, detail)
    return State.CAPTION_CHANGED if cause.startswith("caption") else State.CHANGED, (cause, f"{cause}: {detail}")


def _quarantined(item: Rejected, line: int = 0) -> Found:
    said = {"reason": item.reason, "path": item.name, "field": item.field, "found": item.detail, "hint": item.hint}
    return Found(category="quarantined", line=line or item.line, **said)


def _recorded(item: Rejected, became: tuple[str, str], words: str) -> Found:
    expected, found = item.content.hex() or f"rejected as {item.reason}", words or _GONE_WORDS
    category, reason = became
    return Found(category=category, reason=reason, path=item.name, line=item.line, expected=expected, found=found)
