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
_METADATA = " (only metadata differs, the pixels are the same)"
_UNKNOWN = " (the pixels could not be compared)"


class State(IntEnum):
    """What became of a sample."""

    OK = 0
    TOUCHED = 1
    MOVED = 2
    CAPTION_CHANGED = 3
    CHANGED = 4
    METADATA = 5
    REMOVED = 6
    UNREADABLE = 7
    NOT_CHECKED = 8
    REPEATS_CHANGED = 9
    FOCUS_CHANGED = 10
    INPUT_CHANGED = 11


#: State -> category and reason of contract.md; the reasons of UNREADABLE and INPUT_CHANGED are those of the file.
CATEGORY: Mapping[State, tuple[str, str]] = {
    State.OK: ("ok", ""),
    State.TOUCHED: ("touched", "stat-changed"),
    State.MOVED: ("touched", "line-changed"),
    State.CAPTION_CHANGED: ("stale", "caption-changed"),
    State.CHANGED: ("stale", "source-changed"),
    State.METADATA: ("stale", "source-changed"),
    State.REMOVED: ("stale", "source-removed"),
    State.UNREADABLE: ("unverifiable", "io-error"),
    State.NOT_CHECKED: ("", ""),
    State.REPEATS_CHANGED: ("stale", "repeats-changed"),
    State.FOCUS_CHANGED: ("stale", "focus-changed"),
    State.INPUT_CHANGED: ("stale", "mask-changed"),
}


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
        elif state == State.REPEATS_CHANGED:
            both = (self.samples, row), (self.now.samples, int(self.place[row]))
            expected, words = (f"{int(repeats_of(one)[at])} repeats per epoch" for one, at in both)
            hint = "no entry is affected: a build only records the new number"
        elif state == State.FOCUS_CHANGED:
            both = (self.samples, row), (self.now.samples, int(self.place[row]))
            expected, words = ("the point {:g}, {:g}".format(*focus_of(one)[at].tolist()) for one, at in both)
            hint = "with --crop focus a build encodes the image again"
        elif state == State.INPUT_CHANGED:
            name, reason = cause, f"{cause}-changed"
            hint = f"a build makes the {name} of this sample again, and nothing else"
        elif state == State.METADATA:
            hint = "a build stores the entry that it has under the new key and encodes nothing"
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
    stopping: Callable[[], bool] = bool,
    same_pixels: Callable[[int, bytes], bool | None] | None = None,
    inputs: Collection[str] = (),
) -> Compared:
    """Compare a snapshot's samples with DATA as it is now.

    Args:
        samples: Of the snapshot.
        now: Of DATA. Records: scanned without ``known`` if every file is to be read.
        rejected: What the snapshot rejected.
        full: Hash every image, whatever its stat says.
        chosen: (S,) samples to look at; all by default.
        stopping: Once it returns True, no further file is read.
        same_pixels: Tells a metadata edit from a change: (sample, the file's bytes); None if it cannot tell.
        inputs: Those that fields are made of; further images of a sample are compared if they are among them.
    """
    wanted = np.ones(len(samples), dtype=np.bool_) if chosen is None else chosen
    if now.data_kind == "records":
        return _Records(samples, now, rejected, wanted).compared()
    found = _Images(samples, now, rejected, wanted, full=full, stopping=stopping, same_pixels=same_pixels)
    return found.compared(sorted(set(inputs).intersection(samples.inputs) - {"image", "caption"}))


