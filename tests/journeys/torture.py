"""Kill, fail and stop builds, and check the cache afterwards. Without torch and threads, so that it may fork.

python torture.py failpoints FOLDER first|all     kill and fail at every failpoint
python torture.py kills FOLDER COUNT SEED         SIGKILL to the whole group at random moments
python torture.py parts FOLDER COUNT SEED         the same for builds that publish snapshots while they go on
python torture.py signals FOLDER COUNT SEED       SIGINT and SIGTERM at every failpoint and at random moments
python torture.py cuts FOLDER COUNT SEED          power cuts
python torture.py careless FOLDER COUNT SEED      power cuts of a store that does not sync; the check must fail
python torture.py faults FOLDER COUNT SEED        fail the n-th system call; COUNT 0: every n
"""

import errno
import os
import shutil
import signal
import sys
import time
import traceback
from dataclasses import replace
from itertools import islice

import lmdb
import traced
from crashes import Reference, check, fork, heal, json_of, leave, run_quietly, seeded, status_of
from disk_model import Disk

from latentcache import failpoint
from latentcache.pipeline import build

_FOREIGN = {"collect-delete", "repair-delete", "scan-shard"}  # not passed by a build
_IMAGES = {"decoding", "encoding"}  # faults of an input, not of the system: tests/pipeline
#: Exit status where this machine does not let a process be traced.
CANNOT = 77
_HISTORIES = ("whole", "resumed 1", "resumed 2", "added")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR, "short")


def failpoints(reference, selection):
    """Arm every failpoint of a build, with kill and with raise."""
    missing = set(failpoint.NAMES) - _FOREIGN - set(reference.passed)
    assert not missing, f"a build does not pass {sorted(missing)}"
    for name, last in reference.passed.items():
        if name in _IMAGES:
            continue
        for number in sorted({1, 2, 3, last} if selection == "all" else {1 + len(name) % last}):
            for action in ("kill", "raise"):
                if number <= last:
                    yield f"{name}:{number}:{action}", lambda armed: _at_failpoint(reference, armed)


def _at_failpoint(reference, armed):
    workspace = reference.workspace("armed").fresh()
    output = workspace.root / "output"
    status = status_of(fork(workspace.words(), armed=armed, output=output))
    if armed.endswith("kill"):
        assert status in (-signal.SIGKILL, 0), status
    elif status:
        assert_declared(status, output)
    check(workspace)
    heal(workspace, reference)


def assert_declared(status, output):
    """Check for a declared error of the environment."""
    error = json_of(output)["error"]
    assert status == 3, (status, error)
    slugs = {"store", "disk-full", "read-only"} | ({"system"} if "result-received" in error["why"] else set())
    assert error["slug"] in slugs, error
    assert error["what"], error
    assert error["fix"], error
    if "No space" in error["why"]:
        assert "disk is full" in error["what"], error


def kills(reference, count, seed):
    for number in range(count):
        yield f"kill {number} of seed {seed}", lambda _, n=number: _killed(reference, seeded(f"{seed}/{n}"))


def parts(reference, count, seed):
    """Kill builds that publish a snapshot after each second image."""
    build.until = lambda due, jobs: islice(jobs, 1)
    more = ("--publish-every", "10m")
    for number in range(count):
        chance = seeded(f"{seed}/{number}")
        yield f"kill {number} of seed {seed}", lambda _, c=chance: _killed(reference, c, more, longest=0.8)


def _killed(reference, chance, more=(), *, longest=0.35):
    """Kill up to three builds in a row; each continues the previous one."""
    workspace = replace(reference.workspace("killed").fresh(), more=more)
    for _ in range(chance.randint(1, 3)):
        child = fork(workspace.words(delay_ms=chance.choice([0, 2, 5])))
        time.sleep(chance.uniform(0.0, longest))
        os.killpg(child, signal.SIGKILL) if _has_group(child) else os.kill(child, signal.SIGKILL)
        status_of(child)
        check(workspace)
    heal(workspace, reference)


