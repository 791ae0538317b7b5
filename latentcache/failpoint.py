"""Named places where a test makes this process die, fail or hang, to see that nothing is lost.

Below every other module but the errors, so that store, pipeline and verify may all have such places.
``LATENTCACHE_FAILPOINT=name:n:kill|raise|hang`` arms one place: at the n-th time it is passed the process is killed
(SIGKILL, as by the kernel), meets ``OSError(EIO)`` (as from a full or failing disk), or sleeps for an hour. Worker
processes inherit it. Guarantee: without the variable a passage costs one comparison and does nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import time

from latentcache.errors import UsageError

#: Every place in the order in which a build passes them, then those of collection, repair and checks;
#: docs/explanation/reliability.md says where each is. Four of them are passed once for each small file.
NAMES = (
    "lock-taken",
    "temporary-written",
    "after-fsync",
    "after-rename",
    "folder-synced",
    "plan-written",
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
_ACTIONS = ("kill", "raise", "hang")
_HANG_S = 3600


class _Armed:
    """One place, and how often it is still passed in peace."""

    def __init__(self, text: str) -> None:
        name, _, rest = text.partition(":")
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
        self.name, self.left, self.action = name, int(number), action

    def passed(self, name: str) -> None:
        """Count a passage; act when it is the one that was asked for."""
        if name != self.name:
            return
        self.left -= 1
        if self.left:
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "hang":
            time.sleep(_HANG_S)
        else:
            raise OSError(errno.EIO, f"failpoint {name}")


_armed: _Armed | None = None


def arm(text: str | None) -> None:
    """Arm the place that ``text`` names; none where it is empty.

    Raises:
        UsageError: No such place, number or action.
    """
    global _armed
    _armed = _Armed(text) if text else None


def failpoint(name: str) -> None:
    """Pass a place. Not to be called in a loop over samples: one name per durable step.

    Raises:
        OSError: The place is armed to fail.
    """
    if _armed is not None:
        _armed.passed(name)
