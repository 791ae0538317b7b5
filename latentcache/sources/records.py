"""What a source of text hands over: records, one for each document, and a word on every line that is none.

A record is one line of JSON, one text or one conversation after its fields were mapped. Its content hash is made of
what was mapped and of nothing else: where it stands, the other columns of its line and the spelling of its JSON do
not matter, so a line that moves or is written otherwise is tokenised once. Plain data: no torch, no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.identity.content import HASH_BYTES, content_hash
from latentcache.identity.stat import StatMemo
from latentcache.sources.sample import Refusal
from latentcache.sources.share import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation."""

    role: str
    """As chat templates know it: system, developer, user, assistant or tool."""
    content: str
    learned: bool = False
    """Whether the turn carries loss where only the assistant's turns do."""
    fields: tuple[tuple[str, str], ...] = ()
    """What else the template is given: (name, JSON), as ``tool_calls`` and ``reasoning_content``, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One document to be, with exactly one of ``text`` and ``messages``."""

    source: str
    """Its file, relative to the data folder with ``/``."""
    line: int
    """Its line or row there, from 1; 1 for a text that is a file."""
    content: bytes
    """16 bytes: the hash of what follows."""
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    """A system message, if there is one, is the first."""
    tools: str = ""
    """JSON list of the tools that the template is told of; empty without any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource:
    """One file that was read to its end."""

    name: str
    """Relative to the data folder with ``/``."""
    stat: StatMemo
    """Of the bytes that were hashed."""
    content: bytes
    """16 bytes: the hash of all its bytes."""
    records: int
    refused: int
    reading: bytes = bytes(HASH_BYTES)
    """16 bytes: how it was read, as in :class:`UnreadFile`; zeros where nobody said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadFile:
    """One file that a pass reads, before it is opened."""

    name: str
    """As sources are named."""
    path: Path
    reading: bytes
    """16 bytes: the hash of how it is read. Equal bytes read alike make equal records."""
    only_texts: bool = False
    """Whether no conversation can be in it, as its name or its form says."""


@dataclass(slots=True)
class RecordLog:
    """What a pass over the records has met so far."""

    sources: list[RecordSource] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    """Records and whole files that are not used."""
    notes: list[Refusal] = field(default_factory=list)


class RecordScan:
    """The records of a data folder in the order of its files and lines, read as they are asked for.

    Each iteration reads the files again. ``sources``, ``refused`` and ``notes`` are those of the latest one and are
    whole when it has ended. Memory does not grow with the files, but for one item per refused record.

    Args:
        root: The folder that names of sources are relative to.
        read: Yields the records and logs the rest; passes over the files that are named to it, and, where it is
            told so, over what comes after the first record of each file.
        files: The files, in their order.
        without: Names of files to pass over.
        share: Give the records of this share alone. Refusals are those of all: a line that is no record is in none.
    """

    def __init__(
        self,
        root: Path,
        read: Callable[[RecordLog, Collection[str], bool], Iterator[Record]],
        files: tuple[UnreadFile, ...] = (),
        without: Collection[str] = (),
        share: Share | None = None,
    ) -> None:
        self.root, self.files, self.share = root, files, share
        self._read, self._without = read, without
        self._log = RecordLog()

    def but(self, names: Collection[str]) -> RecordScan:
        """The same without some files, which are not opened."""
        return RecordScan(self.root, self._read, self.files, frozenset([*self._without, *names]), self.share)

    def __iter__(self) -> Iterator[Record]:
        """Every record of the share that can be used.

        Raises:
            SourceError: A file cannot be read, is no text, or changed while it was read.
        """
        self._log = RecordLog()
        records, share = self._read(self._log, self._without, False), self.share
        return records if share is None else (record for record in records if share.holds(record.content))

    def firsts(self) -> Iterator[Record]:
        """The first usable record of each file, whoever's share it is; a file is opened when its record is asked for.

        Nothing of it is in ``sources``, ``refused`` and ``notes``.

        Raises:
            SourceError: A file cannot be read as far as that.
        """
        return self._read(RecordLog(), self._without, True)

    def stats(self) -> Iterator[tuple[str, StatMemo | None, bytes]]:
        """(name, stat, hash of how it is read) of each file now; no stat of one that has none."""
        for file in self.files:
            try:
                stat = StatMemo.of(file.path.stat())
            except OSError:
                stat = None
            yield file.name, stat, file.reading

    @property
    def reading(self) -> int:
        """Position in ``sources`` that the file of the latest record will have; a file may be there several times."""
        return len(self._log.sources)

    @property
    def sources(self) -> tuple[RecordSource, ...]:
        """Files that were read to their end, in order."""
        return tuple(self._log.sources)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """Records and files that cannot be used."""
        return tuple(self._log.refused)

    @property
    def notes(self) -> tuple[Refusal, ...]:
        """What is neither used nor refused."""
        return tuple(self._log.notes)


def record_size(record: Record) -> int:
    """Characters of what is tokenised, templates aside."""
    if record.messages is None:
        return len(record.text or "")
    more = sum(len(value) for message in record.messages for _, value in message.fields)
    return sum(len(message.content) for message in record.messages) + more + len(record.tools)


def text_record(source: str, line: int, text: str) -> Record:
    """A text as a record.

    Raises:
        UnicodeEncodeError: There is half a surrogate pair in it.
    """
    return Record(source=source, line=line, content=content_hash(b"text\n" + text.encode()), text=text)


def chat_record(source: str, line: int, messages: tuple[Message, ...], tools: str = "") -> Record:
    """A conversation as a record.

    Raises:
        UnicodeEncodeError: There is half a surrogate pair in it.
    """
    turns = [[m.role, m.content, m.learned, m.fields] for m in messages]
    # Not canonical JSON: a template writes the names of a tool in the order they have.
    spelled = json.dumps([turns, tools], ensure_ascii=False, separators=(",", ":"))
    content = content_hash(b"chat\n" + spelled.encode())
    return Record(source=source, line=line, content=content, messages=messages, tools=tools)
