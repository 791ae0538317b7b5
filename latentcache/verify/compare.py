"""Compare the samples of a snapshot with those of DATA now: unchanged, changed, gone, or new.

Contents decide, never times. The scan has read every file whose stat memo is not trusted, unless its size says that
it changed. Records are matched as a multiset. They match by file, line and content, else by file and content: moved
to another line. Else they match by file and line: changed. Rejected records are matched likewise. Cost: 1 us per
sample.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceNotFoundError
from latentcache.fields.registry import field_kind
from latentcache.fields.strings import Strings
from latentcache.fields.table import OF_TABLE, Rejected, SampleTable, table_values
from latentcache.identity.content import HASH_BYTES, content_hash, equal_hashes
from latentcache.sources.causes import hint_for
from latentcache.sources.known import hash_rows, match_names
from latentcache.sources.layout import above
from latentcache.sources.locations import locations, sizes
from latentcache.sources.options import SourceOptions
from latentcache.sources.readers.folder import repeats_of
from latentcache.sources.scan import Listing, scan
from latentcache.verify.entries import Check
from latentcache.verify.findings import HINTS, Finding, Findings, Text

#: Reasons that mean "could not be looked at" rather than "is not usable".
_UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
_GONE = frozenset({"not-found", "unlisted", "hidden"})
#: How a record is paired with one of the listing.
_SAME, _MOVED, _CHANGED = range(3)
_OF_CAPTION = "a build records the new caption; it encodes embeddings alone"
_RECORDED_ONLY = "no entry is affected: a build only records the new value"
#: Gives a value of a sample as text.
Shown = Callable[[SampleTable, int], str]


def find_data(cache: Path, source: Mapping[str, Any], data: Path | None) -> Path:
    """The data that was named, else that of ``source``: as recorded, or moved together with the cache."""
    if data is not None:
        return data
    recorded = Path(str(source["root"]))
    relative = str(source.get("relative", ""))
    folders = [recorded, *([Path(cache, relative)] if relative else [])]
    for folder in folders:
        if folder.exists():
            return folder
    raise SourceNotFoundError(
        f"the data of this cache is gone: {recorded}",
        where=str(recorded),
        why="; ".join(f"nothing at {folder}" for folder in folders),
        fix=f"name it: `latentcache verify {shlex.quote(str(cache))} --data DATA`",
    )


def list_sources(check: Check, root: Path | None) -> Listing | None:
    """List what the data holds now; None: nothing. A check that reads opens sources of an unchanged stat, too."""
    if root is None:
        return None
    options = SourceOptions.from_json(check.snapshot.source.get("options", {}))
    with suppress(EmptySourceError):
        return scan(
            root,
            options,
            check.snapshot.samples,
            rejected=check.rejected_whole,
            notes=check.snapshot.notes,
            chosen=None if check.depth.slice is None else check.samples,
            full=check.depth.reads,
            recorded=options.folders,
        )
    return None


def compare_sources(check: Check, listing: Listing | None) -> None:
    """Compare the chosen samples with a listing; None: the data holds no samples now."""
    if listing is None:
        gone = "the data holds no samples now"
        check.findings.add("stale", "source-removed", np.flatnonzero(check.samples), found=gone)
        return
    kinds = (view.rows.kind for view in check.views.values())
    inputs = {name for kind in kinds if kind is not None for name in kind.inputs}
    compare(check.findings, listing, rejected=check.rejected_whole, chosen=check.samples, inputs=inputs)


def compare(
    findings: Findings,
    now: Listing,
    *,
    rejected: Sequence[Rejected] = (),
    chosen: NDArray[np.bool_],
    inputs: Collection[str] = (),
) -> None:
    """Compare a snapshot's samples with DATA as it is now.

    Args:
        findings: Of the snapshot's samples; gets those on samples, on what the snapshot rejected, on what is rejected
            now, and on what is new.
        now: Of DATA, scanned with these samples as ``known``, and with ``rejected``.
        rejected: What the snapshot rejected and has no sample for.
        chosen: (S,) samples to look at.
        inputs: Those that fields are made of; masks and control images are compared if they are among them.
    """
    samples = findings.table
    of_records = now.data_kind == "records"
    count = len(samples)
    if of_records:
        pairing, listing_row = _records_paired(samples, now.samples, rejected)
    else:
        labels = Strings.of(item.label for item in rejected)
        there = now.samples.names
        listing_row = np.concatenate([match_names(samples.names, there), match_names(labels, there)])
        pairing = np.full(len(listing_row), _SAME, dtype=np.uint8)
    own_input = "record" if of_records else "image"
    comparison = _Comparison(findings, now, listing_row[:count])
    changed, moved = (np.flatnonzero(chosen & (pairing[:count] == word)) for word in (_CHANGED, _MOVED))
    comparison.add("stale", "source-changed", changed, _own_content)
    comparison.add("touched", "line-changed", moved, lambda table, row: f"line {table.where(row)[1]}")
    rows = np.flatnonzero(chosen & (listing_row[:count] >= 0) & (pairing[:count] == _SAME))
    if now.samples is not samples:
        comparison.own_input(own_input, rows)
        for name in sorted(set(inputs).intersection(samples.inputs) - {own_input, "caption"}):
            comparison.other_input(name, rows)
        if not of_records:
            comparison.columns(rows)
    reasons = {item.label: item for item in (*now.notes, *now.rejected) if not (of_records and item.line)}
    comparison.removed(own_input, np.flatnonzero(chosen & (listing_row[:count] < 0)), reasons)
    _rejected(findings, now, rejected, pairing[count:], listing_row[count:])
    is_new = np.ones(len(now.samples) + 1, dtype=np.bool_)
    is_new[listing_row] = False  # the last one is for -1
    new = Findings(now.samples)
    new.add("missing", "not-built", np.flatnonzero(is_new[:-1]))
    findings.others += new.result(is_new[:-1])


class _Comparison:
    """Collects the findings on samples, (n,) rows of a snapshot's table, whose rows in the listing are known."""

    def __init__(self, findings: Findings, now: Listing, listing_row: NDArray[np.int64]) -> None:
        self.findings, self.samples, self.now, self.listing_row = findings, findings.table, now, listing_row
        self.is_unusable = np.zeros(len(self.samples), dtype=np.bool_)
        """(S,) samples whose file cannot be used now."""

    def add(self, category: str, reason: str, rows: NDArray[np.intp], shown: Shown, hint: str = "") -> None:
        """Add samples whose value, as ``shown`` in text, is another one now."""
        expected, actual = (
            lambda at: shown(self.samples, int(rows[at])),
            lambda at: shown(self.now.samples, int(self.listing_row[rows[at]])),
        )
        self.findings.add(category, reason, rows, expected=expected, found=actual, hint=hint)

    def removed(self, own_input: str, rows: NDArray[np.intp], reasons: Mapping[str, Rejected]) -> None:
        """Compare samples that the listing lacks; ``reasons`` is what it says of names."""
        names = self.samples.names.take(rows)
        if own_input == "record":
            names = self.samples.files.names.take(np.asarray(self.samples.inputs["record"].file)[rows])
        for row, name in zip(rows.tolist(), names, strict=True) if reasons else ():
            if (item := _reason_of(name, reasons)) is not None:
                self.unusable(row, item.reason, item.detail)
        rows = rows[~self.is_unusable[rows]]
        gone = f"its {'record' if own_input == 'record' else 'file'} is gone"
        self.findings.add("stale", "source-removed", rows, expected="the sample", found=gone)

    def own_input(self, name: str, rows: NDArray[np.intp]) -> None:
        """Compare the contents that samples are made of, and the stat of their files."""
        before = self.samples.inputs[name]
        after = self.now.samples.inputs[name]
        files = self.samples.files
        has_file = np.asarray(before.file)[rows] >= 0
        rows = rows[has_file & (np.asarray(after.file)[self.listing_row[rows]] >= 0)]
        now_rows = self.listing_row[rows]
        content = np.asarray(before.content)[rows]
        is_known = content.any(axis=1)  # of a cache of captions no image was read
        same = equal_hashes(content, np.asarray(after.content)[now_rows])
        changed = rows[~same & is_known]
        for row in changed.tolist() if self.now.unread else ():
            if (error := self.now.unread.get((name, int(self.listing_row[row])))) is not None:
                self.unusable(row, error.slug, error.what)
        self.add("stale", "source-changed", changed[~self.is_unusable[changed]], _own_content)
        then = np.asarray(before.file)[rows]
        later = self.now.samples.files
        file_now = np.full(len(files), -1, dtype=np.int64)
        file_now[then] = np.asarray(after.file)[now_rows]  # one for all samples of a file
        matched = np.flatnonzero(file_now >= 0)
        touched = np.zeros(len(files), dtype=np.bool_)
        equal = (np.asarray(files.content)[matched] == later.content[file_now[matched]]).all(axis=1)
        moved = (np.asarray(files.stat)[matched, :5] != later.stat[file_now[matched], :5]).any(axis=1)
        touched[matched] = equal & moved
        self.findings.add("touched", "stat-changed", rows[same & is_known & touched[then]])

    def other_input(self, name: str, rows: NDArray[np.intp]) -> None:
        """Compare masks or control images of samples."""
        before = self.samples.inputs[name]
        after = self.now.samples.inputs.get(name)
        now_rows = self.listing_row[rows]
        had = np.asarray(before.file)[rows] >= 0
        has = np.zeros(len(rows), dtype=np.bool_) if after is None else np.asarray(after.file)[now_rows] >= 0

        def add(changed: NDArray[np.bool_], text: Text) -> None:
            hint = "a build makes it again for this sample, and nothing else"
            self.findings.add("stale", f"{name}-changed", rows[changed], field=name, found=text, hint=hint)

        add(had & ~has, f"no {name} any more")
        add(has & ~had, f"a {name} that was not there")
        if after is not None:
            content = np.asarray(before.content)[rows]
            later = np.asarray(after.content)[now_rows]
            changed = had & has & content.any(axis=1) & ~equal_hashes(content, later)
            now_rows = now_rows[changed]

            def change_text(at: int) -> str:
                error = self.now.unread.get((name, int(now_rows[at])))
                path = locations(self.now.samples, now_rows[[at]], name)[0]["path"]
                return f"{path}: {'it was changed' if error is None else error.what}"

            add(changed, change_text)

    def columns(self, rows: NDArray[np.intp]) -> None:
        """Compare captions, columns of tables and repeats of samples."""
        then = self.samples
        later = self.now.samples
        columns: list[tuple[str, Callable[[SampleTable], Any], Shown, str]] = []
        if "caption" in then.inputs:
            columns.append(("caption", lambda table: table.inputs["caption"].content, _caption, _OF_CAPTION))
        if any(name.startswith(OF_TABLE) for name in (*then.columns, *later.columns)):
            columns.append(("column", _of_table, lambda table, row: _of_table(table, [row])[0], _RECORDED_ONLY))
        columns.append(
            ("repeats", repeats_of, lambda table, row: f"{repeats_of(table)[row]} repeats per epoch", _RECORDED_ONLY)
        )
        for name, column, shown, hint in columns:
            before, after = column(then), column(later)
            if before is not after:
                differs = np.asarray(before)[rows] != np.asarray(after)[self.listing_row[rows]]
                changed = rows[differs.any(axis=tuple(range(1, differs.ndim)))]
                self.add("stale", f"{name}-changed", changed, shown, hint)

    def unusable(self, row: int, cause: str, detail: str) -> None:
        """Add a sample whose file cannot be used now."""
        self.is_unusable[row] = True
        sample = np.array([row])
        hint = hint_for(cause)
        if cause in _UNREADABLE:
            expected = "a file that can be read"
            self.findings.add("unverifiable", cause, sample, expected=expected, found=detail, hint=hint)
            return
        reason = "caption-changed" if cause.startswith("caption") else "source-changed"
        if cause in _GONE:
            reason = "source-removed"
        else:
            detail = f"{cause}: {detail}"
        self.findings.add("stale", reason, sample, expected="the sample", found=detail, hint=hint)


