"""What a source hands over: samples that can be used, and a word on every file that cannot.

Guarantee: every picture file below the root is in exactly one of ``samples``, ``refused`` and ``notes``.
Names are relative to the root with ``/``; a name that is not UTF-8 carries its bytes as surrogate escapes
(``os.fsdecode``), so that ``os.fsencode(name)`` gives them back.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from latentcache.identity.stat import StatMemo


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One picture and its caption."""

    name: str
    """Path below the root."""
    caption: str
    """Empty when there is none."""
    stat: StatMemo
    """Of the picture file (of the target, for a symbolic link inside the root); ``seen_ns`` is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A file that is not used: as ``refused`` with a cause word, or as a note."""

    name: str
    cause: str
    """Stable word: truncated, empty, html, git-lfs, svg, not-regular, symlink-loop, caption-encoding, ..."""
    detail: str = ""
    """One sentence with the numbers: line, offset, expected and found."""
    hint: str = ""
    """What the user can do about it."""
    stat: StatMemo | None = None
    content: bytes = b""
    """Content hash, where the file was read (16 bytes); empty otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a data folder holds, samples in the byte order of their names."""

    root: Path
    samples: tuple[Sample, ...]
    refused: tuple[Refusal, ...] = ()
    notes: tuple[Refusal, ...] = ()
    caption_source: str = "none"
    """``sidecar``, ``metadata.csv``, ``metadata.jsonl`` or ``none``."""
