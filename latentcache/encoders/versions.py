"""Versions of installed libraries, for provenance."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version


def installed(names: Iterable[str]) -> dict[str, str]:
    """Library -> version; empty for one that is not installed."""
    return {name: _version(name) for name in names}


@cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