class _Images:
    """Samples that are files."""

    def __init__(
        self,
        samples: SampleTable,
        now: Listing,
        rejected: Sequence[Rejected],
        wanted: NDArray[np.bool_],
        *,
        full: bool,
        stopping: Callable[[], bool],
        same_pixels: Callable[[int, bytes], bool | None] | None,
    ) -> None:
        self._now, self._rejected, self._full = now, rejected, full
        self._stopping, self._same_pixels = stopping, same_pixels
        self._input = samples.inputs["image"]
        place = match_names(samples.names, now.samples.names)
        state = np.where(wanted, State.OK, State.NOT_CHECKED).astype(np.uint8)
        met = np.zeros(len(now.samples), dtype=np.bool_)
        met[place[place >= 0]] = True
        self.found = Compared(samples=samples, now=now, state=state, place=place, new=np.flatnonzero(~met))

    def compared(self, further: Sequence[str]) -> Compared:
        """Everything; ``further``: inputs of samples beside images and captions."""
        found, place, state = self.found, self.found.place, self.found.state
        own = np.flatnonzero((state == State.OK) & (place >= 0))
        changed = self._captions(own)
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
        said = {item.label: item for item in (*self._now.notes, *self._now.rejected)}
        absent = np.flatnonzero((state == State.OK) & (place < 0))
        if self._now.unread.any():
            names = self._now.samples.files.names.select(np.flatnonzero(self._now.unread))
            unread = match_names(found.samples.files.names, names) >= 0
            state[absent[unread[np.asarray(self._input.file)[absent]]]] = State.NOT_CHECKED
            absent = absent[state[absent] == State.OK]
        for row, name in zip(absent.tolist(), found.samples.names.take(absent), strict=True):
            state[row], found._details[row] = _absent(name, said)
        self._others(said)
        return found

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
            state, words = self._look(row if name == "image" else -1, [at], content[row].tobytes())
            if name != "image" and state != State.OK:
                state, words = State.INPUT_CHANGED, (name, f"{at['path']}: {words[1]}")
            if words[1]:
                self.found._details[row] = words
            return State.TOUCHED if state == State.OK and moved[row] else state

        for row, state in zip(doubtful.tolist(), self._map(look, doubtful, place, name), strict=True):
            if state != State.OK or name == "image":
                self.found.state[row] = State.NOT_CHECKED if state is None else state
            self.found.hashed += state is not None

    def _look(self, row: int, files: Sequence[Place], content: bytes) -> tuple[State, tuple[str, str]]:
        """Hash one image, or several as one content; below 0 the row is of an image without a sample."""
        try:
            hashes = [content_hash(data := read_image(self._now.root, place)[0]) for place in files]
        except UnusableSampleError as error:
            return _unusable(error.slug, error.what)
        now = hashes[0] if len(hashes) == 1 else content_hash(b"".join(hashes))
        if now == content:
            return State.OK, ("", "")
        same = self._same_pixels(row, data) if self._same_pixels is not None and row >= 0 else False
        words = now.hex() + (_METADATA if same else _UNKNOWN if same is None else "")
        return State.METADATA if same else State.CHANGED, ("", words)

    def _map(
        self, look: Callable[[int, Place], State], rows: NDArray[np.intp], now: NDArray[np.int64], name: str
    ) -> Iterator[State | None]:
        """``look`` of each in threads, where it is now; None if there was no time."""

        def one(row: int, place: Place) -> State | None:
            return None if self._stopping() else look(row, place)

        pool = ThreadPoolExecutor(_THREADS)
        try:
            for first in range(0, len(rows), _WINDOW):
                some = rows[first : first + _WINDOW]
                yield from pool.map(one, some.tolist(), places(self._now.samples, now[some], name))
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for
            close_tables()

    def _others(self, said: Mapping[str, Rejected]) -> None:
        """Files that the snapshot rejected, and files that are rejected now."""
        found, now = self.found, self._now
        names = Strings.of(item.label for item in (*self._rejected, *now.rejected))
        is_sample = (match_names(names, found.samples.names) >= 0).tolist()
        fresh = match_names(names, now.samples.names).tolist()
        recorded = {
            item.label: (item, row)
            for item, row, own in zip(self._rejected, fresh, is_sample, strict=False)
            if not own
        }
        others = [
            _quarantined(item)
            for item, own in zip(now.rejected, is_sample[len(self._rejected) :], strict=True)
            if not own
        ]
        still = {item.label for item in now.rejected}
        for name, (item, row) in recorded.items():
            if row >= 0:
                others.append(self._rejected_then(item, row))
            elif name not in still:
                state, (cause, words) = _absent(name, said)
                category, reason = CATEGORY[state]
                reason, path, line = cause if state == State.UNREADABLE else reason, item.name, item.line
                others.append(
                    Found(category=category, reason=reason, path=path, line=line, expected="the file", found=words)
                )
        found.new = np.setdiff1d(found.new, [row for _, row in recorded.values() if row >= 0])
        found.others = tuple(others)

    def _rejected_then(self, item: Rejected, row: int) -> Found:
        """A file that the snapshot rejected and that the listing takes: only other bytes or captions matter."""
        table, kind = self._now.samples, field_kind(item.target) if not item.stat else None
        names = kind.inputs if kind is not None and kind.inputs[0] == "image" else ("image",)
        there = [name for name in names if name in table.inputs and int(table.inputs[name].file[row]) >= 0]
        files = [places(table, [row], name)[0] for name in there]
        if item.content:
            stat = self._now.samples.files.stat[int(self._now.samples.inputs["image"].file[row])]
            memo = memo_row(item.stat or (0,) * 6)
            if not self._full and (memo[:5] == stat[:5]).all() and not racy(memo[None])[0]:
                return _quarantined(item)
            state, (_, words) = self._look(-1, files, item.content)
            self.found.hashed += 1
            return _quarantined(item) if state != State.CHANGED else _stale(item, "source-changed", words)
        if item.reason.startswith("caption"):
            return _stale(item, "caption-changed", f"rejected as {item.reason}; it can be read now")
        if len(there) < len(names) or self._look(-1, files, b"")[1][0]:
            return _quarantined(item)
        words = f"rejected as {item.reason}; it can be read now"
        if item.reason in ("empty", "changing"):
            return _stale(item, "source-changed", words)
        return Found(category="missing", reason="not-built", path=item.name, found=words)


