"""The word ``stub[:delay_ms=N]``, which names a documented encoder without torch."""

from __future__ import annotations

import re

from latentcache.errors import UsageError

_NAME = re.compile(r"stub(?::delay_ms=([0-9]{1,6}))?")


def is_stub(word: str) -> bool:
    """True if a word names a stub, with or without options."""
    return word.partition(":")[0] == "stub"


def stub_delay(word: str, flag: str) -> int:
    """The N of ``stub:delay_ms=N``."""
    match = _NAME.fullmatch(word)
    if match is None:
        raise UsageError(
            f"{flag} {word}: unknown option of the stub", fix=f"use {flag} stub or {flag} stub:delay_ms=20"
        )
    return int(match[1] or 0)
