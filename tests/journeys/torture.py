"""A program that maltreats builds and checks what is left. Without torch and threads, so that it may fork.

python torture.py failpoints FOLDER first|all     every failpoint, killed and failed
python torture.py kills FOLDER COUNT SEED         SIGKILL to the whole group at random moments
python torture.py signals FOLDER COUNT SEED       SIGINT and SIGTERM likewise
python torture.py cuts FOLDER COUNT SEED          power cuts: what a disk could hold then
python torture.py faults FOLDER COUNT SEED        the n-th call of the system fails; COUNT 0 is all of them
"""

import errno
import os
import signal
import sys
import time
import traceback
from dataclasses import replace

import traced
from commands import acknowledged
from crashes import Reference, check, fork, heal, run_quietly, seeded, status_of, told
from disk_model import Disk

from latentcache import failpoint

_FOREIGN = {"collect-delete", "repair-delete"}  # not passed by a build
_HISTORIES = ("whole", "resumed 1", "resumed 2", "added")
_ERRORS = (errno.EIO, errno.ENOSPC, errno.EACCES, errno.EINTR, "short")


def failpoints(reference, which):
    """Arm every place that a build passes, with kill and with raise."""
    missing = set(failpoint.NAMES) - _FOREIGN - set(reference.passed)
    assert not missing, f"a build does not pass {sorted(missing)}"
    for name, last in reference.passed.items():
        for number in sorted({1, 2, 3, last} if which == "all" else {1 + len(name) % last}):
            for action in ("kill", "raise"):
                if number <= last:
                    yield f"{name}:{number}:{action}", lambda armed: _at_failpoint(reference, armed)


def _at_failpoint(reference, armed):
    place = reference.place("armed").fresh()
    talk = place.root / "told"
    status = status_of(fork(place.words(), armed=armed, talk=talk))
    if armed.endswith("kill"):
        assert status in (-signal.SIGKILL, 0), status
    elif status:
        assert_declared(status, talk)
    check(place)
    heal(place, reference)


def assert_declared(status, talk):
    """An error of the environment in our words."""
    error = told(talk)["error"]
    assert status == 3, (status, error)
    assert error["slug"] in ("store", "disk-full", "read-only"), error
    assert error["what"], error
    assert error["fix"], error
    if "No space" in error["why"]:
        assert "disk is full" in error["what"], error


def kills(reference, count, seed):
    for number in range(count):
        yield f"kill {number} of seed {seed}", lambda _, n=number: _killed(reference, seeded(f"{seed}/{n}"))


def _killed(reference, chance):
    """Up to three kills in a row, each on what the one before left."""
    place = reference.place("killed").fresh()
    for _ in range(chance.randint(1, 3)):
        child = fork(place.words(delay_ms=chance.choice([0, 2, 5])))
        time.sleep(chance.uniform(0.0, 0.35))
        os.killpg(child, signal.SIGKILL) if _has_group(child) else os.kill(child, signal.SIGKILL)
        status_of(child)
        check(place)
    heal(place, reference)


def _has_group(child):
    try:
        return os.getpgid(child) == child
    except ProcessLookupError:
        return False


def signals(reference, count, seed):
    for number in range(count):
        yield f"signal {number} of seed {seed}", lambda _, n=number: _signalled(reference, seeded(f"{seed}/{n}"))


def _signalled(reference, chance):
    """A signal at a random moment: in order within ten seconds, nothing lost, and nothing done that is not kept."""
    place = reference.place("stopped").fresh()
    talk = place.root / "told"
    child = fork(place.words(delay_ms=chance.choice([0, 3, 10])), talk=talk)
    time.sleep(chance.uniform(0.0, 0.35))
    number = chance.choice([signal.SIGINT, signal.SIGTERM])
    os.kill(child, number)
    status = status_of(child, timeout=10.0)
    # Until the first line of ours runs, it is the system or Python that ends the process.
    assert status in (0, 128 + number, -number, 1, 99), status
    if status == 128 + number:
        assert told(talk)["error"]["slug"] == "interrupted"
    check(place)
    heal(place, reference)


