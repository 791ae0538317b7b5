"""Special tokens under names that no text has, and texts as a chat template gives them.

``<|im_end|>`` with id 7 becomes U+FDD0 ``7`` U+FDD1, in the tokenizer and in the output of a template. Content goes
through a template with its special-token text between marks, which are removed then. U+FDD0 to U+FDD2 are
noncharacters, never used in text that is interchanged (Unicode 16, chapter 23.7).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
Spans = Sequence[tuple[int, int]]


class Rendered(NamedTuple):
    """A record as one text."""

    text: str
    spans: Spans | None
    """(begin, end) of the parts with loss, in characters; rising, not overlapping. None: everything."""
    not_rendered: int = 0
    """Bits of ``fields.input_ids.NOT_RENDERED``."""
    is_chat: bool = True
    controls: int = 0
    """Occurrences of special-token text in the content."""


class SpecialTokens:
    """The special tokens of one tokenizer: added tokens that are special."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        special = [token for token in tokenizer.get("added_tokens") or () if token["special"] and token["content"]]
        self.ids = {str(token["content"]): int(token["id"]) for token in special}
        # The longest first, as the tokenizer matches them. Without any, a pattern that never matches.
        names = "|".join(re.escape(name) for name in sorted(self.ids, key=len, reverse=True)) or r"(?!)"
        self._names = re.compile(names)
        self._rendered = re.compile(f"{MARK}(?:{names}){MARK}|{MARK}|{names}")

    def count(self, text: str) -> int:
        """Occurrences of special-token text."""
        return sum(1 for _ in self._names.finditer(text))

    def mark(self, text: str) -> str:
        """Content for a template, its special-token text between marks."""
        return self._names.sub(f"{MARK}\\g<0>{MARK}", text)

    def first(self, rendered: str) -> tuple[str, int] | None:
        """The special token that a part of a template's output begins with, blanks aside, and its end; or None."""
        match = self._rendered.match(rendered, len(rendered) - len(rendered.lstrip()))
        return None if match is None or match.group()[0] == MARK else (match.group(), match.end())

    def last_end(self, rendered: str, begin: int, end: int) -> int:
        """End of the last special token in a part of a template's output; 0 if there is none."""
        found = self._rendered.finditer(rendered, begin, end)
        return max((match.end() for match in found if match.group()[0] != MARK), default=0)

    def rewrite(self, rendered: str, places: Sequence[int]) -> tuple[str, list[int]]:
        """A template's output with its special tokens under their other names, and the same (rising) places in it."""
        pieces: list[str] = []
        moved: list[int] = []
        done = length = 0
        for match in self._rendered.finditer(rendered):
            before = rendered[done : match.start()]
            while len(moved) < len(places) and places[len(moved)] <= match.start():
                moved.append(length + places[len(moved)] - done)
            found = match.group()
            name = found.strip(MARK) if found[0] == MARK else f"{OPEN}{self.ids[found]}{CLOSE}"
            pieces += [before, name]
            done, length = match.end(), length + len(before) + len(name)
            while len(moved) < len(places) and places[len(moved)] < match.end():
                moved.append(length)
        pieces.append(rendered[done:])
        moved += [length + place - done for place in places[len(moved) :]]
        return "".join(pieces), moved


def guarded(tokenizer: Mapping[str, Any], ids: Mapping[str, int]) -> dict[str, Any]:
    """``tokenizer.json`` with its special tokens renamed, and without its post-processor."""
    names = {content: f"{OPEN}{number}{CLOSE}" for content, number in ids.items()}
    model = dict(tokenizer["model"])
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(token, token): number for token, number in vocab.items()}
    elif isinstance(vocab, list):
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    added = [
        {**token, "content": names.get(token["content"], token["content"])} for token in tokenizer["added_tokens"]
    ]
    # Matched before normalization, which could remove the noncharacters.
    added = [{**token, "normalized": False} if token["special"] else token for token in added]
    return {**unguarded(tokenizer), "model": model, "added_tokens": added}


def unguarded(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` without the post-processor: ends of texts are settings of the recipe."""
    return {**tokenizer, "post_processor": None, "truncation": None, "padding": None}
