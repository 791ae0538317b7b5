"""Devices, cores and memory of this machine, and a byte budget that preparing threads share.

Decides what ``--device auto`` is without importing torch, so the build process never does. A worker sees only its
own CUDA device, so no library can open a context on another one.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import field
from pathlib import Path

from latentcache.encoders.devices import cuda_count
from latentcache.errors import DeviceError, UsageError
from latentcache.value import Value

_GIB = 1 << 30
_CGROUP = Path("/sys/fs/cgroup")
#: Memory of a CPU worker beside its jobs: interpreter, libraries, a tokenizer of 250 000 entries, one unit of work.
BASE_BYTES = 1 << 30
_MOST_WORKERS = 32
_DEVICE = re.compile(r"(auto|cpu|cuda|mps|xpu)(?::([0-9]+))?(?:\*([1-9][0-9]{0,2}))?")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
#: New objects between two looks for garbage; 700 took a tenth of a build of small records.
_COLLECT = 50_000


def cpu_count() -> int:
    """Cores that this process may use: affinity where the system has it, else all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory(*, cgroup: Path = _CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this process may use: the least of the machine's memory and its cgroup limits (v1 and v2)."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_cgroup_limits(cgroup, membership)])


def _cgroup_limits(root: Path, membership: Path) -> list[int]:
    """Limits of all cgroups from this process's own up to the root."""
    limits = []
    for line in _read(membership).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        base, name = (root / "memory", "memory.limit_in_bytes") if controllers else (root, "memory.max")
        # In a container the path is often that of the host and missing below the root that is mounted here.
        folder = Path(os.path.normpath(f"{base}/{path}"))
        for group in (folder, *folder.parents):
            text = _read(group / name).strip()
            if text.isdecimal() and int(text):
                limits.append(int(text))
            if group == base:
                break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def default_budget() -> int:
    """Bytes for inputs that are being prepared: a quarter of the memory, at most 4 GiB."""
    return min(host_memory() // 4, 4 * _GIB)


def default_workers(total_cost: int, worth: int) -> int:
    """CPU workers for so much work: one per core, none if starting them would cost more than they save."""
    wanted = min(cpu_count(), _MOST_WORKERS, total_cost // worth)
    return wanted if wanted > 1 else 0


def default_threads(workers: int) -> int:
    """Preparing threads of each worker on an accelerator: its part of the cores, less one for the encoder."""
    cores = cpu_count()
    return max(cores - 1, 2) if workers == 1 else max(cores // max(workers, 1) - 1, 1)


def limit_memory(pid: int, limit: int) -> None:
    """Let a process take no more than ``limit`` bytes of memory (RLIMIT_DATA). Does nothing but on Linux."""
    if sys.platform == "linux":
        import resource

        with suppress(OSError, OverflowError):  # the process has ended, or is traced, or the system forbids it
            _, hard = resource.prlimit(pid, resource.RLIMIT_DATA)
            most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.prlimit(pid, resource.RLIMIT_DATA, (most, hard))


@contextmanager
def rare_gc() -> Iterator[None]:
    """Look for garbage in cycles less often: jobs are many small objects and make none, and each look visits all."""
    before = gc.get_threshold()
    gc.set_threshold(_COLLECT, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class ByteBudget:
    """Blocks threads that ask for more bytes than are left, in order. If none are taken, any size is granted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held = self._wanted = 0
        self._closed = False
        self._order = threading.Lock()
        self._free = threading.Condition()

    def starving(self, kept: int) -> bool:
        """True if a thread waits for bytes and only the caller can release some, of the ``kept`` ones."""
        with self._free:
            return bool(self._wanted) and self._held <= kept and not self._fits(self._wanted)

    def acquire(self, size: int) -> bool:
        """Take ``size`` bytes, waiting for them; False if the budget was closed meanwhile."""
        with self._order, self._free:
            self._wanted = size
            self._free.wait_for(lambda: self._closed or self._fits(size))
            self._wanted = 0
            self._held += 0 if self._closed else size
            return not self._closed

    def release(self, size: int) -> None:
        """Give bytes back."""
        with self._free:
            self._held -= size
            self._free.notify()

    def close(self) -> None:
        """Wake every waiting thread and grant nothing more."""
        with self._free:
            self._closed = True
            self._free.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._held or self._held + size <= self.limit


class Device(Value):
    """The device of one worker."""

    label: str
    """Name of the device in messages."""
    name: str
    """``auto``, ``cpu`` or a torch device."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Environment of its worker."""


def parse_devices(text: str) -> list[tuple[str, int | None]]:
    """``cuda:0,cuda:1`` or ``cpu*2`` as kinds with numbers, one for each worker."""
    devices: list[tuple[str, int | None]] = []
    for word in text.split(","):
        match = _DEVICE.fullmatch(word)
        if match is None or (match[2] and match[1] in ("auto", "cpu")) or (match[1] == "auto" and text != "auto"):
            raise UsageError(
                "unknown device",
                argument="device",
                value=text,
                fix="--device=auto|cpu|cuda|cuda:0,cuda:1|cpu*2",
            )
        devices += [(match[1], int(match[2]) if match[2] else None)] * int(match[3] or 1)
    if len({kind for kind, _ in devices}) > 1:
        raise UsageError(
            "devices of several kinds",
            argument="device",
            value=text,
            why="they compute in different precisions, and one cache has one",
            fix="name devices of one kind",
        )
    return devices


def devices_for(text: str, *, needs_torch: bool) -> list[Device]:
    """The devices of a build."""
    wanted = parse_devices(text)
    if wanted == [("auto", None)] and needs_torch and (several := cuda_count()) > 1:
        wanted = [("cuda", number) for number in range(several)]
    missing = [number for kind, number in wanted if kind == "cuda" and number is not None and number >= cuda_count()]
    if missing:
        count = cuda_count()
        raise DeviceError(
            "there is no such device",
            argument="device",
            value=f"cuda:{missing[0]}",
            why=f"this machine has {count or 'no'} CUDA devices" + ("" if count else ", or no driver"),
            fix="--device=auto, or name a device that is there",
        )
    return [_device(kind, number, len(wanted)) for kind, number in wanted]


def _device(kind: str, number: int | None, workers: int) -> Device:
    name = kind if number is None else f"{kind}:{number}"
    if kind == "cuda" and number is not None:
        visible = [number_or_name for number_or_name in os.environ.get(_VISIBLE, "").split(",") if number_or_name]
        chosen = visible[number] if number < len(visible) else str(number)
        return Device(label=name, name=kind, variables={_VISIBLE: chosen})
    if kind == "cpu" and workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        return Device(label=name, name=name, variables={"OMP_NUM_THREADS": str(max(cpu_count() // workers, 1))})
    return Device(label=name, name=name)
