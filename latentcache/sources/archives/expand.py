"""The images in archives as samples: those of unchanged archives from the snapshot, others from headers.

About 10 us a member. Images are not read here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UnusableSampleError
from latentcache.fields.table import Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.sources.archives.entries import read_archive
from latentcache.sources.archives.members import SPAN
from latentcache.sources.captions import Chosen
from latentcache.sources.causes import as_rejected, unused_lines
from latentcache.sources.known import Known, Scan, memo_row
from latentcache.sources.layouts.sets import CaptionRule, Layout
from latentcache.sources.reading import stat_source
from latentcache.sources.walk import Notes

_RULE = 1


@dataclass(slots=True, kw_only=True)
class Archives:
    """The archives of a layout, in the byte order of their names, at the end of the files."""

    layout: Layout
    names: list[str] = field(default_factory=list)
    owner: list[int] = field(default_factory=list)
    """The set of each."""
    memos: NDArray[np.uint64]
    """(n, 6) their stats."""
    first: int
    """Position of the first one among the files."""

    @classmethod
    def of(cls, layout: Layout, first: int, bad: list[Rejected]) -> Archives:
        """Those that can be looked up; others go to ``bad``."""
        owners = {name: number for number, one in enumerate(layout.sets) for name in one.files}
        names, owner, memos = list[str](), list[int](), [np.zeros((0, 6), dtype=np.uint64)]
        for name in sorted(owners, key=os.fsencode):
            try:
                memos.append(memo_row((*stat_source(layout.root / name).identity, 0))[None])
            except UnusableSampleError as error:
                bad.append(as_rejected(name, error))
                continue
            names.append(name)
            owner.append(owners[name])
        return cls(layout=layout, names=names, owner=owner, memos=np.concatenate(memos), first=first)

    def readings(self, asked: Scan, rules: Sequence[CaptionRule]) -> NDArray[np.uint8]:
        """(n, 16) how each is read."""
        columns = asked.image_column, asked.caption_column
        said = [
            (_RULE, columns, rule.reading, rule.text, rule.from_name and one.name)
            for one, rule in zip(self.layout.sets, rules, strict=True)
        ]
        each = [content_hash(repr(said[owner]).encode()) for owner in self.owner]
        return np.frombuffer(b"".join(each), dtype=np.uint8).reshape(-1, HASH_BYTES)

    def samples(
        self, asked: Scan, held: Known, rules: Sequence[CaptionRule], bad: list[Rejected], notes: Notes
    ) -> Chosen:
        """All samples of the archives. Those that cannot be read are added to ``bad``."""
        lacking = {above for item in asked.rejected if item.target for above in _above(item.name)}
        if lacking:  # the snapshot has no samples for these
            held.distrust(np.array([False] * self.first + [name in lacking for name in self.names]))
        files = np.arange(self.first, self.first + len(self.names))
        old = held.table.inputs["image"].line if held.table is not None else None
        trusted = files[held.place[files] >= 0] if old is not None else files[:0]
        own = {self.names[file - self.first] for file in trusted.tolist()}
        bad += [item for item in asked.rejected if own.intersection(_above(item.name))]
        for note in asked.notes:
            if note.reason != "no-caption" and own.intersection(_above(note.name)):
                notes.add(note)
        parts = [self._from_snapshot(held.table, *held.rows_in("image", trusted))]
        for file in np.setdiff1d(files, trusted).tolist():
            if asked.stopping():
                break
            try:
                parts.append(self._read(file, asked, rules, bad, notes))
            except UnusableSampleError as error:
                bad.append(as_rejected(self.names[file - self.first], error))
        return Chosen.joined(parts)

    def _from_snapshot(self, table: SampleTable | None, rows: NDArray[np.int64], file: NDArray[np.int64]) -> Chosen:
        held: dict[str, Any] = {"line": np.zeros(0), "member": np.zeros(0, np.uint32), "span": np.zeros((0, 2), "u8")}
        names: Sequence[str] = ()
        if table is not None and len(rows):
            caption, names = table.inputs["caption"], table.names.take(rows)
            line = True if caption.line is None else np.asarray(caption.line)[rows]
            held["line"] = (np.asarray(caption.file)[rows] >= 0) * line
            held["member"] = np.asarray(table.inputs["image"].line)[rows]
            held["span"] = np.asarray(table.columns[SPAN])[rows]
        own = [name[len(self.names[at - self.first]) :] for at, name in zip(file.tolist(), names, strict=True)]
        return self._chosen(file, texts=[""] * len(rows), own=own, known=rows, **held)

    def _read(
        self, file: int, asked: Scan, rules: Sequence[CaptionRule], bad: list[Rejected], notes: Notes
    ) -> Chosen:
        name, number = self.names[file - self.first], self.owner[file - self.first]
        found = read_archive(self.layout.root, name, self.layout.sets[number].archives, asked)
        bad += found.rejected
        rule, lines = rules[number], zip(found.line.tolist(), found.texts, strict=True)
        for note in (*found.notes, *unused_lines([(name, at) for at, text in lines if rule.unused_line(text)])):
            notes.add(note)
        texts, count = [rule.made(text) for text in found.texts], len(found.texts)
        chosen = self._chosen(
            np.full(count, file, dtype=np.int64),
            line=found.line * np.array([bool(text) for text in texts], dtype=np.bool_),
            texts=texts,
            member=found.line,
            span=found.span,
            own=found.names,
            known=np.full(count, -1, dtype=np.int64),
        )
        if asked.part is None:
            return chosen
        return chosen.take(np.array([asked.part.holds_name(name + own) for own in found.names], dtype=np.bool_))

    def _chosen(self, file: NDArray[np.int64], *, line: NDArray[Any], **columns: Any) -> Chosen:
        """Samples in archives; ``line``: members or rows with their captions, 0: they have none."""
        owner = np.array(self.owner, dtype=np.int64)[file - self.first]
        return Chosen(
            image=file,
            caption=np.where(line > 0, file, -1),
            which=np.full(len(file), -1, dtype=np.int8),
            owner=owner,
            repeats=np.array([one.repeats for one in self.layout.sets], dtype=np.int64)[owner],
            line=line.astype(np.uint32),
            **columns,
        )


def _above(name: str) -> list[str]:
    """A name, and those of the archives that it may be in."""
    return [name[:end] for end, letter in enumerate(name + "/") if letter == "/"]
