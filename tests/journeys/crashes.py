"""Forked builds that are killed, failed, stopped or cut from power.

Only programs without torch and threads import this (``torture.py``), because a fork copies the process.
"""

import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import RECIPE, acknowledged, commands_are_put_together_once, draw_folder, entries, look
from stored_items import contents

from latentcache import failpoint
from latentcache.cli.app import main
from latentcache.store.shard import ShardWriter
from latentcache.store.snapshot import open_snapshot

commands_are_put_together_once()
NUM_IMAGES = 18
_HARMLESS = {"ok", "touched", "missing", "unreferenced", "quarantined"}


@dataclass(frozen=True)
class Workspace:
    root: Path
    data: Path
    more: tuple[str, ...] = ()
    """Further words of each build."""

    @property
    def cache(self):
        return self.root / "cache"

    @property
    def events(self):
        return self.root / "events"

    def words(self, delay_ms=0):
        model = f"stub:delay_ms={delay_ms}"
        words = [
            "build",
            self.data,
            "--out",
            self.cache,
            "--model",
            model,
            *RECIPE,
            "--events",
            self.events,
            *self.more,
        ]
        return [
            str(word) for word in [*words, "--commit-every", 2, "--batch-size", 3, "--json", "--quiet", *self.more]
        ]

    def fresh(self):
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        return self


class Reference:
    """Data and the result of an undisturbed build."""

    def __init__(self, folder):
        self.folder = Path(folder).resolve()
        # The small map grows twice.
        ShardWriter.__init__.__kwdefaults__["map_bytes"] = 24 << 10
        self.data = draw_folder(self.folder / "data", NUM_IMAGES)
        self.half = draw_folder(self.folder / "half", NUM_IMAGES // 2)
        workspace = self.workspace("reference").fresh()
        self.passed = _counted(workspace)
        self.content = content(workspace.cache)
        assert len(acknowledged(workspace.events)) == NUM_IMAGES

    def workspace(self, name):
        return Workspace(self.folder / name, self.data)


def fork(words, *, armed="", output=None):
    """Fork a command in its own process group; return the process id. Its JSON goes to ``output``."""
    child = os.fork()
    if not child:
        status = 99
        try:
            os.setsid()
            os.environ[failpoint.VARIABLE] = armed
            _redirect(output)
            status = main(words)
        finally:
            leave(status)
    return child


def status_of(child, timeout=30.0):
    """Return the exit status of a child, negative for a signal; kill it after the timeout."""
    deadline = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise AssertionError("the build hangs")
        time.sleep(0.002)


def run_quietly(words, output=None):
    _redirect(output)
    status = main(words)
    _flush()
    return status


def check(workspace):
    """Check that acknowledged keys are intact and nothing else is wrong.

    Returns:
        The full verification; None if there is no cache.
    """
    keys = acknowledged(workspace.events)
    assert len(set(keys)) == len(keys), "a key was encoded twice"
    if not ((workspace.cache / "shards").exists() or (workspace.cache / "CURRENT").exists()):
        assert not keys, f"{len(keys)} acknowledged keys are lost with the whole cache"
        return None
    there = entries(workspace.cache)
    lost = [key for key in keys if there.get(key, (None,))[0] is None]
    assert not lost, f"{len(lost)} of {len(keys)} acknowledged keys are lost: {lost[:3]}"
    verify = look("verify", workspace.cache, "--full", "--json").json
    if verify["error"] is not None:
        assert verify["error"]["slug"] == "cache-unfinished", verify["error"]
        return verify
    wrong = {name: count for name, count in verify["counts"].items() if count and name not in _HARMLESS}
    assert not wrong, (wrong, verify["items"])
    return verify


def heal(workspace, reference):
    """Build to the end and compare with an undisturbed build."""
    keys = set(acknowledged(workspace.events))
    before = len(entries(workspace.cache)) if (workspace.cache / "shards").exists() else 0
    done = look(*workspace.words())
    assert done.status == 0, done.err
    counts = done.json["counts"]
    assert counts["encoded"] + counts["cached"] == NUM_IMAGES, counts
    assert counts["encoded"] <= NUM_IMAGES - len(keys), "acknowledged entries were encoded again"
    assert counts["cached"] >= before, (counts, before)
    last = check(workspace)
    assert (last["exit_code"], last["counts"]["ok"]) == (0, NUM_IMAGES), last
    assert content(workspace.cache) == reference.content
    assert look("info", workspace.cache, "--json").json["complete"] is True
    left = [path for path in workspace.cache.rglob("*") if path.suffix in (".tmp", ".open")]
    assert not left, left


def content(cache):
    """Collect entries, samples and rows of every field, without numbers and times of builds."""
    snapshot = open_snapshot(cache)
    return contents(cache) | {
        "entries": {key: checksum for key, (checksum, _) in entries(cache).items()},
        "inputs": {name: np.asarray(held.content).tolist() for name, held in snapshot.samples.inputs.items()},
        "rejected": [(item.name, item.line, item.reason) for item in snapshot.rejected],
    }


def json_of(output):
    text = Path(output).read_text("ascii")
    assert text.count("\n") == 1, text
    return json.loads(text)


def _counted(workspace):
    """Build undisturbed in a child; return how often each failpoint was passed."""
    counts_file = workspace.root / "passed"
    child = os.fork()
    if not child:
        status = 99
        try:
            counter = _Counter()
            failpoint.arm = lambda text: setattr(failpoint, "_armed", counter)
            status = run_quietly(workspace.words())
            counts_file.write_text(json.dumps(counter.times))
        finally:
            leave(status)
    assert status_of(child) == 0
    return json.loads(counts_file.read_text())


class _Counter:
    def __init__(self):
        self.times = {}

    def passed(self, name):
        self.times[name] = self.times.get(name, 0) + 1


def _redirect(output):
    for number, path in ((1, output or os.devnull), (2, f"{output}.err" if output else os.devnull)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _flush():
    sys.stdout.flush()
    sys.stderr.flush()


def leave(status):
    _flush()
    os._exit(status)


def seeded(seed):
    return random.Random(seed)
