import base64
import errno
import io
import json
import os
import shlex
import signal
import subprocess
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


@given(st.text(st.characters(exclude_categories=("C", "Z"))))
def test_what_is_printable_stays_as_it_is(text):
    assert console.printable(text) == text


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


@given(st.binary(min_size=1, max_size=20).filter(lambda raw: b"\0" not in raw))
def test_the_bytes_of_a_name_are_never_lost(raw):
    fields = console.path_fields(os.fsdecode(raw))
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        assert base64.b64decode(fields["path_b64"]) == raw
    else:
        assert fields == {"path": text}


def test_an_item_has_a_hint_even_when_it_is_empty():
    item = console.item("note", "bom", "a.csv", hint="", found="", key="")
    assert item == {"category": "note", "reason": "bom", "path": "a.csv", "hint": ""}


def test_an_item_without_a_sample_has_an_empty_path():
    assert console.item("held", "superseded", "", hint="h", key="00")["path"] == ""


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


def test_parts_that_are_empty_are_left_out(capsys):
    console.fail("build", UsageError("no"), as_json=False)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error[usage]: no\n  fix: run `latentcache --help`\n"


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


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (3_140_000, "3.1 MB"), (5e15, "5000.0 TB")]
)
def test_sizes_for_people(size, text):
    assert console.human_bytes(size) == text


def test_numbers_for_people():
    assert [console.counted(n, "image") for n in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert console.counted(2, "entry", "entries") == "2 entries"


def test_a_table_is_aligned():
    assert console.table([("a", "count"), ("long", 1), ("b", 22)]) == ["a     count", "long      1", "b        22"]


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


def test_a_closed_stream_is_an_output_error(monkeypatch):
    closed = open(os.devnull, "w")  # noqa: PTH123, SIM115
    closed.close()
    monkeypatch.setattr(sys, "stdout", closed)
    monkeypatch.setattr(sys, "stderr", closed)
    console.say("x")
    with pytest.raises(console.OutputError, match="cannot be written"):
        console.out("x")


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


def test_a_command_that_is_no_build_does_not_promise_to_continue():
    assert console.as_known(console.Signalled(signal.SIGTERM)).fix == "run the command again"


def test_a_bug_says_where():
    with pytest.raises(KeyError) as caught:
        raise KeyError("x")
    assert __file__ in console.as_known(caught.value).where


LINES = [
    "  why: the model folder /data/models/a-rather-long-name/vae has no weights, and the build needs about 12 GB",
    "  fix: latentcache build '/data/with a blank/images' --out /data/caches/images --model /data/models/vae",
    "note a/" + "very" * 30 + ".png [upscaled]: one word that is wider than the terminal",
]


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_never_breaks_words_or_paths(line, width):
    lines = console.folded(line, width).split("\n")
    assert len(lines) > 1
    words = [word for one in lines for word in one.removesuffix(" \\").split()]
    assert words == line.split()
    assert all(len(one) <= width or len(one.split()) <= 4 for one in lines), "a wider word has a line of its own"
    assert all(one.startswith("    ") for one in lines[1:])


def test_a_command_in_several_lines_is_still_one_command():
    whole = LINES[1].partition("fix: ")[2]
    pasted = console.folded(LINES[1], 60).partition("fix: ")[2]
    echo = ["bash", "-c", pasted.replace("latentcache", "printf '%s\\n'", 1)]
    assert (
        subprocess.run(echo, capture_output=True, text=True, check=True).stdout.splitlines() == shlex.split(whole)[1:]
    )


def test_a_line_that_fits_stays_as_it_is():
    assert console.folded("  plan     4 entries  to make", 80) == "  plan     4 entries  to make"
