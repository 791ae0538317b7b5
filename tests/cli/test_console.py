import errno
import io
import json
import os
import signal
import sys

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from latentcache.cli import console
from latentcache.errors import CacheLockedError, EmptyPlanError, InterruptedBuildError, UsageError


@given(st.text())
def test_text_is_one_line_that_cannot_steer_a_terminal(text):
    shown = console.printable(text)
    assert "\n" not in shown
    assert all(letter.isprintable() for letter in shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a b", "a b"),
        ("a\tb\n", "a\\tb\\n"),
        ("\x1b[2J", "\\x1b[2J"),
        ("\x9b2J", "\\x9b2J"),
        ("gnp.\u202etxt", "gnp.\\u202etxt"),
        ("\udcff.png", "\\xff.png"),
        ("\ud800", "\\ud800"),
        ("Fotos für Ω", "Fotos für Ω"),
    ],
)
def test_control_characters_and_bytes_are_shown(text, shown):
    assert console.printable(text) == shown


def test_the_object_is_one_ascii_line(capsys):
    console.emit("info", {"name": "für\n\udcff"}, exit_code=0)
    out = capsys.readouterr().out
    assert out.isascii()
    assert out.count("\n") == 1
    assert json.loads(out) == {"schema": 2, "command": "info", "exit_code": 0, "error": None, "name": "für\n\udcff"}


def test_an_error_carries_its_holder(capsys):
    holder = {"pid": 7, "host": "here", "since": "now"}
    error = CacheLockedError("held by 7", holder=holder, where="w", why="y", fix="wait")
    console.fail("build", error, as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["error"]["holder"] == holder
    assert err == "error[locked]: held by 7\n  where: w\n  why: y\n  fix: wait\n"


def test_a_broken_pipe_is_silence(monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    monkeypatch.setattr(sys, "stderr", Gone())
    console.out("x")
    console.say("x")
    console.emit("info", {}, exit_code=0)


def test_another_failure_of_stdout_is_said_and_of_stderr_is_not(monkeypatch):
    class Full(io.StringIO):
        name = "<stdout>"

        def write(self, text):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    console.say("x")
    with pytest.raises(console.OutputError, match="cannot be written"):
        console.out("x")


@pytest.fixture(autouse=True)
def handlers():
    """``emit`` decides the exit status and ignores signals from then on; give them back to pytest."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGINT, before[0])
    signal.signal(signal.SIGTERM, before[1])


def test_last_words_go_past_the_streams(capfd):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    console.last_words("build", InterruptedBuildError("interrupted by SIGINT", signal_number=2), as_json=True)
    for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(number, handler)
    out, err = capfd.readouterr()
    value = json.loads(out)
    assert (value["schema"], value["command"], value["exit_code"], value["error"]["slug"]) == (
        2,
        "build",
        130,
        "interrupted",
    )
    assert err.startswith("error[interrupted]: interrupted by SIGINT\n  fix: ")


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


def test_long_lines_on_a_terminal_break_between_words(monkeypatch):
    """And stay whole in a pipe."""
    main, other = os.openpty()
    monkeypatch.setenv("COLUMNS", "30")
    with os.fdopen(other, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", terminal)
        console.out("  plan  30 entries to make, 0 reused, 10 duplicates")
        console.flush()
        said = os.read(main, 1000).decode().replace("\r\n", "\n")
    os.close(main)
    assert said == "  plan  30 entries to make, 0\n      reused, 10 duplicates\n"
