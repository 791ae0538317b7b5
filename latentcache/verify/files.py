"""Is this file still the one that was recorded? Reads and hashes files, several at a time, while there is time.

Contents decide, never times: a file that was only touched is not stale. Other bytes may hold the same pixels, as
after an edit of metadata; whoever can decode tells that apart. Cost: reading the file and 0.1 ms per MB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from latentcache.errors import UnusableSampleError
from latentcache.geometry.placement import Placement
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.recipe import Recipe
from latentcache.sources.reading import hint_for, read_source
from latentcache.verify.findings import Finding
from latentcache.verify.selection import Deadline

_THREADS = 4
#: Questions that a thread takes at a time: a future for each would cost a kilobyte a file.
_PART = 64
#: Questions that wait for the threads: each is half a kilobyte.
_WINDOW = 1 << 14
#: Causes of a refusal that mean "could not be looked at" rather than "is not usable".
UNREADABLE = frozenset({"permission", "io-error", "out-of-memory"})
#: Causes that mean that the file went away.
_GONE = frozenset({"not-found", "vanished"})


class SamePixels(Protocol):
    """Tells a metadata edit from a change: decoding is none of this folder's business."""

    def __call__(
        self, data: bytes, recipe: Recipe, size: Size, wanted: Sequence[tuple[Placement, bytes]]
    ) -> bool | None:
        """Whether a file still has the pixels that were encoded; None where that cannot be told here.

        Args:
            data: The file as it is now.
            recipe: Whose pixel profile was followed.
            size: Of the picture that was encoded.
            wanted: Each placement with its pixel hash.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One file to be compared with what was recorded of it."""

    name: str
    memo: StatMemo | None
    content: bytes
    number: int
    """Of the sample; below 0 for a file that is none."""


@dataclass(slots=True, kw_only=True)
class FileCheck:
    """Compares files with what was recorded of them."""

    root: Path
    deadline: Deadline
    pixels_of: Callable[[int, bytes], bool | None] | None = None
    """Whether the bytes hold the pixels of a sample, by its number."""
    hashed: int = 0
    unasked: list[int] = field(default_factory=list)
    """Numbers of the questions for which there was no time."""

    def ask(self, questions: Iterable[Question]) -> dict[int, Finding]:
        """What is to be said, by number: stale, touched or unverifiable; nothing where a file is as recorded."""
        found: dict[int, Finding] = {}
        waiting = iter(questions)
        pool = ThreadPoolExecutor(_THREADS)
        try:
            while several := list(islice(waiting, _WINDOW)):
                parts = [several[start : start + _PART] for start in range(0, len(several), _PART)]
                for part, answers in zip(parts, pool.map(self._answers, parts), strict=True):
                    self.hashed += len(answers)
                    self.unasked += [question.number for question in part[len(answers) :]]
                    named = zip(part, answers, strict=False)
                    found |= {question.number: answer for question, answer in named if answer is not None}
        finally:
            pool.shutdown(cancel_futures=True)  # after Ctrl-C only the reads in hand are waited for
        return found

    def _answers(self, questions: Sequence[Question]) -> list[Finding | None]:
        """Answers in order, as many as there is time for."""
        answers: list[Finding | None] = []
        for question in questions:
            if self.deadline.over:
                break
            answers.append(self._answer(question))
        return answers

    def _answer(self, question: Question) -> Finding | None:
        """Hash one file again."""
        try:
            data, memo = read_source(self.root / question.name)
        except UnusableSampleError as error:
            return unusable_now(question.name, error.slug, error.what)
        found = content_hash(data)
        if found != question.content:
            return self._changed(question, data, found)
        if question.memo is None or question.memo.same_stat(memo):
            return None
        return Finding(category="touched", reason="stat-changed", path=question.name)

    def _changed(self, question: Question, data: bytes, found: bytes) -> Finding:
        """Other bytes: other pixels too, or only other metadata?"""
        words, hint = found.hex(), ""
        if self.pixels_of is not None and question.number >= 0:
            same = self.pixels_of(question.number, data)
            if same:
                words += " (only metadata differs, the pixels are the same)"
                hint = "a build stores the latents it has under the new key and encodes nothing"
            elif same is None:
                words += " (whether the pixels differ was not looked at: resizing as this recipe does needs torch)"
        return Finding(
            category="stale",
            reason="source-changed",
            path=question.name,
            expected=question.content.hex(),
            found=words,
            hint=hint,
        )


def removed(name: str, found: str) -> Finding:
    """A file that is gone, or no longer among the pictures."""
    return Finding(category="stale", reason="source-removed", path=name, expected="the file", found=found)


def unusable_now(name: str, cause: str, detail: str) -> Finding:
    """A file of the generation that cannot be read, or not be used, as it is now."""
    if cause in UNREADABLE:
        return Finding(
            category="unverifiable",
            reason=cause,
            path=name,
            expected="a file that can be read",
            found=detail,
            hint=hint_for(cause),
        )
    if cause in _GONE:
        return removed(name, detail)
    words = cause.startswith("caption")
    return Finding(
        category="stale",
        reason="caption-changed" if words else "source-changed",
        path=name,
        expected="a caption that can be read" if words else "a picture that can be used",
        found=f"{cause}: {detail}",
        hint=hint_for(cause),
    )