def _has_group(child):
    try:
        return os.getpgid(child) == child
    except ProcessLookupError:
        return False


def signals(reference, count, seed):
    """Send signals at every failpoint, on any thread, then at random moments."""
    for turn, name in enumerate(name for name in reference.passed if name not in _IMAGES):
        number = (signal.SIGINT, signal.SIGTERM)[turn % 2]
        yield f"{number.name} at {name}", lambda _, n=number, p=name: _signalled_at(reference, n, p)
    for number in range(count):
        yield f"signal {number} of seed {seed}", lambda _, n=number: _signalled(reference, seeded(f"{seed}/{n}"))


def _signalled(reference, chance):
    """Send a signal at a random moment: the build ends within ten seconds and loses nothing."""
    workspace = reference.workspace("stopped").fresh()
    output = workspace.root / "output"
    child = fork(workspace.words(delay_ms=chance.choice([0, 3, 10])), output=output)
    time.sleep(chance.uniform(0.0, 0.35))
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    os.kill(child, number)
    status = status_of(child, timeout=10.0)
    # Before the first line of the package, the system or Python ends the process.
    assert status in (0, 128 + number, -number, 1, 99), status
    if status == 128 + number:
        assert json_of(output)["error"]["slug"] == "interrupted"
    check(workspace)
    heal(workspace, reference)


def _signalled_at(reference, number, name):
    workspace = reference.workspace("stopped").fresh()
    output = workspace.root / "output"
    child = os.fork()
    if not child:
        watcher = _Signaller(name, number)
        failpoint.arm = lambda text: setattr(failpoint, "_armed", watcher)
        leave(run_quietly(workspace.words(), output))
    assert status_of(child, timeout=10.0) == 128 + number
    assert json_of(output)["error"]["slug"] == "interrupted"
    check(workspace)
    heal(workspace, reference)


class _Signaller:
    """Sends a signal to this process at the first passage of a failpoint."""

    def __init__(self, name, number):
        self.name, self.number = name, number

    def passed(self, name, subject=""):
        if name == self.name:
            self.name = ""
            os.kill(os.getpid(), self.number)


