"""What ``build`` does around a build of pictures or of tokens: a report in any case, the status, the last words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from latentcache.cli import console, flags, reports
from latentcache.cli.console import SHOWN, out

if TYPE_CHECKING:
    from latentcache.cli.progress import Talk
    from latentcache.errors import InterruptedBuildError
    from latentcache.sources.sample import Refusal

_Talk = TypeVar("_Talk", bound="Talk")


class Told(Protocol):
    """What the reports of builds of both kinds have."""

    @property
    def dry_run(self) -> bool:
        """Whether it stopped after the plan."""

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """What was quarantined."""

    @property
    def notes(self) -> tuple[Refusal, ...]:
        """What was neither used nor refused."""

    @property
    def written_bytes(self) -> int:
        """Committed."""

    @property
    def generation(self) -> int:
        """The current one."""

    @property
    def published(self) -> bool:
        """Whether it is new."""

    @property
    def allow_failed(self) -> str:
        """How much may be quarantined."""

    @property
    def elapsed_s(self) -> float:
        """From start to end."""


_Report = TypeVar("_Report", bound=Told)


def carried_out(
    build: Callable[[_Talk, Callable[[InterruptedBuildError], None]], _Report],
    run: reports.Run,
    talk: _Talk,
    so_far: Callable[[_Talk], Mapping[str, Any]],
    *,
    dry_run: bool,
    as_json: bool,
) -> _Report:
    """Build, and talk about it meanwhile. A build that fails or is ended leaves a report of what it did.

    Args:
        build: Told whom to tell, and what to say at a second signal.
        run: Of the command.
        talk: Shows the plan and the progress.
        so_far: The JSON form of a build that did not end.
        dry_run: Then no report is left.
        as_json: Whether the last words are JSON.
    """
    last_words = functools.partial(console.last_words, "build", as_json=as_json)
    try:
        with nullcontext() if dry_run else run.told(lambda: so_far(talk)):
            return build(talk, last_words)
    finally:
        talk.close()


def concluded(
    report: _Report,
    payload: Mapping[str, Any],
    run: reports.Run,
    show: Callable[[_Report, str], None],
    *,
    samples: int,
    as_json: bool,
) -> int:
    """Leave the report, show it, and give the exit status.

    Args:
        report: Of the build.
        payload: Its JSON form.
        run: Of the command.
        show: The summary for people; it is told why the exit status is not 0.
        samples: Usable and quarantined ones.
        as_json: Whether to print the JSON form in place of the summary.
    """
    exit_code = int(len(report.refused) > flags.parse_allowed(report.allow_failed, samples))
    if not report.dry_run:
        run.leave(payload, exit_code=exit_code)
    if as_json:
        console.emit("build", payload, exit_code=exit_code)
    else:
        show(report, f" (more than --allow-failed {report.allow_failed}: exit status 1)" if exit_code else "")
    return exit_code


def results(report: Told, item: Callable[[str, Refusal], Mapping[str, Any]]) -> dict[str, Any]:
    """What the JSON form says of every build; ``item`` gives that of a refused sample or a note."""
    return {
        "dry_run": report.dry_run,
        "items": [item("quarantined", refusal) for refusal in report.refused]
        + [item("note", refusal) for refusal in report.notes],
        "written_bytes": report.written_bytes,
        "generation": report.generation,
        "published": report.published,
        "allow_failed": report.allow_failed,
        "elapsed_s": round(report.elapsed_s, 3),
    }


def show_refused(kind: str, refusals: Sequence[Refusal]) -> None:
    """Quarantined samples or notes: where, why, and what to do."""
    for refusal in refusals[:SHOWN]:
        line, field = f":{refusal.line}" if refusal.line else "", f" {refusal.field}" if refusal.field else ""
        detail = f": {refusal.detail}" if refusal.detail else ""
        out(f"{kind} {refusal.name}{line}{field} [{refusal.cause}]{detail}")
        if kind == "quarantined" and refusal.hint:
            out(f"  fix: {refusal.hint}")
    if len(refusals) > SHOWN:
        out(f"... and {len(refusals) - SHOWN} more {kind} (all of them with --json)")


def show_cache(cache: Path, generation: int, entries: int, what: str) -> None:
    """The last line; a cache without entries is no good to anybody, whatever the exit status says.

    Args:
        cache: Its folder.
        generation: The current one.
        entries: That it has.
        what: One sample, in a word.
    """
    if entries:
        out(f"cache {cache} (generation {generation}) is complete")
        return
    out(f"cache {cache} (generation {generation}) is empty: no {what} could be used")
    out("  fix: mend what is quarantined, or name other data, and build again")
