"""Named places where a test kills, stops or fails this process, to check that no committed work is lost.

Below every other module but the errors, so that store, pipeline and verify can have such places.
``LATENTCACHE_FAILPOINT=name:n:action`` arms one place. The action happens at the n-th passage:

- ``kill``: SIGKILL of the build, also if one of its workers passes the place;
- ``die``: SIGKILL of this process alone;
- ``stop``: SIGSTOP of this process;
- ``raise``: ``OSError(EIO)``, the error of a failing disk.

Worker processes inherit it, but not a worker that replaces a dead one. Guarantee: without the variable a passage
costs one comparison and does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import threading

from latentcache.errors import UsageError

#: Every place in the order in which a build passes them, then those of collection, repair and checks;
#: tests/journeys/README.md says where each is. Four of them are passed once for each small file.
NAMES = (
    "lock-taken",
    "temporary-written",
    "after-fsync",
    "after-rename",
    "folder-synced",
    "plan-written",
    "decoding",
    "encoding",
    "result-received",
    "before-put",
    "after-put",
    "map-grown",
    "after-commit",
    "collect-delete",
    "repair-delete",
    "scan-shard",
)
VARIABLE = "LATENTCACHE_FAILPOINT"
_ACTIONS = ("kill", "die", "stop", "raise")


class _Armed:
    """One place, and the passages left until its action."""

    def __init__(self, text: str, build: int | None) -> None:
        self.name, number, self.action = (*text.split(":"), "", "")[:3]
        if self.name not in NAMES or not number.isdecimal() or self.action not in _ACTIONS:
            raise UsageError(
                f"{VARIABLE}={text}: unknown failpoint",
                why=f"expected name:n:action, with a name of {', '.join(NAMES)}",
                fix=f"unset {VARIABLE}, or for example {VARIABLE}=after-commit:2:kill",
            )
        self.left = int(number)
        self.build = build

    def passed(self, name: str) -> None:
        """Count a passage; act at the n-th one."""
        if name != self.name:
            return
        self.left -= 1
        if self.left:
            return
        if self.action == "raise":
            raise OSError(errno.EIO, f"failpoint {name}")
        if self.action == "kill" and self.build is not None:
            os.kill(self.build, signal.SIGKILL)
        # At once: through the process, this thread would go on.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP if self.action == "stop" else signal.SIGKILL)


_armed: _Armed | None = None


def arm(text: str | None, *, build: int | None = None) -> None:
    """Arm the place that ``text`` names; disarm with an empty text.

    Args:
        text: Value of the variable.
        build: Process id of the build, in a worker.
    """
    global _armed
    _armed = _Armed(text, build) if text else None


def failpoint(name: str) -> None:
    """Pass a place."""
    if _armed is not None:
        _armed.passed(name)
