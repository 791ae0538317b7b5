"""The scan of payloads in a process of its own: a shard can end that process, never the verdict.

Guarantee: a child that dies by a signal leaves a finding about the shard it was in, and the next child goes on with
the shards after it. A child without progress to report cannot outlive its parent: writing to a closed pipe ends it.
For a cache that is not trusted its memory and its processor time are limited. Cost: 0.2 s to start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import latentcache
from latentcache import failpoint
from latentcache.errors import CacheDamagedError
from latentcache.store.generation import open_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.token_generation import AnyGeneration, TokenGeneration, load_any
from latentcache.verify.entries import check_entries
from latentcache.verify.payloads import Message, scan_shards
from latentcache.verify.selection import Deadline, Limits, Selection
from latentcache.verify.subjects import choose, rows_with
from latentcache.verify.token_payloads import scan_blocks
from latentcache.verify.unused import scan_unused

#: ``-P``: a folder in which somebody left a ``numpy.py`` is no place to import from.
COMMAND = (sys.executable, "-P", "-c", "from latentcache.verify.child import main; main()")
#: Memory of a child that reads what is not trusted, beyond what the cache's own columns and indexes need.
_MEMORY_BYTES = 2 << 30
#: Seconds of processor time it has, and bytes it is expected to check in a second at the least.
_CPU_S, _BYTES_PER_S = 60, 20 << 20
#: Signals that somebody sends, as against those that damage causes.
_SENT = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a child is asked to do."""

    cache: str
    generation: int
    shards: tuple[int, ...]
    """Positions in the generation's list; none asks only whether the generation can be read."""
    unused: tuple[str, ...] = ()
    """Names of shards of which is read what no sample needs."""
    pages: tuple[int, ...] = ()
    """Those of them whose pages are walked."""
    selection: Selection | None = None
    probe: bool = False
    """Whether to read the facts and indexes first."""
    limits: Limits | None = None


def limits_for(layout: CacheLayout) -> Limits:
    """Limits that an honest cache of this size keeps."""
    facts = [*layout.root.glob("generations/*/*"), *layout.shards.glob("*/index.npy")]
    payloads = sum(path.lstat().st_size for path in layout.shards.glob("*/data.mdb"))
    memory = _MEMORY_BYTES + 8 * sum(path.lstat().st_size for path in facts)
    return Limits(memory_bytes=memory, cpu_s=_CPU_S + payloads // _BYTES_PER_S)


def run_child(
    work: Work,
    deadline: Deadline | None = None,
    here: Callable[[Sequence[int | str]], Iterator[Message]] | None = None,
) -> Iterator[Message]:
    """Messages of :func:`scan_shards`, whatever becomes of the process that reads.

    Beside those: ``{"died": n, "category", "found"}`` when a child ended in shard n.

    Args:
        work: What is to be read.
        deadline: When to stop.
        here: Reads shards in this process, for systems that do not let us start another one. Reading maps nothing
            and checks every length, so that is no danger, only one safeguard less.

    Raises:
        CacheDamagedError: A child ended before it came to a shard.
        OSError: No process can be started, and ``here`` was not given.
    """
    waiting: list[int | str] = [*work.shards, *work.unused]
    deadline = deadline or Deadline(None)
    while True:
        current: int | str | None = None
        before = len(waiting)
        try:
            child = _start({**asdict(work), "shards": waiting, "left_s": deadline.left_s})
        except OSError:
            if here is None:
                raise
            yield from here(waiting)
            return
        deadline.when_cancelled(child.kill)
        try:
            for message in _messages(child):
                current = message.get("shard", current)
                if "end" in message:
                    waiting.remove(message["end"])
                    current = None
                yield message
            _, talk = child.communicate()
        finally:
            child.kill()
            child.wait()
        if child.returncode == 0 or deadline.cancelled:
            return
        category, found = _cause(child.returncode, talk)
        if current is None and len(waiting) < before:
            continue  # it ended between two shards
        if current is None:
            raise CacheDamagedError(
                "the cache cannot be read", where=work.cache, why=f"a process that read it {found}"
            )
        yield {"died": current, "category": category, "found": f"the process that read it {found}"}
        waiting = waiting[waiting.index(current) + 1 :]
        if not waiting:
            return


def main() -> None:
    """The child: reads its work from the command line, writes messages to stdout, one JSON object a line."""
    failpoint.arm(os.environ.get(failpoint.VARIABLE))
    work = json.loads(sys.argv[1])
    _limit(work["limits"])
    layout = CacheLayout(Path(work["cache"]))
    generation = load_any(layout.root, work["generation"], pictures=open_generation)
    if work["probe"]:
        check_entries(layout, generation)
    selection = work["selection"]
    chosen = None
    if selection is not None:
        chosen = rows_with(generation, choose(generation, Selection(**selection)))
    deadline = Deadline(work["left_s"])
    for item in work["shards"]:
        for message in scan_one(layout, generation, item, work["pages"], chosen, lambda: deadline.over):
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
        if deadline.over:
            return


def scan_one(
    layout: CacheLayout,
    generation: AnyGeneration,
    item: int | str,
    pages: Sequence[int],
    chosen: NDArray[np.bool_] | None,
    over: Callable[[], bool],
) -> Iterator[Message]:
    """What is needed of a shard of the generation, or, by name, what is not needed of one."""
    if isinstance(item, str):
        return scan_unused(layout, generation, item, over=over)
    walk = item in pages
    if isinstance(generation, TokenGeneration):
        return scan_blocks(layout, generation, [item], chosen=chosen, pages=walk, over=over)
    return scan_shards(layout, generation, [item], chosen=chosen, pages=walk, over=over)


def signal_name(number: int) -> str:
    """``SIGBUS`` for 7, where the system has it so."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _start(asked: dict[str, Any]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, json.dumps(asked)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        start_new_session=True,  # Ctrl-C is for the parent, which ends the child
        text=True,
    )


def _messages(child: subprocess.Popen[str]) -> Iterator[Message]:
    """What a child says; a last line that was cut off by its end is not a message."""
    for line in child.stdout or ():
        if line.endswith("\n"):
            message: dict[str, Any] = json.loads(line)
            yield message


def _cause(status: int, talk: str) -> tuple[str, str]:
    """Category and words for the end of a child."""
    if status < 0:
        category = "unverifiable" if -status in _SENT else "corrupt"
        return category, f"was ended by {signal_name(-status)}"
    last = talk.strip().rpartition("\n")[2]
    return "corrupt", f"ended with status {status}" + (f": {last}" if last else "")


def _environment() -> dict[str, str]:
    """The parent's environment, with the place of this package first."""
    here = str(Path(latentcache.__file__).parent.parent)
    others = os.environ.get("PYTHONPATH")
    one = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # each thread reserves memory, which is limited
    return os.environ | one | {"PYTHONPATH": f"{here}{os.pathsep}{others}" if others else here}


def _limit(limits: dict[str, int] | None) -> None:
    """Never leave a core file; keep within the limits where there are any."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits is not None:
        for kind, name in ((resource.RLIMIT_AS, "memory_bytes"), (resource.RLIMIT_CPU, "cpu_s")):
            _, hard = resource.getrlimit(kind)
            wanted = limits[name]
            resource.setrlimit(kind, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