def _own_content(samples: SampleTable, row: int) -> str:
    """The content hash of a sample in hex, or the size of a file that was not read."""
    name, column = next(iter(samples.inputs.items()))
    content = np.asarray(column.content[row]).tobytes()
    if not any(content):
        return f"another size: {int(sizes(samples, np.array([row]), name)[0])} bytes"
    return content.hex() if column.line is None else content.hex()[: HASH_BYTES // 2]


def _caption(samples: SampleTable, row: int) -> str:
    text = samples.inputs["caption"].text
    caption = text[row] if text is not None else ""
    return (caption if len(caption) <= 80 else caption[:79] + "…") or "(no caption)"


def _of_table(samples: SampleTable, rows: Any = slice(None)) -> NDArray[Any]:
    """(n,) what a metadata table has beside the caption of each sample, as text."""
    texts = np.full(len(np.arange(len(samples))[rows]), "", dtype=object)
    for name in sorted(name for name in samples.columns if name.startswith(OF_TABLE)):
        label = name.removeprefix(OF_TABLE)
        texts += [f"{label} {value}; " for value in table_values(samples.columns[name][rows])]
    return texts


def _rejected(
    findings: Findings,
    now: Listing,
    then: Sequence[Rejected],
    pairing: NDArray[np.uint8],
    listing_row: NDArray[np.int64],
) -> None:
    """Add findings on files and records that are rejected now, and (R,) on those that the snapshot rejected."""
    of_records = now.data_kind == "records"
    by_label = dict[str, Rejected]()
    for item in now.rejected:
        by_label.setdefault(item.label, item)
    is_sample = match_names(Strings.of(by_label), findings.table.names) >= 0
    for item, known in zip(by_label.values(), is_sample.tolist(), strict=True):
        if of_records or not known:
            findings.others.append(_quarantined(item))
    for item, word, row in zip(then, pairing.tolist(), listing_row.tolist(), strict=True):
        if row < 0:  # it is gone, or the source rejects it again
            continue
        if of_records:
            change = ("source-changed", _own_content(now.samples, row)) if word == _CHANGED else None
        else:
            change = _image_change(now, item, row)
        if change is None:
            findings.others.append(_quarantined(item, now.samples.where(row)[1]))
            continue
        finding = Finding(
            category="stale",
            reason=change[0],
            path=item.name,
            line=item.line,
            expected=item.content.hex() or f"rejected as {item.reason}",
            found=change[1],
            hint=HINTS["stale"],
        )
        findings.others.append(finding)


def _image_change(now: Listing, item: Rejected, row: int) -> tuple[str, str] | None:
    """Reason and new value if a rejected sample is another one by now; None: it is the same, as far as is known."""
    kind = field_kind(item.target) if item.target else None
    inputs = now.samples.inputs
    names = kind.inputs if kind is not None else ("image",)
    there = [name for name in names if name in inputs]
    there = [name for name in there if inputs[name].text is not None or inputs[name].file[row] >= 0]
    contents = [np.asarray(inputs[name].content[row]).tobytes() for name in there]
    content = contents[0] if len(contents) == 1 else content_hash(b"".join(contents))
    of_caption = there == ["caption"]
    if item.reason.startswith("caption") or (of_caption and content != (item.content or bytes(HASH_BYTES))):
        return "caption-changed", _caption(now.samples, row)
    is_lacking = not item.content and len(there) < len(names)
    if of_caption or content == item.content or is_lacking or any((name, row) in now.unread for name in there):
        return None
    return "source-changed", content.hex()


def _records_paired(
    samples: SampleTable, now: SampleTable, rejected: Sequence[Rejected]
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """(S + R,) how each record and each rejected one is paired, and its row of the listing, or -1."""
    pairing = np.full(len(samples) + len(rejected), _SAME, dtype=np.uint8)
    listing_row = np.full(len(pairing), -1, dtype=np.int64)
    if now is samples:  # no file has changed
        listing_row[: len(samples)] = np.arange(len(samples))
        return pairing, listing_row
    old = samples.inputs["record"]
    new = now.inputs["record"]
    numbers = dict[str, int]()
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
    left, right = np.arange(len(pairing)), np.arange(len(now))
    for word in (_SAME, _MOVED, _CHANGED):
        old_at, new_at = _pairs(_keys(mine, word)[left], _keys(theirs, word)[right])
        if word != _CHANGED:  # two contents of one key: a chance of 2**-64
            equal = equal_hashes(mine[2][left[old_at]], theirs[2][right[new_at]])
            old_at = old_at[equal]
            new_at = new_at[equal]
        pairing[left[old_at]] = word
        listing_row[left[old_at]] = right[new_at]
        left, right = np.delete(left, old_at), np.delete(right, new_at)
    return pairing, listing_row


def _keys(columns: Sequence[NDArray[Any]], word: int) -> NDArray[np.uint64]:
    """(n,) a number for each row: its file, its line unless it may move, its content unless that may change."""
    file, line, content = columns
    key = file.astype(np.uint64) << np.uint64(32) | line.astype(np.uint64) * np.uint64(word != _MOVED)
    if word == _CHANGED:
        return key
    return key * np.uint64(0x9E37_79B9_7F4A_7C15) ^ np.ascontiguousarray(content).view(np.uint64)[:, 0]


def _pairs(mine: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Positions of equal keys in both; the k-th of several equal ones is paired with the k-th."""
    if np.array_equal(mine, theirs):
        return np.arange(len(mine)), np.arange(len(mine))
    order, other = np.argsort(mine, kind="stable"), np.argsort(theirs, kind="stable")
    mine = mine[order]
    theirs = theirs[other]
    rank = np.arange(len(mine)) - np.searchsorted(mine, mine)
    position = np.searchsorted(theirs, mine) + rank
    inside = np.flatnonzero(position < len(theirs))
    matched = inside[theirs[position[inside]] == mine[inside]]
    return order[matched], other[position[matched]]


def _reason_of(name: str, reasons: Mapping[str, Rejected]) -> Rejected | None:
    """The reason that the listing has for a file that it lacks, or for its archive or folder as a whole."""
    folders = [*above(name)][1:-1]
    labels = (name, name.rpartition(":")[0], *folders, *(folder + "/" for folder in folders))
    item = next((reasons[label] for label in labels if label in reasons), None)
    if item is None or item.name == name or item.reason in _UNREADABLE:
        return item
    return replace(item, reason="hidden", detail=f"{item.name}: {item.reason}, {item.detail}")


def _quarantined(item: Rejected, line: int = 0) -> Finding:
    return replace(Finding.of_rejected("quarantined", item), line=line or item.line, target="")
