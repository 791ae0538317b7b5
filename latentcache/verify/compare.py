"""Compare the samples of a snapshot with those of DATA now: unchanged, changed, gone, or new.

Contents decide, never times. The scan has read every file whose stat memo is not trusted, unless its size says that
it changed. Records are matched as a multiset. They match by file, line and content, else by file and content: moved
to another line. Else they match by file and line: changed. Rejected records are matched likewise. Cost: 1 us per
sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.registry import field_kind
from latentcache.fields.strings import Strings
from latentcache.fields.table import OF_TABLE, Rejected, SampleTable, table_values
from latentcache.identity.content import HASH_BYTES, content_hash, equal_hashes
from latentcache.sources.causes import hint_for
from latentcache.sources.known import hash_rows, match_names
from latentcache.sources.layout import above
from latentcache.sources.places import places, sizes
from latentcache.sources.readers.folder import repeats_of
from latentcache.sources.scan import Listing
from latentcache.verify.findings import HINTS, Finding

#: Reasons that mean "could not be looked at" rather than "is not usable".
_UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
_GONE = frozenset({"not-found", "unlisted", "hidden"})


class State(IntEnum):
    """State of a sample, compared with the listing; UNREADABLE and INPUT_CHANGED have the reasons of the file."""

    category: str
    reason: str
    """As contract.md has it."""
    hint: str

    def __new__(cls, value: int, category: str = "", reason: str = "", hint: str = "") -> State:
        """Make a number with words."""
        state = int.__new__(cls, value)
        state._value_ = value
        state.category, state.reason, state.hint = category, reason, hint
        return state

    OK = 0, "ok"
    TOUCHED = 1, "touched", "stat-changed"
    MOVED = 2, "touched", "line-changed"
    CAPTION_CHANGED = 3, "stale", "caption-changed", "a build records the new caption; it encodes embeddings alone"
    CHANGED = 4, "stale", "source-changed"
    REMOVED = 5, "stale", "source-removed"
    UNREADABLE = 6, "unverifiable", "io-error"
    NOT_CHECKED = 7
    REPEATS_CHANGED = 8, "stale", "repeats-changed", "no entry is affected: a build only records the new number"
    COLUMN_CHANGED = 9, "stale", "column-changed", "no entry is affected: a build only records the new value"
    INPUT_CHANGED = 10, "stale", "mask-changed", "a build makes it again for this sample, and nothing else"


def _value(samples: SampleTable, row: int, state: State) -> str:
    if state == State.MOVED:
        return f"line {samples.where(row)[1]}"
    if state == State.CAPTION_CHANGED:
        text = samples.inputs["caption"].text
        caption = text[row] if text is not None else ""
        return (caption if len(caption) <= 80 else caption[:79] + "…") or "(no caption)"
    if state == State.CHANGED:
        return _content(samples, row, next(iter(samples.inputs)))
    if state == State.REPEATS_CHANGED:
        return f"{repeats_of(samples)[row]} repeats per epoch"
    if state == State.COLUMN_CHANGED:
        return str(_of_table(samples, slice(row, row + 1))[0])
    return {State.REMOVED: "the sample", State.UNREADABLE: "a file that can be read"}.get(state, "")


def _content(samples: SampleTable, row: int, name: str) -> str:
    """Return the content hash of an input in hex, or the size of a file that was not read."""
    held = samples.inputs[name]
    content = np.asarray(held.content[row]).tobytes()
    if not any(content):
        return f"another size: {int(sizes(samples, np.array([row]), name)[0])} bytes"
    return content.hex() if held.line is None else content.hex()[: HASH_BYTES // 2]


@dataclass(slots=True, kw_only=True)
class Compared:
    """A snapshot's samples (S) against a listing, in columns."""

    samples: SampleTable
    now: Listing
    state: NDArray[np.uint8]
    """(S,) a ``State`` each."""
    listing_row: NDArray[np.int64]
    """(S,) row of the listing's samples; -1: none."""
    new: NDArray[np.intp]
    """Rows of the listing that the snapshot neither has nor rejected: missing, not built."""
    others: tuple[Finding, ...] = ()
    """On samples and records that the snapshot rejected, or that are rejected now."""
    _details: dict[int, tuple[str, str]] = field(default_factory=dict, repr=False)
    """Row -> reason and words, if the state does not say it all."""

    @property
    def checked(self) -> int:
        """Samples that were looked at."""
        return int((self.state != State.NOT_CHECKED).sum())

    def rows(self, state: State) -> NDArray[np.intp]:
        """Samples in a state."""
        return np.flatnonzero(self.state == state)

    def finding(self, row: int) -> Finding:
        """Return the finding about one sample."""
        state, now = State(int(self.state[row])), int(self.listing_row[row])
        (path, line), (cause, words) = self.samples.where(row), self._details.get(row, ("", ""))
        name = cause if state == State.INPUT_CHANGED else ""
        return Finding(
            category=state.category,
            reason=f"{name}-changed" if name else cause if state == State.UNREADABLE else state.reason,
            path=path,
            line=line,
            field=name,
            expected=_value(self.samples, row, state),
            found=words or (_value(self.now.samples, now, state) if now >= 0 else _gone(line)),
            hint=state.hint if name or not cause else hint_for(cause),
        )


