import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from small_cache import SMALL, draw

from latentcache.cli import progress
from latentcache.cli.progress import BuildProgress
from latentcache.pipeline.workers.engine import RunResult


@pytest.fixture
def clock(monkeypatch):
    """A clock that moves only when the test advances it."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: now.s)
    return now


def state(total=200, cost_total=0, **attributes):
    result = RunResult("latents", total, cost_total)
    vars(result).update(attributes)
    return result


HALF = state(
    done=50,
    cost_total=2000,
    cost_done=500,
    encoded=30,
    copied=10,
    skipped=10,
    failed=[()] * 5,
    written_bytes=50_000_000,
)


def test_without_a_terminal_a_line_every_ten_seconds(clock, capsys):
    display = BuildProgress(quiet=False)
    display.advanced(state())
    for _ in range(25):
        display.advanced(HALF)
        clock.s += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "latents: 50/200, 0:50 left, 3.0/s, 5.0 MB/s, 30 encoded, 20 reused, 5 rejected",
        "latents: 50/200, 1:40 left, 1.5/s, 2.5 MB/s, 30 encoded, 20 reused, 5 rejected",
    ]
    assert "\x1b" not in "".join(lines)


def test_until_the_encoder_is_open_the_line_says_so(clock, capsys):
    display = BuildProgress(quiet=False)
    clock.s += 10
    display.advanced(state())
    display.advanced(state(began=clock.s))
    clock.s += 10
    display.advanced(state(began=clock.s))
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["latents, opening the encoder", "latents"]


def test_quiet_shows_warnings_only(clock, capsys):
    display = BuildProgress(quiet=True)
    clock.s += 60
    display.advanced(state(total=2, done=1))
    display.warned("out of memory at batch 8")
    display.close()
    assert capsys.readouterr().err == "warning: out of memory at batch 8\n"


def on_a_terminal(command):
    """Run a command with stderr on a terminal of 120 columns; return its status, what stderr got, and stdout."""
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
    out = process.communicate(timeout=20)[0] or b""
    os.close(leader)
    return process.returncode, seen.decode(), out.decode()


def test_the_bar_is_erased_on_a_terminal(data, tmp_path):
    for number in range(4, 12):
        draw(data / f"p{number:02}.png", seed=number)
    command = [sys.executable, "-m", "latentcache", "build", data, *SMALL, "--model", "stub:delay_ms=60"]
    status, seen, out = on_a_terminal([*command, "--out", tmp_path / "c", "--batch-size", "1", "--commit-every", "1"])
    assert status == 0
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", seen)
    assert re.search(r"latents \W*\d+/12 \S+ left, \d+\.\d/s, .*, \d+ encoded, 0 reused, 0 rejected", shown)
    assert "\x1b[2K" in seen[-20:], "the bar is erased"
    assert "12 encoded, 0 reused, 0 rejected" in out
    assert "\x1b" not in out


def test_rates_start_with_the_first_encoded_item(clock, capsys):
    """Reading 100 committed inputs took 100 s; encoding 10 entries took 10 s."""
    display = BuildProgress(quiet=False)
    display.advanced(state())
    clock.s += 110
    display.advanced(state(done=110, cost_total=200, cost_done=110, skipped=100, encoded=10, began=clock.s - 10))
    line = capsys.readouterr().err.splitlines()[-1]
    assert line == "latents: 110/200, 1:30 left, 1.0/s, 0 B/s, 10 encoded, 100 reused, 0 rejected"


def test_a_time_left_is_shown_once_the_rate_is_steady(clock, capsys):
    display = BuildProgress(quiet=False)
    display.advanced(state())
    clock.s += 11
    display.advanced(state(done=10, cost_total=200, cost_done=10, encoded=10, began=clock.s - 1))
    assert " -:-- left, 10.0/s" in capsys.readouterr().err
