"""Versions of the installed libraries: shown beside what was made with them, never part of a recipe or a key.

Cost: finding a library reads and parses its metadata, 0.7 ms; each is asked for once in a process.
"""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version


@functools.cache
def installed_version(name: str) -> str:
    """The version of an installed library, or ``not installed``."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
