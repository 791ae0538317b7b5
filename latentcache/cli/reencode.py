"""``latentcache verify --reencode N``: opens the model where it is asked for, and says what came of it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import counted
from latentcache.errors import UsageError

if TYPE_CHECKING:
    from latentcache.pipeline.settings import RecipeSettings
    from latentcache.verify.drift import Reencode
    from latentcache.verify.findings import Reencoded


def check_untrusted(reencode: int | None, *, untrusted: bool) -> None:
    """Refuse to let the manifest of a stranger say what is opened.

    Raises:
        UsageError: ``--reencode`` with ``--untrusted``.
    """
    if reencode is not None and untrusted:
        raise UsageError(
            "--reencode does not go with --untrusted",
            why="the manifest of a stranger would say which model or tokenizer is opened",
            fix="leave one of them out",
        )


def check_device(reencode: int | None, *, device: str) -> None:
    """Refuse a device that nothing would run on.

    Raises:
        UsageError: ``--device`` without ``--reencode``.
    """
    if reencode is None and device != "auto":
        raise UsageError("--device says nothing without --reencode", fix="add --reencode 300, or leave it out")


def opened(reencode: int | None, settings: RecipeSettings, device: str) -> AbstractContextManager[Reencode | None]:
    """What encodes again; nothing, and without importing it, where nothing is to be."""
    if reencode is None:
        return nullcontext()
    from latentcache.pipeline.reencode import Reencoder

    return Reencoder(model=settings.model, config=settings.model_config, device_name=device)


def with_flags(fix: str, words: str, device: str) -> str:
    """A check and a build that find the same model, on the same device: both commands, with what was said of it."""
    said = [part for part in (words, "" if device == "auto" else f"--device {device}") if part]
    check, between, build = fix.partition("; latentcache build ")
    return f"{' '.join([check, *said])}{between}{' '.join([build, *said])}"


def as_json(found: Reencoded | None) -> dict[str, Any] | None:
    """The JSON form."""
    if found is None:
        return None
    return {
        "asked": found.asked,
        "seed": found.seed,
        "samples": found.samples,
        "entries": found.entries,
        "drifted": found.drifted,
        "device": found.device,
        "largest": _finite(found.largest),
        "mean": _finite(found.mean),
        "tolerance": {"largest": found.tolerance.largest, "mean": found.tolerance.mean},
        "confidence": found.confidence,
    }


def lines(found: Reencoded | None) -> list[str]:
    """The same for people."""
    if found is None:
        return []
    if not found.entries:
        return ["encoded again: nothing (what is wrong already is left out)"]
    entries = counted(found.entries, "entry", "entries")
    apart = f"up to {found.largest:.2g} std apart, {found.mean:.2g} on average (noise is {found.tolerance})"
    said = [f"encoded again: {counted(found.samples, 'sample')}, {entries}, {apart}"]
    return [*said, found.confidence] if found.confidence else said


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if number < float("inf") else None
