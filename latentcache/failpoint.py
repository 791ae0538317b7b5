"""Named places where a test makes this process die, fail or hang, to see that nothing is lost.

Below every other module but the errors, so that store, pipeline and verify may all have such places.
``LATENTCACHE_FAILPOINT=name:n:action`` arms one place; at the n-th time it is passed, the action is

- ``kill``: the build is killed (SIGKILL, as by the kernel), also where one of its workers passes the place;
- ``die``, ``crash``: this process alone is killed, or dies of SIGSEGV, as a library does;
- ``stop``, ``hang``: this process is stopped (SIGSTOP), or the thread sleeps for an hour;
- ``lost``: as when a device fails; ``raise``: ``OSError(EIO)``, as from a full or failing disk.

``name@pattern:n:action`` counts only passages with a picture whose name matches (``*`` and ``?``). Worker processes
inherit it; one that is started in the place of another only where there is a pattern. Guarantee: without the
variable a passage costs one comparison and does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from fnmatch import fnmatchcase

from latentcache.errors import DeviceError, UsageError

#: Every place in the order in which a build passes them, then those of collection, repair and checks;
#: docs/explanation/reliability.md says where each is. Four of them are passed once for each small file.
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
_ACTIONS = ("kill", "die", "crash", "stop", "hang", "lost", "raise")
_HANG_S = 3600


class _Armed:
    """One place, and how often it is still passed in peace."""

    def __init__(self, text: str, build: int | None) -> None:
        place, _, rest = text.partition(":")
        name, _, self.pattern = place.partition("@")
        number, _, action = rest.partition(":")
        if (
            name not in NAMES
            or not (number.isascii() and number.isdecimal() and int(number))
            or action not in _ACTIONS
        ):
            raise UsageError(
                f"{VARIABLE}={text} names no failpoint",
                why=f"it is name:n:action, where name is one of {', '.join(NAMES)}",
                fix=f"unset {VARIABLE}, or for example {VARIABLE}=after-commit:2:kill",
            )
        self.name, self.left, self.action, self.build = name, int(number), action, build

    def passed(self, name: str, subject: str = "") -> None:
        """Count a passage; act when it is the one that was asked for."""
        if name != self.name or (self.pattern and not fnmatchcase(subject, self.pattern)):
            return
        self.left -= 1
        if self.left:
            return
        if self.action == "hang":
            time.sleep(_HANG_S)
        elif self.action == "lost":
            raise DeviceError("the device failed", why=f"failpoint {name}")
        elif self.action == "raise":
            raise OSError(errno.EIO, f"failpoint {name}")
        else:
            self._signal()

    def _signal(self) -> None:
        if self.action == "kill" and self.build is not None:
            os.kill(self.build, signal.SIGKILL)
        number = {"crash": signal.SIGSEGV, "stop": signal.SIGSTOP}.get(self.action, signal.SIGKILL)
        signal.pthread_kill(threading.get_ident(), number)  # at once: through the process, this thread would go on


_armed: _Armed | None = None


def arm(text: str | None, *, build: int | None = None) -> None:
    """Arm the place that ``text`` names; none where it is empty.

    Args:
        text: As in the variable.
        build: Process id of the build, in a worker of it.

    Raises:
        UsageError: No such place, number or action.
    """
    global _armed
    _armed = _Armed(text, build) if text else None


def for_another(text: str) -> str:
    """What a worker that stands in for a dead one inherits of the variable."""
    return text if "@" in text.partition(":")[0] else ""


def failpoint(name: str, subject: str = "") -> None:
    """Pass a place, with the name of a picture where there is one.

    Raises:
        OSError: The place is armed to fail.
        DeviceError: Likewise.
    """
    if _armed is not None:
        _armed.passed(name, subject)
