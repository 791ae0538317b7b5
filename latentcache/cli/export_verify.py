"""``latentcache verify`` of an exported folder: does it still hold what the cache does that it was made from?"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from latentcache.cli import console
from latentcache.cli.console import out
from latentcache.errors import UsageError


def check_flags(*, others: bool) -> None:
    """Refuse what is for caches.

    Raises:
        UsageError: As said.
    """
    if others:
        raise UsageError(
            "one of these flags is for caches, and this is a folder of exported rows",
            why="for exported rows: --data (the cache, if it moved), --full, --json",
            fix="leave the others out; rows are mended by another export",
        )


def verify(folder: Path, *, cache: Path | None, full: bool, as_json: bool) -> int:
    """Look and say."""
    from latentcache.cli.verify import payload_of, show
    from latentcache.interop.exported import check_export

    found = check_export(folder, cache=cache, full=full)
    report, exit_code = found.report, found.report.exit_code()
    payload: dict[str, Any] = payload_of(folder, report, report.findings) | {"repair": None, "kind": "export"}
    payload["made_from"] = str(found.cache)
    if as_json:
        console.emit("verify", payload, exit_code=exit_code)
        return exit_code
    show(report, report.findings, fast="sizes and fingerprints")
    out(f"made from generation {report.generation} of {found.cache}")
    out(f"whether the cache itself is still true: latentcache verify {shlex.quote(str(found.cache))}")
    return exit_code
