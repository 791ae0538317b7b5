"""Check a cache that somebody else made: one run of the whole check in a process with little memory and time.

Nothing outside the cache folder is opened through it: no links, no special files, and the data that its manifest
names is not looked at. The outside of the cache is checked before a byte of it is parsed, and only the child parses.
The work travels over stdin, the report over stdout, and stderr is read to its end. Not guarded against: a cache that
changes during the check.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import latentcache
from latentcache import errors
from latentcache.errors import CacheDamagedError, LatentcacheError
from latentcache.store.paths import CachePaths
from latentcache.verify.findings import Finding, VerifyReport
from latentcache.verify.fixes import Commands
from latentcache.verify.selection import Depth, Selection

#: ``-P``: a working directory in which somebody left a ``numpy.py`` is no place to import from.
COMMAND = (sys.executable, "-P", "-c", "from latentcache.verify.sandbox import main; main()")
#: Largest sizes by name, bytes; an index is never larger than its shard, everything else has ``_MOST``.
_LIMITS = {"CURRENT": 64, "BUILDING": 1 << 20, "builder.lock": 1 << 16, "manifest.json": 1 << 26}
_MOST = 1 << 32
_UNLIMITED = frozenset({"data.mdb"})
_FOLDERS_DEEP = 4
_PREFIX_BYTES = 1 << 16
#: Memory of the child beyond what columns and indexes need; processor time, and bytes checked per second at least.
_MEMORY_BYTES = 2 << 30
_CPU_S, _BYTES_PER_S = 60, 20 << 20
#: A longer report is no report.
_REPORT_BYTES = 1 << 28
_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})


def verify_untrusted(cache: Path, *, data: Path | None, depth: Depth, commands: Commands) -> VerifyReport:
    """Check a cache in a sandbox.

    Args:
        cache: The cache folder.
        data: The data to compare with; without it no data is looked at.
        depth: How much to look at; nothing is encoded again.
        commands: Words for the printed commands.

    Raises:
        CacheDamagedError: A link, a special file, a file too large, or a child that ended early.
        LatentcacheError: As :func:`~latentcache.verify.verify.verify_cache`.
    """
    paths = CachePaths(cache)
    paths.current_snapshot()
    check_outside(cache)
    work = {
        "cache": str(cache.absolute()),
        "data": None if data is None else str(data.absolute()),
        "depth": asdict(depth),
        "commands": asdict(commands),
        "limits": limits_for(paths),
    }
    done = subprocess.run(
        COMMAND,
        input=json.dumps(work).encode("utf-8", "surrogateescape"),
        capture_output=True,
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for the parent, which ends the child
        check=False,
    )
    try:
        answer = json.loads(done.stdout) if len(done.stdout) <= _REPORT_BYTES else {}
    except ValueError:
        answer = {}
    if "error" in answer:
        raise _error(answer["error"])
    if done.returncode or "report" not in answer:
        raise CacheDamagedError(
            "the cache cannot be checked",
            where=str(cache),
            why=f"the process that read it {_end(done.returncode, done.stderr)}",
        )
    return _report(answer["report"])


def check_outside(root: Path) -> None:
    """See that a folder holds only folders and regular files of sizes that a cache has."""
    for path in _files(root, _FOLDERS_DEEP):
        most = _LIMITS.get(path.name, _MOST)
        if path.name == "index.safetensors":
            shard = path.with_name("data.mdb")
            most = _PREFIX_BYTES + (shard.lstat().st_size if shard.exists() else 0)
        size = path.lstat().st_size
        if size > most and path.name not in _UNLIMITED:
            raise _foreign(path, f"it has {size:,} bytes, at most {most:,} are expected")


def limits_for(paths: CachePaths) -> dict[str, int]:
    """Memory and processor time that an honest cache of this size needs at most."""
    columns = [*paths.root.glob("snapshots/*/*"), *paths.shards.glob("*/index.safetensors")]
    payloads = sum(path.lstat().st_size for path in paths.shards.glob("*/data.mdb"))
    memory = _MEMORY_BYTES + 8 * sum(path.lstat().st_size for path in columns)
    return {"memory_bytes": memory, "cpu_s": _CPU_S + payloads // _BYTES_PER_S}


def main() -> None:
    """The child: reads its work from stdin, writes one JSON object to stdout; anything unexpected ends it."""
    work = json.loads(sys.stdin.buffer.read().decode("utf-8", "surrogateescape"))
    _limit(work["limits"])
    answer: dict[str, Any]
    try:
        answer = {"report": _packed(_checked(work))}
    except LatentcacheError as error:
        answer = {"error": {"type": type(error).__name__, **error.as_json()}}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()


def _checked(work: Mapping[str, Any]) -> VerifyReport:
    from latentcache.verify.verify import Check

    asked = work["depth"]
    depth = Depth(**asked | {"selection": asked["selection"] and Selection(**asked["selection"])})
    check = Check(cache=Path(work["cache"]), depth=depth, commands=Commands(**work["commands"]), trusted=False)
    return check.run(data=None if work["data"] is None else Path(work["data"]))


def _packed(report: VerifyReport) -> dict[str, Any]:
    """A report as JSON values; nothing was encoded again and no recipe was asked for."""
    packed = {
        item.name: getattr(report, item.name)
        for item in fields(report)
        if item.name not in ("reencoded", "recipe_diff")
    }
    return packed | {
        "findings": [asdict(finding) for finding in report.findings],
        "recipe_ids": dict(report.recipe_ids),
    }


def _report(data: Mapping[str, Any]) -> VerifyReport:
    findings = tuple(Finding(**one | {"names": tuple(one["names"])}) for one in data["findings"])
    return VerifyReport(**{**data, "findings": findings, "not_compared": tuple(data["not_compared"])})


def _error(data: Mapping[str, Any]) -> LatentcacheError:
    """The error that the child met; CacheDamagedError for a class that needs more than texts."""
    named = getattr(errors, str(data.get("type")), None)
    kind = named if isinstance(named, type) and issubclass(named, LatentcacheError) else CacheDamagedError
    what, texts = str(data.get("what")), {name: str(data.get(name, "")) for name in ("where", "why", "fix")}
    try:
        return kind(what, **texts)
    except TypeError:
        return CacheDamagedError(what, **texts)


def _end(status: int, talk: bytes) -> str:
    """How a child ended."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"was ended by {name}" + ("" if -status in _SENT else ": a crafted or damaged cache can do that")
    last = talk.decode("utf-8", "replace").strip().rpartition("\n")[2][:500]
    return f"ended with status {status}" + (f": {last}" if last else "")


def _environment() -> dict[str, str]:
    """The parent's environment with the place of this package first, and one thread for each numeric library."""
    here = str(Path(latentcache.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    own = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | own | {"PYTHONPATH": f"{here}{os.pathsep}{others}" if others else here}


def _limit(limits: Mapping[str, int]) -> None:
    """No core file, no file written, and no more memory and time than ``limits`` say."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: limits["cpu_s"],
    }
    for kind, most in wanted.items():
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _files(folder: Path, depth: int) -> Iterator[Path]:
    if not folder.is_dir():
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            path, mode = Path(entry.path), entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISLNK(mode):
                raise _foreign(path, f"it is a link to {os.readlink(path)}")  # noqa: PTH115 - as it was written
            if stat.S_ISDIR(mode) and depth > 1:
                yield from _files(path, depth - 1)
            elif stat.S_ISREG(mode):
                yield path
            else:
                raise _foreign(path, "it is neither a file nor a folder of a cache")


def _foreign(path: Path, why: str) -> CacheDamagedError:
    return CacheDamagedError(
        "this cache holds something that no cache should",
        where=str(path),
        why=why,
        fix="do not use it; ask its maker for a copy made with `cp -rL` or `tar`",
    )