def compare(
    samples: SampleTable,
    now: Listing,
    *,
    rejected: Sequence[Rejected] = (),
    chosen: NDArray[np.bool_] | None = None,
    inputs: Collection[str] = (),
) -> Compared:
    """Compare a snapshot's samples with DATA as it is now.

    Args:
        samples: Of the snapshot.
        now: Of DATA, scanned with these samples as ``known``, and with ``rejected`` and ``chosen``.
        rejected: What the snapshot rejected and has no sample for.
        chosen: (S,) samples to look at; all by default.
        inputs: Those that fields are made of; masks and control images are compared if they are among them.
    """
    own_input = "record" if now.data_kind == "records" else "image"
    if own_input == "record":
        state, listing_row = _records_paired(samples, now.samples, rejected)
    else:
        labels, there = Strings.of(item.label for item in rejected), now.samples.names
        listing_row = np.concatenate([match_names(samples.names, there), match_names(labels, there)])
        state = np.full(len(listing_row), State.OK, dtype=np.uint8)
    count, matched = len(samples), np.zeros(len(now.samples) + 1, dtype=np.bool_)
    matched[listing_row] = True  # the last one is for -1
    new = np.flatnonzero(~matched[:-1])
    compared = Compared(samples=samples, now=now, state=state[:count], listing_row=listing_row[:count], new=new)
    if chosen is not None:
        compared.state[~chosen] = State.NOT_CHECKED
    if now.samples is not samples:
        rows = np.flatnonzero((compared.state == State.OK) & (compared.listing_row >= 0))
        _contents(compared, rows, own_input)
        for name in sorted(set(inputs).intersection(samples.inputs) - {own_input, "caption"}):
            _contents(compared, rows[compared.state[rows] <= State.TOUCHED], name)
        if own_input == "image":
            _columns(compared, rows)
    reasons = {item.label: item for item in (*now.notes, *now.rejected) if own_input == "image" or not item.line}
    rows = np.flatnonzero((compared.state == State.OK) & (compared.listing_row < 0))
    compared.state[rows] = State.REMOVED
    of_file = np.asarray(samples.inputs[own_input].file)[rows]
    names = samples.files.names.take(of_file) if own_input == "record" else samples.names.take(rows)
    for row, name in zip(rows.tolist(), names, strict=True) if reasons else ():
        compared.state[row], words = _absent(name, reasons)
        if words[1]:
            compared._details[row] = words
    _rejected(compared, own_input, rejected, state[count:], listing_row[count:], reasons)
    return compared


