import os
import pty
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from small_cache import SMALL, draw

from latentcache.cli import progress
from latentcache.cli.progress import BuildTalk
from latentcache.pipeline.work import Progress


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still unless it is moved."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


def test_a_line_every_ten_seconds_where_there_is_no_terminal(clock, capsys):
    talk = BuildTalk(quiet=False)
    state = Progress(total=200, looked=50, encoded=30, cached=15, quarantined=5, payload_bytes=50_000_000)
    for _ in range(25):
        talk.advanced(state)
        clock.s += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "50/200 5.0 img/s, 5.0 MB/s, 30 encoded, 15 reused, 5 quarantined, 0:30 left",
        "50/200 2.5 img/s, 2.5 MB/s, 30 encoded, 15 reused, 5 quarantined, 1:00 left",
    ]
    assert "\x1b" not in "".join(lines)


def test_pictures_that_are_decoded_and_not_encoded_are_not_done(clock, capsys):
    talk = BuildTalk(quiet=False)
    clock.s += 10
    talk.advanced(Progress(total=12, looked=12, waiting=7, encoded=5))
    clock.s += 10
    talk.advanced(Progress(total=12, looked=12, waiting=12))
    assert [(line.split()[0], line.split(", ")[-1]) for line in capsys.readouterr().err.splitlines()] == [
        ("5/12", "0:14 left"),
        ("0/12", "-:-- left"),
    ]


def test_quiet_shows_warnings_only(clock, capsys):
    talk = BuildTalk(quiet=True)
    clock.s += 60
    talk.advanced(Progress(total=2, looked=1))
    talk.warned("out of memory at batch 8")
    talk.close()
    assert capsys.readouterr().err == "warning: out of memory at batch 8\n"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.9, "0:59"), (61, "1:01"), (3661, "1:01:01")])
def test_time_left(seconds, text):
    assert progress.clock(seconds) == text


def test_before_anything_is_looked_at_nothing_is_divided_by_zero(clock, capsys):
    talk = BuildTalk(quiet=False)
    clock.s += 11
    talk.advanced(Progress(total=10))
    assert capsys.readouterr().err.startswith("0/10 0.0 img/s")


def on_a_terminal(command):
    """What a command writes to a terminal of 120 columns, and its status."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, stderr=follower, env=environment)
    os.close(follower)
    seen = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # EIO: the other side is closed
            break
        if not chunk:
            break
        seen += chunk
    out = process.communicate(timeout=20)[0]
    os.close(leader)
    return process.returncode, seen.decode(), out.decode()


def test_a_bar_on_a_terminal_that_is_taken_away(data, tmp_path):
    for number in range(4, 12):
        draw(data / f"p{number:02}.png", seed=number)
    command = [sys.executable, "-m", "latentcache", "build", data, *SMALL, "--model", "stub:delay_ms=60"]
    status, seen, out = on_a_terminal([*command, "--out", tmp_path / "c", "--batch-size", "1"])
    assert status == 0
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen)
    assert re.search(r"━.* \d+/12 \d+\.\d img/s, .*/s, \d+ encoded, 0 reused, 0 quarantined, \d:\d\d left", plain)
    assert "\x1b[?25l" in seen, "the cursor is hidden while the bar moves"
    assert seen.rindex("\x1b[?25h") > seen.rindex("\x1b[?25l"), "and shown again"
    after = seen[seen.rindex("\x1b[?25h") :]
    assert "\x1b[2K" in after, "the line of the bar is erased"
    assert "━" not in after
    assert "12 encoded, 0 reused, 0 quarantined" in out
    assert "\x1b" not in out


def test_a_warning_makes_the_bar_go_away_first(capsys, monkeypatch):
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    talk = BuildTalk(quiet=False)
    time.sleep(0.12)
    talk.advanced(Progress(total=4, looked=1))
    assert talk._bar is not None
    talk.warned("slow")
    assert talk._bar is None
    time.sleep(0.12)
    talk.advanced(Progress(total=4, looked=2))
    assert talk._bar is not None
    talk.close()
    talk.close()
    assert "warning: slow\n" in capsys.readouterr().err


@pytest.mark.parametrize("columns", [26, 40, 60, 80, 120])
def test_the_time_left_is_never_cut_off(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    talk = BuildTalk(quiet=False)
    talk._shown -= 1
    talk._started -= 100
    talk.advanced(Progress(total=2000, looked=500, encoded=450, cached=45, quarantined=5, payload_bytes=5_000_000))
    (task,) = talk._bar.tasks
    talk.close()
    assert task.description.endswith("5:00 left")
    assert len(task.description) + min(40, columns // 4) + len(" 500/2000 ") <= columns
