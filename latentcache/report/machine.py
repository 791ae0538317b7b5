"""Checks of this machine before a build: packages, device, limits, disk. Only a worker process imports torch."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.encoders.devices import cuda_count, cuda_version, installed
from latentcache.errors import DeviceError, LatentcacheError, count_of
from latentcache.pipeline.preflight import check_space, free_bytes
from latentcache.pipeline.workers.resources import cpu_count, devices_for, host_memory
from latentcache.plan.numbers import human_bytes
from latentcache.store.gather import reader_kind

if TYPE_CHECKING:
    from latentcache.pipeline.publish import BuildPlan

_PACKAGES = ("latentcache", "numpy", "lmdb", "pillow", "simplejpeg", "xxhash", "safetensors", "torch", "diffusers",
             "transformers", "tokenizers")  # fmt: skip
_OPTIONAL = ("pyarrow",)
#: File systems that other machines serve. Locks and fsync mean less there, and small reads cost a round trip.
_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "virtiofs")
)
_LEAST_FILES, _LEAST_SHM = 1024, 1 << 30
#: Answers ``module:function`` in a worker process.
Ask = Callable[[str], Any]
#: One element of ``checks``: ``name``, ``state``, ``text``, and ``hint`` or ``fix`` if there is something to do.
Check = Mapping[str, Any]
#: The build that was asked for, with further options; empty if there is no data.
Rebuild = Callable[[str], str]


def _check(
    name: str, text: str, details: Mapping[str, Any], *, problem: bool = False, hint: str = "", fix: str = ""
) -> Check:
    """Make a check; a problem is what fails a build or rejects data."""
    state = "problem" if problem else "warning" if hint or fix else "ok"
    shown = {"name": name, "state": state, "text": text, "hint": hint, "fix": fix}
    return {key: value for key, value in shown.items() if value} | dict(details)


def machine_checks(device: str, ask: Ask, cache: Path, rebuild: Rebuild) -> Iterator[Check]:
    """Check the machine for a build of ``cache`` on ``device``."""
    yield packages()
    yield reader()
    yield checked("device", lambda: device_check(device, ask, rebuild))
    yield limits()
    yield checked("disk", lambda: disk(cache, rebuild))


def checked(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; its error becomes a problem."""
    try:
        return check()
    except LatentcacheError as error:
        why = f": {error.why}" if error.why else ""
        details = {"slug": error.slug, "where": error.where}
        return _check(name, f"{error.what}{why}", details, problem=True, fix=error.fix)


def packages() -> Check:
    """The libraries with their versions."""
    versions = {"python": platform.python_version(), **installed((*_PACKAGES, *_OPTIONAL))}
    missing = " ".join(name for name in _PACKAGES if not versions[name])
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    details = {"versions": versions}
    if not missing:
        return _check("packages", text, details)
    return _check("packages", f"{missing} missing; {text}", details, problem=True, fix=f"pip install {missing}")


def reader() -> Check:
    """The reader of batches."""
    kind = reader_kind()
    text = f"{kind.kind}: {kind.why}, so loaders read at a third of the speed" if kind.why else kind.kind
    return _check("reader", text, {"compiled_reader": not kind.why}, fix=kind.fix)


def device_check(device: str, ask: Ask, rebuild: Rebuild) -> Check:
    """The device that encoders will run on; a worker imports torch if there is a CUDA device."""
    host = f"{count_of(cpu_count(), 'cores')}, {human_bytes(host_memory())} of memory"
    details: dict[str, Any] = {"cores": cpu_count(), "host_memory": host_memory(), "driver": cuda_version()}
    devices_for(device, needs_torch=True)
    if device.startswith("cpu") or not (cuda_count() or Path("/dev/nvidia0").exists()):
        if device.startswith("cuda"):
            raise DeviceError("this machine has no CUDA device", fix=rebuild("--device cpu") or "give --device cpu")
        return _check("device", f"no CUDA device in use; {host}", details)
    details |= ask("latentcache.encoders.devices:device_report")
    driver = f"driver for CUDA {details['driver']}" if details["driver"] else "no driver"
    if details["usable"]:
        memory = f"{human_bytes(details['free_bytes'])} of {human_bytes(details['total_bytes'])} free"
        return _check("device", f"{details.pop('name')}, {memory}, {driver}; {host}", details)
    target = f"CUDA {details['cuda']}" if details["cuda"] else "the CPU only"
    return _check(
        "device",
        f"the CUDA device cannot be used: torch {details['torch']} is built for {target}, {driver}",
        details,
        hint="install the torch build that fits the driver",
        problem=True,
        fix=rebuild("--device cpu"),
    )


def limits() -> Check:
    """Open files and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112 - the system's
    details = {"open_files": soft, "shared_memory_free": shm}
    text, hint, fix = f"{soft} open files, {human_bytes(shm)} of shared memory free", "", ""
    if soft < _LEAST_FILES:
        text = f"{text}; caches need {_LEAST_FILES}"
        fix = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)}"
    elif shm < _LEAST_SHM:
        hint = "DataLoader workers pass batches through /dev/shm: give a container --shm-size 2g"
    return _check("limits", text, details, hint=hint, fix=fix)


def disk(cache: Path, rebuild: Rebuild) -> Check:
    """The disk of the cache."""
    free, kind = free_bytes(cache), file_system(cache)
    text = f"{human_bytes(free)} free at {cache}{f' on {kind}' if kind else ''}"
    details = {"cache": str(cache), "free_bytes": free, "file_system": kind}
    if kind not in _NETWORK and not kind.startswith("fuse."):
        return _check("disk", text, details)
    hint = "build on a local disk, then copy the cache: readers need no locks"
    fix = rebuild(f"--out {shlex.quote(str(Path(tempfile.gettempdir(), cache.name)))}")
    return _check("disk", f"{text}: a network file system", details, hint=hint, fix=fix)


def space(plan: BuildPlan) -> Check:
    """The room for the entries of a build."""
    check_space(plan)
    text = f"about {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
    return _check("space", text, {"bytes_to_write": plan.bytes_to_write})


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system of a path that need not exist; empty if the system does not say."""
    text = mounts.read_text("utf-8", "surrogateescape") if mounts.exists() else ""
    kinds = {Path(at.replace("\\040", " ")): kind for _, at, kind, *_ in map(str.split, text.splitlines())}
    whole = path.resolve()
    return next((kinds[folder] for folder in (whole, *whole.parents) if folder in kinds), "")