def _contents(compared: Compared, rows: NDArray[np.intp], name: str) -> None:
    """Compare one input of samples, and the stat of the files that hold their own one."""
    state, now, listing_row = compared.state, compared.now, compared.listing_row
    before, after, files = compared.samples.inputs[name], now.samples.inputs.get(name), compared.samples.files
    then = np.asarray(before.file)[rows]
    there = np.full(len(rows), -1) if after is None else np.asarray(after.file)[listing_row[rows]]
    other = (then < 0) != (there < 0)
    for row, gone in zip(rows[other].tolist(), (there < 0)[other].tolist(), strict=True):
        state[row] = State.INPUT_CHANGED
        compared._details[row] = (name, f"no {name} any more" if gone else f"a {name} that was not there")
    both = (then >= 0) & (there >= 0)
    if after is None or not both.any():
        return
    rows, then, there = rows[both], then[both], there[both]
    content = np.asarray(before.content)[rows]
    same = equal_hashes(content, np.asarray(after.content)[listing_row[rows]])
    is_own = name == next(iter(compared.samples.inputs))
    for row in rows[~same & content.any(axis=1)].tolist():  # of a cache of captions no image was read
        error = now.unread.get((name, int(listing_row[row])))
        state[row], words = _unusable(error.slug, error.what) if error else (State.CHANGED, ("", ""))
        if not is_own:
            path = places(now.samples, listing_row[[row]], name)[0]["path"]
            detail = words[1] or _content(now.samples, int(listing_row[row]), name)
            state[row], words = State.INPUT_CHANGED, (name, f"{path}: {detail}")
        if words[1]:
            compared._details[row] = words
    if is_own:
        where = np.full(len(files), -1, dtype=np.int64)
        where[then] = there  # one for all samples of a file
        matched, touched = np.flatnonzero(where >= 0), np.zeros(len(files), dtype=np.bool_)
        equal = (np.asarray(files.content)[matched] == now.samples.files.content[where[matched]]).all(axis=1)
        moved = (np.asarray(files.stat)[matched, :5] != now.samples.files.stat[where[matched], :5]).any(axis=1)
        touched[matched] = equal & moved
        state[rows[same & content.any(axis=1) & touched[then]]] = State.TOUCHED


def _columns(compared: Compared, rows: NDArray[np.intp]) -> None:
    """Compare captions, columns and repeats."""
    state, columns = compared.state, dict[State, Callable[[SampleTable], Any]]()
    if "caption" in compared.samples.inputs:
        columns[State.CAPTION_CHANGED] = lambda samples: samples.inputs["caption"].content
    if any(name.startswith(OF_TABLE) for name in (*compared.samples.columns, *compared.now.samples.columns)):
        columns[State.COLUMN_CHANGED] = _of_table
    columns[State.REPEATS_CHANGED] = repeats_of
    for word, column in columns.items():
        rows = rows[state[rows] <= State.TOUCHED]
        before, later = column(compared.samples), column(compared.now.samples)
        if before is not later:
            differs = np.asarray(before)[rows] != np.asarray(later)[compared.listing_row[rows]]
            state[rows[differs.any(axis=tuple(range(1, differs.ndim)))]] = word


def _of_table(samples: SampleTable, rows: slice = slice(None)) -> NDArray[Any]:
    """(n,) what a metadata table has beside the caption of each sample, as text."""
    texts = np.array([""] * len(range(len(samples))[rows]), dtype=object)
    for name in sorted(name for name in samples.columns if name.startswith(OF_TABLE)):
        label = name.removeprefix(OF_TABLE)
        texts += [f"{label} {value}; " for value in table_values(samples.columns[name][rows])]
    return texts