def cuts(reference, count, seed):
    """Power cuts in a build, in those that go on after a kill, and in one that adds to a finished cache."""
    for name in _HISTORIES:
        operations, root, first = _recorded(reference, name, seeded(f"{seed}/{name}"))
        for number in range(-(-count // len(_HISTORIES))):
            chance = seeded(f"{seed}/{name}/{number}")
            point = chance.randint(first, len(operations))
            yield (
                f"power cut {number} ({name}, after call {point} of {len(operations)}) of seed {seed}",
                lambda _, o=operations[:point], c=chance, r=root: _cut(reference, o, r, c),
            )


def _recorded(reference, name, chance):
    """The calls of one build and of what came before it, the folder, and how many calls came before."""
    place = reference.place(name.replace(" ", "")).fresh()
    before = []
    if name.startswith("resumed"):
        before = _until_killed(place, chance)
    elif name == "added":
        half = replace(place, data=reference.half)
        before = traced.watch(lambda: run_quietly(half.words()), place.root).operations
    trace = traced.watch(lambda: run_quietly(place.words()), place.root)
    assert trace.status == 0, trace.status
    return before + trace.operations, place.root, len(before) + 1


def _until_killed(place, chance):
    """The calls of a build that was killed in the middle of a commit.

    Its last write is seen by the next process and is not yet on the disk, although it was to be durable.
    """
    left = chance.randint(4, 8)

    def meddle(_, operation):
        nonlocal left
        left -= operation.durable
        return "kill-after" if not left else None

    first = traced.watch(lambda: run_quietly(place.words()), place.root, meddle)
    assert first.status == -signal.SIGKILL, first.status
    *operations, last = first.operations
    return [*operations, replace(last, durable=False)]


def _cut(reference, operations, root, chance):
    disk = Disk(root)
    for operation in operations:
        disk.apply(operation)
    place = reference.place("cut").fresh()
    place.root.rmdir()
    # The reader of the events was told before the cut, whatever became of the file.
    told_before = bytes(disk.top.seen["events"].seen) if "events" in disk.top.seen else b""
    disk.cut(chance, place.root)
    place.events.write_bytes(told_before)
    check(place)
    heal(place, reference)


def faults(reference, count, seed):
    """Let the n-th call of a build fail, for each n until the build gets through."""
    total = traced.watch(lambda: run_quietly(reference.place("asked").fresh().words()), reference.place("asked").root)
    everything = [(number, error) for number in range(1, total.asked + 1) for error in _ERRORS]
    chosen = seeded(seed).sample(everything, count) if count else everything
    for number, error in chosen:
        name = error if isinstance(error, str) else errno.errorcode[error]
        yield f"call {number} of {total.asked} fails: {name}", lambda _, n=number, e=error: _fault(reference, n, e)


def _fault(reference, at, error):
    place = reference.place("failed").fresh()
    talk = reference.folder / "told"
    trace = traced.watch(
        lambda: run_quietly(place.words(), talk),
        place.root,
        lambda number, _: error if number == at else None,
    )
    if trace.status:
        assert_declared_or_event(trace.status, talk)
    check_but_events(place)
    heal(place, reference)


def assert_declared_or_event(status, talk):
    error = told(talk)["error"]
    if error["where"].endswith("events"):  # a path that was given, not the cache
        assert status in (2, 3), error
    else:
        assert_declared(status, talk)


def check_but_events(place):
    """As ``check``, where the last line of the event file may be cut short."""
    if place.events.exists():
        text = place.events.read_bytes()
        place.events.write_bytes(text[: text.rfind(b"\n") + 1])
    check(place)


def _main(mode, folder, *given):
    reference = Reference(folder)
    numbers = [int(word) if word.isdecimal() else word for word in given]
    cases = {"failpoints": failpoints, "kills": kills, "signals": signals, "cuts": cuts, "faults": faults}[mode]
    failed = done = 0
    for name, case in cases(reference, *numbers):
        done += 1
        try:
            case(name)
        except Exception:
            failed += 1
            sys.stderr.write(f"\n=== {mode}: {name}\n{traceback.format_exc()}")
    sys.stdout.write(f"{done} cases, {failed} failed\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
