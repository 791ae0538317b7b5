"""Whatever a command raises, as one of our errors: with a slug, an exit status and words that say what to do."""

from __future__ import annotations

import errno
import signal
import traceback
from typing import Any

import typer

from latentcache.errors import InterruptedBuildError, LatentcacheError, UsageError

#: Typer carries its own click; this is its base of all errors in how a command was called.
_CallError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")
_EXIT_BUG = 70


class Signalled(BaseException):
    """SIGINT or SIGTERM outside a build, which handles them itself; typer ends a KeyboardInterrupt silently."""


def as_known(error: BaseException) -> LatentcacheError:
    """The error as one of ours; what nobody foresaw is a fault of our own."""
    if isinstance(error, LatentcacheError):
        return error
    if isinstance(error, _CallError):
        where = getattr(getattr(error, "ctx", None), "command_path", "latentcache")
        return UsageError(error.format_message().strip().rstrip("."), where=where, fix=f"{where} --help")
    if isinstance(error, Signalled | KeyboardInterrupt | typer.Abort):
        number = signal.Signals(error.args[0] if isinstance(error, Signalled) else signal.SIGINT)
        fix = "run the same command again"  # from its start: only a build goes on where it was
        return InterruptedBuildError(f"interrupted by {number.name}", signal_number=number, fix=fix)
    if isinstance(error, OSError):
        return _system_error(error)
    if isinstance(error, MemoryError):
        fix = "use a smaller --batch-size, --decode-threads or --host-memory, or a machine with more memory"
        return _of_status(3, "this machine is out of memory", slug="memory", why=str(error), fix=fix)
    return _of_status(
        _EXIT_BUG,
        f"latentcache failed in a way it should not: {type(error).__name__}: {error}",
        slug="bug",
        where=_place(error),
        fix="please report it with the output of the same command under LATENTCACHE_DEBUG=1",
    )


def _system_error(error: OSError) -> LatentcacheError:
    """What the operating system refused, where no module had a better word for it."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return _of_status(
        3,
        "the disk is full" if full else f"the system refused: {error.strerror or error}",
        slug="disk-full" if full else "system",
        where=str(error.filename or _place(error)),
        why=str(error),
        fix="free some space, then run again"
        if full
        else "check the path, its permissions and the disk, then run again",
    )


def _of_status(exit_code: int, what: str, **parts: str) -> LatentcacheError:
    found = LatentcacheError(what, **parts)
    found.exit_code = exit_code
    return found


def _place(error: BaseException) -> str:
    """File and line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