def _rejected(
    compared: Compared,
    own_input: str,
    then: Sequence[Rejected],
    state: NDArray[np.uint8],
    listing_row: NDArray[np.int64],
    reasons: Mapping[str, Rejected],
) -> None:
    """Files and records that are rejected now, and (R,) those that the snapshot rejected."""
    now, first = compared.now, dict[str, Rejected]()
    for item in compared.now.rejected:  # two entries of dataset_info.json may reject one record: as a build counts
        first.setdefault(item.label, item)
    still = Strings.of(first)
    is_sample = match_names(still, compared.samples.names) >= 0 if own_input == "image" else [False] * len(still)
    others = [_quarantined(item) for item, is_one in zip(first.values(), is_sample, strict=True) if not is_one]
    labels, before = set(still), {item.label for item in then}
    moved = Counter(_but_line(item) for item in first.values() if item.label not in before)
    for item, word, row in zip(then, state.tolist(), listing_row.tolist(), strict=True):
        if row >= 0 and own_input == "image":
            others.append(_image_rejected(now, item, row))
        elif row >= 0 and word != State.CHANGED:
            others.append(_quarantined(item, line=now.samples.where(row)[1]))
        elif row >= 0:
            others.append(_recorded(item, ("stale", "source-changed"), _value(now.samples, row, State.CHANGED)))
        elif item.label not in labels and moved[_but_line(item)] > 0:  # it is among those of now
            moved[_but_line(item)] -= 1
        elif item.label not in labels:
            became, (cause, words) = _absent(item.name, reasons)
            reason = cause if became == State.UNREADABLE else became.reason
            others.append(_recorded(item, (became.category, reason), words))
    compared.others = tuple(others)


def _but_line(item: Rejected) -> tuple[str, ...]:
    """What is said of a record, wherever it is in its file."""
    return item.name, item.reason, item.field, item.detail


def _image_rejected(now: Listing, item: Rejected, row: int) -> Finding:
    """A sample that the snapshot rejected: still so, or something else by now."""
    kind, inputs = field_kind(item.target) if item.target else None, now.samples.inputs
    names = kind.inputs if kind is not None else ("image",)
    there = [name for name in names if name in inputs]
    there = [name for name in there if inputs[name].text is not None or inputs[name].file[row] >= 0]
    contents = [np.asarray(inputs[name].content[row]).tobytes() for name in there]
    content = contents[0] if len(contents) == 1 else content_hash(b"".join(contents))
    error = next((now.unread[name, row] for name in there if (name, row) in now.unread), None)
    if item.reason.startswith("caption") or (there == ["caption"] and content != (item.content or bytes(HASH_BYTES))):
        return _recorded(item, ("stale", "caption-changed"), _value(now.samples, row, State.CAPTION_CHANGED))
    state, (_, words) = _unusable(error.slug, error.what) if error else (State.CHANGED, ("", content.hex()))
    lacking = not item.content and (error is not None or len(there) < len(names))
    if content == item.content or state != State.CHANGED or lacking or there == ["caption"]:
        return _quarantined(item)
    if item.content or item.reason not in _GONE:
        return _recorded(item, ("stale", "source-changed"), words)
    return _recorded(item, ("missing", "not-built"), f"rejected as {item.reason}; it can be read now")


