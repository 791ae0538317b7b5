"""Is every sample still what a snapshot recorded, and is every sample of DATA in the snapshot?

Contents decide, never times. A file whose stat memo is trusted is not opened; any other is hashed, so a change is
found also if size and time were put back. Records are matched as a multiset: by file, line and content, then by file
and content (moved to another line), then by file and line (changed). Cost: 1 us per sample, 0.1 ms per MB hashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.focus import focus_of
from latentcache.fields.registry import field_kind
from latentcache.fields.strings import Strings
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.archives.members import Place, close_tables, places, read_image
from latentcache.sources.causes import hint_for
from latentcache.sources.images import repeats_of
from latentcache.sources.known import match_names, memo_row, racy
from latentcache.sources.scan import Listing

_THREADS = 4
#: Files that wait for the threads.
_WINDOW = 1 << 12
#: Reasons that mean "could not be looked at" rather than "is not usable".
UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
_GONE = frozenset({"not-found", "vanished", "unlisted", "hidden"})


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


#: State -> category and reason of contract.md; the reasons of UNREADABLE and INPUT_CHANGED are those of the file.
CATEGORY: Mapping[State, tuple[str, str]] = {
    State.OK: ("ok", ""),
    State.TOUCHED: ("touched", "stat-changed"),
    State.MOVED: ("touched", "line-changed"),
    State.CAPTION_CHANGED: ("stale", "caption-changed"),
    State.CHANGED: ("stale", "source-changed"),
    State.REMOVED: ("stale", "source-removed"),
    State.UNREADABLE: ("unverifiable", "io-error"),
    State.NOT_CHECKED: ("", ""),
    State.REPEATS_CHANGED: ("stale", "repeats-changed"),
    State.FOCUS_CHANGED: ("stale", "focus-changed"),
    State.INPUT_CHANGED: ("stale", "mask-changed"),
}


#: State -> column of the samples, its words, and the hint.
_COLUMNS: Mapping[State, tuple[Callable[[SampleTable], NDArray[Any]], str, str]] = {
    State.REPEATS_CHANGED: (
        repeats_of, "{} repeats per epoch", "no entry is affected: a build only records the new number"
    ),
    State.FOCUS_CHANGED: (
        focus_of, "the point {0[0]:g}, {0[1]:g}", "with --crop focus a build encodes the image again"
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
    """Files that were hashed to compare them."""
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
        state = State(int(self.state[row]))
        category, reason = CATEGORY[state]
        path, line = self.samples.where(row)
        cause, words = self._details.get(row, ("", ""))
        expected, hint, name = _expected(self.samples, row, state), hint_for(cause) if cause else "", ""
        if state == State.UNREADABLE:
            reason, expected = cause, "a file that can be read"
        elif state == State.REMOVED:
            expected, words = (
                ("the record" if line else "the file"),
                words or f"no such {'record' if line else 'file'}",
            )
        elif state == State.CAPTION_CHANGED:
            words = words or _caption(self.now.samples, int(self.place[row]))
            expected = "a caption that can be read" if cause else _caption(self.samples, row)
            hint = hint or "no entry is affected: a build only records the new caption"
        elif state in _COLUMNS:
            column, form, hint = _COLUMNS[state]
            both = (self.samples, row), (self.now.samples, int(self.place[row]))
            expected, words = (form.format(column(one)[at].tolist()) for one, at in both)
        elif state == State.INPUT_CHANGED:
            name, reason = cause, f"{cause}-changed"
            hint = f"a build makes the {name} of this sample again, and nothing else"
        elif state == State.CHANGED and not words:
            words = _expected(self.now.samples, int(self.place[row]), state)
        elif state == State.MOVED:
            words = f"line {self.now.samples.where(int(self.place[row]))[1]}"
            expected = f"line {line}"
        elif cause:
            expected = "a file that can be used"
        return Found(
            category=category,
            reason=reason,
            path=path,
            line=line,
            field=name,
            expected=expected,
            found=words,
            hint=hint,
        )

    def found_new(self, row: int) -> Found:
        """What there is to say of one row of ``new``."""
        path, line = self.now.samples.where(row)
        return Found(category="missing", reason="not-built", path=path, line=line)


def compare(
    samples: SampleTable,
    now: Listing,
    *,
    rejected: Sequence[Rejected] = (),
    full: bool = False,
    chosen: NDArray[np.bool_] | None = None,
    inputs: Collection[str] = (),
) -> Compared:
    """Compare a snapshot's samples with DATA as it is now.

    Args:
        samples: Of the snapshot.
        now: Of DATA. Records: scanned without ``known`` if every file is to be read.
        rejected: What the snapshot rejected.
        full: Hash every image, whatever its stat says.
        chosen: (S,) samples to look at; all by default.
        inputs: Those that fields are made of; further images of a sample are compared if they are among them.
    """
    found = _Comparison(samples, now, rejected, full=full)
    further = sorted(set(inputs).intersection(samples.inputs) - {"image", "caption", "record"})
    return found.compared(np.ones(len(samples), dtype=np.bool_) if chosen is None else chosen, further)


class _Comparison:
    """Samples that are files, parts of archives, or records."""

    def __init__(
        self,
        samples: SampleTable,
        now: Listing,
        rejected: Sequence[Rejected],
        *,
        full: bool,
    ) -> None:
        self._now, self._rejected, self._full = now, rejected, full
        self._of_records = now.data_kind == "records"
        self._own = "record" if self._of_records else "image"
        state = np.full(len(samples), State.OK, dtype=np.uint8)
        place = (
            _records_paired(samples, now, state)
            if self._of_records
            else match_names(samples.names, now.samples.names)
        )
        met = np.zeros(len(now.samples), dtype=np.bool_)
        met[place[place >= 0]] = True
        self.found = Compared(samples=samples, now=now, state=state, place=place, new=np.flatnonzero(~met))

    def compared(self, wanted: NDArray[np.bool_], further: Sequence[str]) -> Compared:
        """Everything; ``further``: inputs of samples beside images and captions."""
        found, place, state = self.found, self.found.place, self.found.state
        file = np.asarray(found.samples.inputs[self._own].file)
        state[~wanted] = State.NOT_CHECKED
        own = np.flatnonzero((state == State.OK) & (place >= 0))
        if self._of_records:
            self._touched(own, file)
        else:
            self._images(own, further)
        said = {
            item.label: item
            for item in (*self._now.notes, *self._now.rejected)
            if not (item.line and self._of_records)
        }
        absent = np.flatnonzero((state == State.OK) & (place < 0))
        state[absent] = State.REMOVED
        called = (
            found.samples.files.names.take(file[absent]) if self._of_records else found.samples.names.take(absent)
        )
        for row, name in zip(absent.tolist(), called, strict=True) if said else ():
            state[row], words = _absent(name, said)
            if words[1]:
                found._details[row] = words
        self._others(said)
        return found

    def _touched(self, own: NDArray[np.intp], file: NDArray[Any]) -> None:
        """Records that are as they were, in files that were written with the same bytes."""
        old, new = self.found.samples.files, self._now.samples.files
        before, now = file[own], np.full(len(old.names), -1, dtype=np.int64)
        now[before] = self._now.samples.inputs["record"].file[self.found.place[own]]  # one for all records of a file
        there = np.flatnonzero(now >= 0)
        same = (np.asarray(old.content)[there] == new.content[now[there]]).all(axis=1)
        moved = (np.asarray(old.stat)[there, :5] != new.stat[now[there], :5]).any(axis=1)
        touched = np.zeros(len(now), dtype=np.bool_)
        touched[there] = same & moved
        self.found.state[own[touched[before]]] = State.TOUCHED

    def _images(self, own: NDArray[np.intp], further: Sequence[str]) -> None:
        state, changed = self.found.state, self._captions(own)
        self._hash(own)
        for name in further:
            self._further(name, own[np.isin(state[own], (State.OK, State.TOUCHED))])
        repeats, focus = self._differing(repeats_of, own), self._differing(focus_of, own)
        for rows, word in zip(
            (focus, changed, repeats),
            (State.FOCUS_CHANGED, State.CAPTION_CHANGED, State.REPEATS_CHANGED),
            strict=True,
        ):
            state[rows[np.isin(state[rows], (State.OK, State.TOUCHED))]] = word

    def _captions(self, own: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of samples, those with another caption now."""
        old, new = self.found.samples.inputs.get("caption"), self._now.samples.inputs.get("caption")
        if old is None or new is None or old.content is new.content:
            return own[:0]
        differs = (np.asarray(old.content)[own] != new.content[self.found.place[own]]).any(axis=1)
        changed: NDArray[np.intp] = own[differs]
        return changed

    def _differing(self, column: Callable[[SampleTable], NDArray[Any]], own: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of samples, those that have another value in a column now."""
        before, now = column(self.found.samples)[own], column(self._now.samples)[self.found.place[own]]
        differs = np.asarray(before != now)
        changed: NDArray[np.intp] = own[differs.any(axis=tuple(range(1, differs.ndim)))]
        return changed

    def _further(self, name: str, own: NDArray[np.intp]) -> None:
        """Compare masks or control images of samples."""
        before, after = self.found.samples.inputs[name], self._now.samples.inputs.get(name)
        then = np.asarray(before.file)[own] >= 0
        now = then & False if after is None else after.file[self.found.place[own]] >= 0
        for row, gone in zip(own[then != now].tolist(), then[then != now].tolist(), strict=True):
            self.found.state[row] = State.INPUT_CHANGED
            self.found._details[row] = (name, f"no {name} any more" if gone else f"a {name} that was not there")
        self._hash(own[then & now], name)

    def _hash(self, own: NDArray[np.intp], name: str = "image") -> None:
        """Hash the files whose stat does not prove them, of one input that all of the samples have."""
        if not len(own):  # DATA may not have this input any more
            return
        samples, now, place = self.found.samples, self._now.samples, self.found.place
        before = samples.inputs[name]
        memos = np.ascontiguousarray(np.asarray(samples.files.stat)[np.asarray(before.file)[own]])
        stats = now.files.stat[np.asarray(now.inputs[name].file)[place[own]], :5]
        same = (memos[:, :5] == stats).all(axis=1)
        known = np.asarray(before.content)[own].any(axis=1)
        asked = known & (self._full | ~same | racy(memos))
        doubtful = own[asked]
        moved = dict(zip(doubtful.tolist(), (~same[asked]).tolist(), strict=True))
        content = np.asarray(before.content)

        def look(row: int, at: Place) -> State:
            state, words = self._look([at], content[row].tobytes())
            if name != "image" and state != State.OK:
                state, words = State.INPUT_CHANGED, (name, f"{at['path']}: {words[1]}")
            if words[1]:
                self.found._details[row] = words
            return State.TOUCHED if state == State.OK and moved[row] else state

        for row, state in zip(doubtful.tolist(), self._map(look, doubtful, place, name), strict=True):
            if state != State.OK or name == "image":
                self.found.state[row] = state
            self.found.hashed += 1

    def _look(self, files: Sequence[Place], content: bytes) -> tuple[State, tuple[str, str]]:
        """Hash one image, or several as one content."""
        try:
            hashes = [content_hash(read_image(self._now.root, place)[0]) for place in files]
        except UnusableSampleError as error:
            return _unusable(error.slug, error.what)
        now = hashes[0] if len(hashes) == 1 else content_hash(b"".join(hashes))
        return (State.OK, ("", "")) if now == content else (State.CHANGED, ("", now.hex()))

    def _map(
        self, look: Callable[[int, Place], State], rows: NDArray[np.intp], now: NDArray[np.int64], name: str
    ) -> Iterator[State]:
        """``look`` of each in threads, where it is now."""
        pool = ThreadPoolExecutor(_THREADS)
        try:
            for first in range(0, len(rows), _WINDOW):
                some = rows[first : first + _WINDOW]
                yield from pool.map(look, some.tolist(), places(self._now.samples, now[some], name))
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for
            close_tables()

    def _others(self, said: Mapping[str, Rejected]) -> None:
        """Files and records that the snapshot rejected, and those that are rejected now."""
        found, now = self.found, self._now
        if not self._rejected and not now.rejected:
            return
        names = Strings.of(item.label for item in (*self._rejected, *now.rejected))
        own = match_names(names, found.samples.names) >= 0
        if self._of_records:  # several records may be on one line
            own[:] = False
        before = {
            (item.label, item.content): item
            for item, is_sample in zip(self._rejected, own.tolist(), strict=False)
            if not is_sample
        }
        still, others = {item.label for item in now.rejected}, list[Found]()
        others += [
            _quarantined(item) for item, one in zip(now.rejected, own[len(self._rejected) :], strict=True) if not one
        ]
        rows = self._now_used(list(before.values()))
        for item, row in zip(before.values(), rows, strict=True):
            if row >= 0:
                others.append(self._rejected_then(item, row))
            elif item.label not in still:
                state, (cause, words) = _absent(item.name, said)
                category, reason = CATEGORY[state]
                reason = cause if state == State.UNREADABLE else reason
                others.append(_recorded(item, category, reason, words))
        found.new = found.new[~np.isin(found.new, rows)]
        found.others = tuple(others)

    def _now_used(self, items: Sequence[Rejected]) -> list[int]:
        """Rows of the listing that are what the snapshot rejected: by content, then by place; -1: none."""
        now, new = self._now.samples, self.found.new
        names = now.files.names if self._of_records else now.names
        hits = match_names(names, Strings.of({item.name if self._of_records else item.label for item in items})) >= 0
        fresh, taken = dict[tuple[str, Any], list[int]](), set[int]()
        for row in new[hits[now.inputs["record"].file[new] if self._of_records else new]].tolist():
            name, line = now.where(row)
            for key in ((name, now.inputs[self._own].content[row].tobytes()), (name, line)):
                fresh.setdefault(key, []).append(row)

        def take(key: tuple[str, Any]) -> int:
            row = next((row for row in fresh.get(key, ()) if row not in taken), -1)
            taken.add(row)
            return row

        rows = [take((item.name, item.content)) if item.content else -1 for item in items]
        return [take((item.name, item.line)) if row < 0 else row for item, row in zip(items, rows, strict=True)]

    def _rejected_then(self, item: Rejected, row: int) -> Found:
        """What the snapshot rejected and the listing takes: only other bytes or captions matter."""
        if self._of_records:
            content = self._now.samples.inputs["record"].content[row].tobytes()
            if item.content == content:
                return _quarantined(item, line=self._now.samples.where(row)[1])
            return _recorded(item, "stale", "source-changed", content.hex()[:8])
        table, kind = self._now.samples, field_kind(item.target) if not item.stat else None
        names = kind.inputs if kind is not None and kind.inputs[0] == "image" else ("image",)
        there = [name for name in names if name in table.inputs and int(table.inputs[name].file[row]) >= 0]
        files = [places(table, [row], name)[0] for name in there]
        if item.content:
            stat = self._now.samples.files.stat[int(self._now.samples.inputs["image"].file[row])]
            memo = memo_row(item.stat or (0,) * 6)
            if not self._full and (memo[:5] == stat[:5]).all() and not racy(memo[None])[0]:
                return _quarantined(item)
            state, (_, words) = self._look(files, item.content)
            self.found.hashed += 1
            return _quarantined(item) if state != State.CHANGED else _recorded(item, "stale", "source-changed", words)
        if item.reason.startswith("caption"):
            return _recorded(item, "stale", "caption-changed", f"rejected as {item.reason}; it can be read now")
        if len(there) < len(names) or self._look(files, b"")[1][0]:
            return _quarantined(item)
        words = f"rejected as {item.reason}; it can be read now"
        if item.reason in ("empty", "changing"):
            return _recorded(item, "stale", "source-changed", words)
        return _recorded(item, "missing", "not-built", words)


def _records_paired(samples: SampleTable, now: Listing, state: NDArray[np.uint8]) -> NDArray[np.int64]:
    """(S,) row of the listing of each record, or -1; fills in the states of those that moved or changed."""
    old, new = samples.inputs["record"], now.samples.inputs["record"]
    assert old.line is not None
    assert new.line is not None
    numbers = match_names(_numbered(samples.files.names), _numbered(now.samples.files.names))
    mine = _Keys(numbers[np.asarray(old.file)], np.asarray(old.line), np.asarray(old.content))
    theirs = _Keys(np.asarray(new.file), np.asarray(new.line), np.asarray(new.content))
    pairs = ((mine.file, theirs.file), (mine.line, theirs.line), (mine.content, theirs.content))
    if all(np.array_equal(*pair) for pair in pairs):
        return np.arange(len(samples))
    place = np.full(len(samples), -1, dtype=np.int64)
    left, right = np.flatnonzero(mine.file >= 0), np.arange(len(theirs.file))
    steps = ((_Keys.place, True, State.OK), (_Keys.moved, True, State.MOVED), (_Keys.place, False, State.CHANGED))
    for key, exact, word in steps:
        if not len(left) or not len(right):
            break
        one, other = _pairs(key(mine, left), key(theirs, right))
        if exact:
            equal = (mine.content[left[one]] == theirs.content[right[other]]).all(axis=1)
            one, other = one[equal], other[equal]
        state[left[one]], place[left[one]] = word, right[other]
        left, right = np.delete(left, one), np.delete(right, other)
    return place


@dataclass(frozen=True, slots=True)
class _Keys:
    """Columns that records are matched by."""

    file: NDArray[np.integer]
    line: NDArray[np.integer]
    content: NDArray[np.uint8]

    def place(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """(n,) equal for one file and line."""
        return self.file[rows].astype(np.uint64) << np.uint64(32) | self.line[rows].astype(np.uint64)

    def moved(self, rows: NDArray[np.intp]) -> NDArray[np.uint64]:
        """(n,) equal for one file and content; other contents differ but for a chance of 2**-64."""
        half = np.ascontiguousarray(self.content[rows]).view(np.uint64)[:, 0]
        with np.errstate(over="ignore"):
            return half ^ (self.file[rows].astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E37_79B9_7F4A_7C15)


def _pairs(mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of equal keys in both; the k-th of several equal ones is paired with the k-th."""
    if np.array_equal(mine, theirs):
        return np.arange(len(mine)), np.arange(len(mine))
    order, other = np.argsort(mine, kind="stable"), np.argsort(theirs, kind="stable")
    mine, theirs = mine[order], theirs[other]
    first = np.searchsorted(theirs, mine)
    place = first + _ranks(mine)
    inside = np.flatnonzero(place < len(theirs))
    met = inside[theirs[place[inside]] == mine[inside]]
    return order[met], other[place[met]]


def _ranks(keys: NDArray[np.uint64]) -> NDArray[np.intp]:
    """(n,) which of its equals each sorted key is, from 0."""
    number = np.arange(len(keys))
    starts = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.empty(0, dtype=np.bool_)
    found: NDArray[np.intp] = number - np.maximum.accumulate(np.where(starts, number, 0))
    return found


def _numbered(names: Strings) -> Strings:
    """Names of which the second and further ones of a kind carry their number."""
    counts: Counter[str] = Counter(names)
    if len(counts) == len(names):
        return names
    seen: Counter[str] = Counter()
    apart = []
    for name in names:
        seen[name] += 1
        apart.append(f"{name}\0{seen[name]}")
    return Strings.of(apart)


def _absent(name: str, said: Mapping[str, Rejected]) -> tuple[State, tuple[str, str]]:
    """What became of a sample that is not in the listing; ``said`` is what the listing says of names."""
    ends = [end for end, letter in enumerate(name) if letter == "/"] if said else []
    above = (name.rpartition(":")[0], *(name[:end] for end in ends), *(name[: end + 1] for end in ends))
    now = next((said[place] for place in (name, *above) if place in said), None)
    if now is None:
        return State.REMOVED, ("", "")
    if now.name != name and now.reason not in UNREADABLE:  # its folder is passed over as a whole
        return State.REMOVED, ("", f"{now.name}: {now.reason}, {now.detail}")
    return _unusable(now.reason, now.detail)


def _unusable(cause: str, detail: str) -> tuple[State, tuple[str, str]]:
    """What a file of the snapshot is that cannot be read or used as it is now."""
    if cause in UNREADABLE:
        return State.UNREADABLE, (cause, detail)
    if cause in _GONE:
        return State.REMOVED, (cause, detail)
    return State.CAPTION_CHANGED if cause.startswith("caption") else State.CHANGED, (cause, f"{cause}: {detail}")


def _expected(samples: SampleTable, row: int, state: State) -> str:
    if state != State.CHANGED or row < 0:
        return ""
    held = next(iter(samples.inputs.values()))
    content = np.asarray(held.content[row]).tobytes().hex()
    return content if held.line is None else content[: HASH_BYTES // 2]


def _caption(samples: SampleTable, row: int) -> str:
    text = samples.inputs["caption"].text
    said = text[row] if text is not None and row >= 0 else ""
    return (said if len(said) <= 80 else said[:79] + "…") or "(no caption)"


def _quarantined(item: Rejected, line: int = 0) -> Found:
    said = {"reason": item.reason, "path": item.name, "field": item.field, "found": item.detail, "hint": item.hint}
    return Found(category="quarantined", line=line or item.line, **said)


def _recorded(item: Rejected, category: str, reason: str, words: str) -> Found:
    """What became of a file or record that the snapshot rejected."""
    said = {
        "expected": item.content.hex() or f"rejected as {item.reason}",
        "found": words or "no such file or record",
    }
    return Found(category=category, reason=reason, path=item.name, line=item.line, **said)