class _Records:
    """Samples that are records of files."""

    def __init__(
        self, samples: SampleTable, now: Listing, rejected: Sequence[Rejected], wanted: NDArray[np.bool_]
    ) -> None:
        self._now, self._rejected, self._wanted = now, rejected, wanted
        self._old, self._new = samples.inputs["record"], now.samples.inputs["record"]
        self._file = match_names(_numbered(samples.files.names), _numbered(now.samples.files.names))
        state = np.full(len(samples), State.REMOVED, dtype=np.uint8)
        place = np.full(len(samples), -1, dtype=np.int64)
        self.found = Compared(samples=samples, now=now, state=state, place=place, new=np.empty(0, dtype=np.intp))

    def compared(self) -> Compared:
        """Everything."""
        found, now = self.found, self._now
        mine, theirs = self._columns()
        left, right = self._match(mine, theirs)
        found.new = right
        said = {item.name: item for item in (*now.notes, *now.rejected) if not item.line}
        for file in np.unique(np.asarray(self._old.file)[left]).tolist() if said else []:
            state, words = _absent(found.samples.files.names[file], said)
            rows = left[np.asarray(self._old.file)[left] == file]
            found.state[rows] = state
            found._details.update(dict.fromkeys(rows.tolist(), words) if words[1] else {})
        unread = np.append(now.unread, False)[self._file[self._old.file]]
        found.state[unread | ~self._wanted] = State.NOT_CHECKED
        self._touched()
        self._others()
        return found

    def _columns(self) -> tuple[_Keys, _Keys]:
        assert self._old.line is not None
        assert self._new.line is not None
        mine = _Keys(
            self._file[np.asarray(self._old.file)], np.asarray(self._old.line), np.asarray(self._old.content)
        )
        return mine, _Keys(np.asarray(self._new.file), np.asarray(self._new.line), np.asarray(self._new.content))

    def _match(self, mine: _Keys, theirs: _Keys) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Pair rows; gives the rows of the snapshot and those of the listing that have no partner."""
        found = self.found
        pairs = ((mine.file, theirs.file), (mine.line, theirs.line), (mine.content, theirs.content))
        if all(np.array_equal(*pair) for pair in pairs):
            found.state[:], found.place[:] = State.OK, np.arange(len(theirs.file))
            return np.empty(0, dtype=np.intp), np.empty(0, dtype=np.intp)
        left, right = np.flatnonzero(mine.file >= 0), np.arange(len(theirs.file))
        steps = ((_Keys.place, True, State.OK), (_Keys.moved, True, State.MOVED), (_Keys.place, False, State.CHANGED))
        for key, exact, state in steps:
            if not len(left) or not len(right):
                break
            one, other = _pairs(key(mine, left), key(theirs, right))
            if exact:
                equal = (mine.content[left[one]] == theirs.content[right[other]]).all(axis=1)
                one, other = one[equal], other[equal]
            found.state[left[one]] = state
            found.place[left[one]] = right[other]
            left, right = np.delete(left, one), np.delete(right, other)
        return np.flatnonzero(found.place < 0), right

    def _touched(self) -> None:
        """Records that are as they were, in files that were written or moved with the same bytes."""
        old, new = self.found.samples.files, self._now.samples.files
        there = np.flatnonzero(self._file >= 0)
        place = self._file[there]
        same = (np.asarray(old.content)[there] == new.content[place]).all(axis=1)
        moved = (np.asarray(old.stat)[there, :5] != new.stat[place, :5]).any(axis=1)
        touched = np.zeros(len(self._file), dtype=np.bool_)
        touched[there] = same & moved
        rows = touched[np.asarray(self._old.file)] & (self.found.state == State.OK)
        self.found.state[rows] = State.TOUCHED

    def _others(self) -> None:
        """Records that were rejected then or are rejected now."""
        now = self._now
        lines = Counter((item.name, item.line, item.reason) for item in now.rejected)
        files = Counter((item.name, item.reason) for item in now.rejected)
        fresh, taken = self._fresh({item.name for item in self._rejected}), set[int]()
        unread = set(now.samples.files.names.take(np.flatnonzero(now.unread)))
        others = [_quarantined(item) for item in now.rejected]

        def take(key: tuple[str, Any]) -> int:
            row = next((row for row in fresh.get(key, ()) if row not in taken), -1)
            taken.add(row)
            return row

        left = list[Rejected]()
        for item in self._rejected:
            row = take((item.name, item.content)) if item.content else -1
            still = not item.content and lines[item.name, item.line, item.reason] > 0
            lines[item.name, item.line, item.reason] -= still
            files[item.name, item.reason] -= still
            if row >= 0 or (item.name in unread and not still):
                others.append(_quarantined(item, line=now.samples.where(row)[1] if row >= 0 else 0))
            elif not still:
                left.append(item)
        for item in left:
            row = take((item.name, item.line))
            if row >= 0:
                others.append(_stale(item, "source-changed", self._new.content[row].tobytes().hex()[:8]))
            elif not item.content and files[item.name, item.reason] > 0:  # on another line
                files[item.name, item.reason] -= 1
            else:
                others.append(_stale(item, "source-removed", "no such record"))
        self.found.new = self.found.new[~np.isin(self.found.new, list(taken))]
        self.found.others = tuple(others)

    def _fresh(self, names: set[str]) -> dict[tuple[str, Any], list[int]]:
        """New rows in files with rejected records: by name and content, and by name and line."""
        samples, found = self._now.samples, dict[tuple[str, Any], list[int]]()
        files = np.flatnonzero(match_names(samples.files.names, Strings.of(names)) >= 0)
        for row in self.found.new[np.isin(self._new.file[self.found.new], files)].tolist():
            name, line = samples.where(row)
            found.setdefault((name, self._new.content[row].tobytes()), []).append(row)
            found.setdefault((name, line), []).append(row)
        return found


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
    if state not in (State.CHANGED, State.METADATA) or row < 0:
        return ""
    held = next(iter(samples.inputs.values()))
    content = np.asarray(held.content[row]).tobytes().hex()
    return content if held.line is None else content[: HASH_BYTES // 2]


def _caption(samples: SampleTable, row: int) -> str:
    text = samples.inputs["caption"].text
    said = text[row] if text is not None and row >= 0 else ""
    return (said if len(said) <= 80 else said[:79] + "…") or "(no caption)"


def _quarantined(item: Rejected, line: int = 0) -> Found:
    return Found(
        category="quarantined",
        reason=item.reason,
        path=item.name,
        line=line or item.line,
        field=item.field,
        found=item.detail,
        hint=item.hint,
    )


def _stale(item: Rejected, reason: str, words: str) -> Found:
    expected = item.content.hex() or f"rejected as {item.reason}"
    return Found(category="stale", reason=reason, path=item.name, line=item.line, expected=expected, found=words)