def cuts(reference, count, seed, histories=_HISTORIES):
    """Cut power in a new build, in builds after a kill, and in one that extends a cache."""
    for name in histories:
        operations, root, first = _recorded(reference, name, seeded(f"{seed}/{name}"))
        for number in range(-(-count // len(histories))):
            chance = seeded(f"{seed}/{name}/{number}")
            point = chance.randint(first, len(operations))
            yield (
                f"power cut {number} ({name}, after call {point} of {len(operations)}) of seed {seed}",
                lambda _, o=operations[:point], c=chance, r=root: _cut(reference, o, r, c),
            )


def _recorded(reference, name, chance):
    """Return the calls of one build and of earlier builds, the folder, and the number of earlier calls."""
    workspace = reference.workspace(name.replace(" ", "")).fresh()
    before = []
    if name.startswith("resumed"):
        before = _until_killed(workspace, chance)
    elif name == "added":
        half = replace(workspace, data=reference.half)
        before = traced.watch(lambda: run_quietly(half.words()), workspace.root).operations
    trace = traced.watch(lambda: run_quietly(workspace.words()), workspace.root)
    assert trace.status == 0, trace.status
    return before + trace.operations, workspace.root, len(before) + 1


def _until_killed(workspace, chance):
    """Return the calls of a build that is killed inside a commit.

    The next process sees its last write, which is not yet on the disk.
    """
    left = chance.randint(4, 8)

    def intercept(_, operation):
        nonlocal left
        left -= operation.durable
        return "kill-after" if not left else None

    first = traced.watch(lambda: run_quietly(workspace.words()), workspace.root, intercept)
    assert first.status == -signal.SIGKILL, first.status
    *operations, last = first.operations
    return [*operations, replace(last, durable=False)]


def _cut(reference, operations, root, chance):
    disk = Disk(root)
    for operation in operations:
        disk.apply(operation)
    workspace = reference.workspace("cut").fresh()
    workspace.root.rmdir()
    # The reader got the events before the cut.
    events_before = bytes(disk.top.seen["events"].seen) if "events" in disk.top.seen else b""
    disk.cut(chance, workspace.root)
    workspace.events.write_bytes(events_before)
    check(workspace)
    heal(workspace, reference)


def faults(reference, count, seed):
    """Let the n-th call of a build fail, for each n: in a new build, in one that continues a killed build, and in
    one that extends a finished cache.
    """
    everything = []
    for name in ("whole", "resumed", "added"):
        before = _left_behind(reference, name, seeded(f"{seed}/{name}"))
        workspace = _again(reference, before)
        total = traced.watch(lambda workspace=workspace: run_quietly(workspace.words()), workspace.root).calls
        everything += [(name, before, n, total, error) for n in range(1, total + 1) for error in _ERRORS]
    in_turn = [case for case in everything if case[4] == _ERRORS[(case[2] + seed) % len(_ERRORS)]]
    chosen = seeded(seed).sample(everything, count) if count else in_turn
    for name, before, number, total, error in chosen:
        word = error if isinstance(error, str) else errno.errorcode[error]
        title = f"{name}: call {number} of {total} fails: {word}"
        yield title, lambda _, b=before, n=number, e=error: _fault(reference, b, n, e)


def _left_behind(reference, name, chance):
    workspace = reference.workspace(f"before-{name}").fresh()
    if name == "resumed":
        _until_killed(workspace, chance)
    elif name == "added":
        half = replace(workspace, data=reference.half)
        assert status_of(fork(half.words())) == 0
    return workspace.root


def _again(reference, before):
    workspace = reference.workspace("failed").fresh()
    workspace.root.rmdir()
    shutil.copytree(before, workspace.root)
    return workspace


def _fault(reference, before, at, error):
    workspace = _again(reference, before)
    output = reference.folder / "output"
    trace = traced.watch(
        lambda: run_quietly(workspace.words(), output),
        workspace.root,
        lambda number, _: error if number == at else None,
    )
    if trace.status:
        assert_declared_or_event(trace.status, output)
    check_but_events(workspace)
    heal(workspace, reference)


def assert_declared_or_event(status, output):
    error = json_of(output)["error"]
    if error["where"].endswith("events"):  # a path that was given, not the cache
        assert status in (2, 3), error
    else:
        assert_declared(status, output)


def check_but_events(workspace):
    """``check``, but the last line of the event file may be partial."""
    if workspace.events.exists():
        text = workspace.events.read_bytes()
        workspace.events.write_bytes(text[: text.rfind(b"\n") + 1])
    check(workspace)


def careless(reference, count, seed):
    """Cut power of a store that does not sync: the check must fail.

    No case continues a killed build: kills are timed by syncs, and here are too few.
    """
    opened = lmdb.open
    lmdb.open = lambda *words, **options: opened(*words, **options | {"sync": False, "metasync": False})
    yield from cuts(reference, count, seed, [name for name in _HISTORIES if not name.startswith("resumed")])


_MODES = {mode.__name__: mode for mode in (failpoints, kills, parts, signals, cuts, careless, faults)}


def _main(mode, folder, *given):
    cases, numbers = _MODES[mode], [int(word) if word.isdecimal() else word for word in given]
    if cases in (cuts, careless, faults) and (why := traced.unavailable()):
        sys.stdout.write(f"{why}\n")
        return CANNOT
    reference = Reference(folder)
    failed = done = 0
    for name, case in cases(reference, *numbers):
        done += 1
        try:
            case(name)
        except Exception:  # noqa: BLE001 - reported with its case, and the others go on
            failed += 1
            sys.stderr.write(f"\n=== {mode}: {name}\n{traceback.format_exc()}")
    sys.stdout.write(f"{done} cases, {failed} failed\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
