import errno
import signal

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from latentcache.cli import console
from latentcache.errors import EmptyPlanError, UsageError
from latentcache.fields.table import Rejected
from latentcache.sources.causes import HINTS


@given(st.text())
def test_text_contains_no_terminal_escapes(text):
    shown = console.printable(text)
    assert "\n" not in shown
    assert all(letter.isprintable() for letter in shown)


@pytest.fixture(autouse=True)
def handlers():
    """``emit`` makes the process ignore signals; restore the handlers for pytest."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


@pytest.mark.parametrize(
    ("error", "exit_code", "slug"),
    [
        (typer.BadParameter("no"), 2, UsageError.slug),
        (console.Signalled(signal.SIGTERM), 143, "interrupted"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (typer.Abort(), 130, "interrupted"),
        (OSError(errno.ENOSPC, "full"), 3, "disk-full"),
        (OSError(errno.EACCES, "no", "file"), 3, "system"),
        (MemoryError(), 3, "memory"),
        (ZeroDivisionError("x"), 70, "bug"),
        (EmptyPlanError("nothing"), 1, "plan-empty"),
    ],
)
def test_every_exception_has_a_status_and_a_fix(error, exit_code, slug):
    known = console.as_known(error)
    assert (known.exit_code, known.slug) == (exit_code, slug)
    assert known.what
    assert known.fix
    assert (known is error) == isinstance(error, EmptyPlanError)


def test_a_rejected_name_is_shown_with_its_fix():
    small = Rejected(name="a  b.png", reason="too-small", detail="8x8 pixels")
    assert list(console.finding_lines(console.findings([small], []))) == [
        "rejected a  b.png [too-small]: 8x8 pixels",
        f"  fix: {HINTS['too-small']}",
    ]


@pytest.mark.parametrize(("others", "rest"), [(2, ""), (7, "; ...")])
def test_notes_of_one_reason_are_one_line_with_each_detail(others, rest):
    notes = [Rejected(name=f"{n}.tar", reason="split-unused", detail=f"split {n}") for n in range(others)]
    notes.append(Rejected(name="z.tar", reason="split-unused", detail="split 0"))
    details = "; ".join(f"split {n}" for n in range(min(others, 5))) + rest
    assert list(console.finding_lines(console.findings([], notes))) == [
        f"note 0.tar and {others} more [split-unused]: {details}"
    ]
