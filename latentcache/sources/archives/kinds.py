"""Kinds of archives, by the ends of their names."""

from __future__ import annotations

TAR, PARQUET, ARROW = "tar", "parquet", "arrow"
_KINDS = {".tar": TAR, ".parquet": PARQUET, ".arrow": ARROW}
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")
#: Extensions that a walk has to give.
EXTENSIONS = frozenset((*_KINDS, *("." + ending.rpartition(".")[2] for ending in _PACKED)))


def kind_of_archive(name: str) -> str:
    """``tar``, ``parquet`` or ``arrow``; empty for other files."""
    return _KINDS.get(name[name.rfind(".") :].lower(), "")


def is_packed(name: str) -> bool:
    """True for a tar that is compressed as a whole, so that a member is no range of the file."""
    return name.lower().endswith(_PACKED)
