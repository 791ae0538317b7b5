"""Formats of files that hold several samples: positions and bytes, no policy."""

from __future__ import annotations

TAR, PARQUET, ARROW = "tar", "parquet", "arrow"
_KINDS = {".tar": TAR, ".parquet": PARQUET, ".arrow": ARROW}
#: Endings of compressed tars, whose members cannot be read one by one.
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz", ".tar.zst")


def kind_of_archive(name: str) -> str:
    """``tar``, ``parquet`` or ``arrow``; empty for other files."""
    return _KINDS.get(name[name.rfind(".") :].lower(), "")