def _records_paired(
    samples: SampleTable, now: SampleTable, rejected: Sequence[Rejected]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(S + R,) state and row of the listing of each record and each rejected one, by place and content."""
    state = np.full(len(samples) + len(rejected), State.OK, dtype=np.uint8)
    listing_row = np.full(len(state), -1, dtype=np.int64)
    if now is samples:  # no file has changed
        listing_row[: len(samples)] = np.arange(len(samples))
        return state, listing_row
    old, new, numbers = samples.inputs["record"], now.inputs["record"], dict[str, int]()
    assert old.line is not None
    assert new.line is not None

    def numbered(names: Iterable[str]) -> NDArray[np.int64]:
        return np.array([numbers.setdefault(name, len(numbers)) for name in names], dtype=np.int64)

    content = hash_rows(item.content or bytes(HASH_BYTES) for item in rejected)
    mine = (
        np.concatenate(
            [numbered(samples.files.names)[np.asarray(old.file)], numbered(item.name for item in rejected)]
        ),
        np.concatenate([np.asarray(old.line), np.array([item.line for item in rejected], dtype=np.uint32)]),
        np.concatenate([np.asarray(old.content), content]),
    )
    theirs = numbered(now.files.names)[new.file], new.line, new.content
    left, right = np.arange(len(state)), np.arange(len(now))
    for word in (State.OK, State.MOVED, State.CHANGED):
        old_at, new_at = _pairs(_keys(mine, word)[left], _keys(theirs, word)[right])
        if word != State.CHANGED:  # two contents of one key: a chance of 2**-64
            equal = equal_hashes(mine[2][left[old_at]], theirs[2][right[new_at]])
            old_at, new_at = old_at[equal], new_at[equal]
        state[left[old_at]] = word
        listing_row[left[old_at]] = right[new_at]
        left, right = np.delete(left, old_at), np.delete(right, new_at)
    return state, listing_row


def _keys(columns: Sequence[NDArray[Any]], word: State) -> NDArray[np.uint64]:
    """(n,) a number for each row: its file, its line unless it may move, its content unless that may change."""
    file, line, content = columns
    key = file.astype(np.uint64) << np.uint64(32) | line.astype(np.uint64) * np.uint64(word != State.MOVED)
    if word == State.CHANGED:
        return key
    return key * np.uint64(0x9E37_79B9_7F4A_7C15) ^ np.ascontiguousarray(content).view(np.uint64)[:, 0]


def _pairs(mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of equal keys in both; the k-th of several equal ones is paired with the k-th."""
    if np.array_equal(mine, theirs):
        return np.arange(len(mine)), np.arange(len(mine))
    order, other = np.argsort(mine, kind="stable"), np.argsort(theirs, kind="stable")
    mine, theirs = mine[order], theirs[other]
    rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
    position = np.searchsorted(theirs, mine) + rank
    inside = np.flatnonzero(position < len(theirs))
    matched = inside[theirs[position[inside]] == mine[inside]]
    return order[matched], other[position[matched]]


def _absent(name: str, reasons: Mapping[str, Rejected]) -> tuple[State, tuple[str, str]]:
    """Find the state of a sample that is not in the listing; ``reasons`` is what the listing says of names."""
    folders = [*above(name)][1:-1]
    named = (name, name.rpartition(":")[0], *folders, *(folder + "/" for folder in folders))
    now = next((reasons[label] for label in named if label in reasons), None)
    if now is None:
        return State.REMOVED, ("", "")
    if now.name != name and now.reason not in _UNREADABLE:  # its folder is passed over as a whole
        return State.REMOVED, ("", f"{now.name}: {now.reason}, {now.detail}")
    return _unusable(now.reason, now.detail)


def _unusable(cause: str, detail: str) -> tuple[State, tuple[str, str]]:
    if cause in _UNREADABLE:
        return State.UNREADABLE, (cause, detail)
    if cause in _GONE:
        return State.REMOVED, (cause, detail)
    return State.CAPTION_CHANGED if cause.startswith("caption") else State.CHANGED, (cause, f"{cause}: {detail}")


def _gone(line: int) -> str:
    return f"its {'record' if line else 'file'} is gone"


def _quarantined(item: Rejected, line: int = 0) -> Finding:
    return replace(Finding.of_rejected("quarantined", item), line=line or item.line, target="")


def _recorded(item: Rejected, became: tuple[str, str], words: str) -> Finding:
    category, reason = became
    return Finding(
        category=category,
        reason=reason,
        path=item.name,
        line=item.line,
        expected=item.content.hex() or f"rejected as {item.reason}",
        found=words or _gone(item.line),
        hint=HINTS[category],
    )
