r"""Control tokens under names that no text has, so that a control string in a text stays text.

The tokenizer gets its special tokens renamed (``<|im_end|>`` with id 7 becomes U+FDD0 ``7`` U+FDD1, in the added
tokens and, where it stands there, in the vocabulary), and what a chat template writes is rewritten in the same way.
Then one pass over the whole text does all: ids, places, the tokenizer's own rules for blanks beside special tokens.
Content comes through a template with its control strings between marks, which the rewriting takes off again.
U+FDD0 to U+FDD2 are noncharacters, never used in text that is interchanged (Unicode 16, chapter 23.7); a text that
has one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OPEN, CLOSE, MARK = "\ufdd0", "\ufdd1", "\ufdd2"
RESERVED = re.compile(f"[{OPEN}{CLOSE}{MARK}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """(begin, end) of what is learned, in characters; rising, not overlapping."""


class ControlStrings:
    """The control tokens of one tokenizer: those that are added and special.

    Args:
        tokenizer: The parsed ``tokenizer.json``.
    """

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        special = [token for token in tokenizer.get("added_tokens") or () if token["special"] and token["content"]]
        self.ids = {str(token["content"]): int(token["id"]) for token in special}
        # The longest first, as the tokenizer takes them. With nothing to look for, a pattern that matches nothing.
        names = "|".join(re.escape(name) for name in sorted(self.ids, key=len, reverse=True)) or r"(?!)"
        self._names = re.compile(names)
        self._rendered = re.compile(f"{MARK}(?:{names}){MARK}|{MARK}|{names}")

    def count(self, text: str) -> int:
        """How many control strings stand in a text."""
        return sum(1 for _ in self._names.finditer(text))

    def mark(self, text: str) -> str:
        """A text from a user for a template, its control strings between marks."""
        return self._names.sub(f"{MARK}\\g<0>{MARK}", text)

    def last_end(self, rendered: str, begin: int, end: int) -> int:
        """Where the last control token in a part of what a template wrote ends; 0 where there is none."""
        stop = 0
        for match in self._rendered.finditer(rendered, begin, end):
            stop = stop if match.group()[0] == MARK else match.end()
        return stop

    def rewrite(self, rendered: str, places: Sequence[int]) -> tuple[str, list[int]]:
        """What a template wrote, its control strings under their other names; and the same places in it.

        Args:
            rendered: The template's text, with marks around what users wrote.
            places: Positions in it, rising.
        """
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
    """``tokenizer.json`` with its control tokens renamed, and without its post-processor.

    Args:
        tokenizer: The parsed original.
        ids: Control strings and their ids.
    """
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
    # Matched before normalization, which could take the noncharacters away.
    added = [{**token, "normalized": False} if token["special"] else token for token in added]
    return {**unguarded(tokenizer), "model": model, "added_tokens": added}


def unguarded(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    """``tokenizer.json`` as it is, without the post-processor: ends of texts are settings of the recipe."""
    return {**tokenizer, "post_processor": None, "truncation": None, "padding": None}
