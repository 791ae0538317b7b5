"""``latentcache doctor``: this machine, a model, a tokenizer and DATA, checked before a build."""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, fields, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.cli import flags
from latentcache.cli.console import Result, human_bytes, out
from latentcache.cli.flags import argument, option
from latentcache.cli.progress import clock, shared_entries
from latentcache.errors import DeviceError, DiskFullError, LatentcacheError, StoreError, WorkerError, count_of
from latentcache.value import Value

if TYPE_CHECKING:
    from latentcache.pipeline.report import BuildPlan
    from latentcache.pipeline.workers.results import Progress, RunResult

HELP = """Check this machine, a model, a tokenizer and DATA before a build.

With DATA a few items are encoded in a temporary folder, and the time and the bytes of the build are estimated.
Nothing is written to DATA or to a cache. Exit status: 0 fine, 1 the build would fail or reject data, 3 this machine
cannot do it.
"""
_PACKAGES = ("latentcache", "numpy", "lmdb", "pillow", "simplejpeg", "xxhash", "safetensors", "torch", "diffusers",
             "transformers", "tokenizers")  # fmt: skip
_OPTIONAL = ("pyarrow", "tiktoken")
#: File systems that other machines serve. Locks and fsync mean less there, and small reads cost a round trip.
_NETWORK = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "afs", "virtiofs")
)
_LEAST_FILES, _LEAST_SHM = 1024, 1 << 30
#: Inputs of a field that are encoded for an estimate at most, and seconds after which no further batch begins.
_PROBED, _PROBE_S = 64, 3.0
_ENVIRONMENT = (DeviceError, StoreError, DiskFullError, WorkerError)


class Check(Value):
    """One line of the report."""

    name: str
    text: str
    problem: bool = False
    """True if a build would fail or reject data."""
    hint: str = ""
    """Advice as text."""
    fix: str = ""
    """Advice as a command."""
    of_machine: bool = False
    """True if this machine is the problem, not the data or the model."""
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """``problem``, ``warning`` or ``ok``."""
        return "problem" if self.problem else "warning" if self.hint or self.fix else "ok"

    def as_json(self) -> dict[str, Any]:
        """One element of ``checks``."""
        shown = {"name": self.name, "state": self.state, "text": self.text, "hint": self.hint, "fix": self.fix}
        return {key: value for key, value in shown.items() if value} | dict(self.details)

    def lines(self) -> Iterator[str]:
        """The check as text."""
        yield f"{self.state:8} {self.name:9} {self.text}"
        yield from (f"  {name}: {text}" for name, text in (("hint", self.hint), ("fix", self.fix)) if text)


class _Request(Value):
    """The arguments of the command."""

    data: Path | None
    out: Path | None
    requested: flags.Requested
    source: flags.Source
    device: str

    def build(self, *more: str) -> str:
        """The build that these arguments mean; empty without DATA."""
        if self.data is None:
            return ""
        given, words = " ".join(more), ["latentcache build", shlex.quote(str(self.data))]
        words += [f"--out {shlex.quote(str(self.out))}"] if self.out and "--out" not in given else []
        words += [f"--fields {','.join(self.requested.fields)}"] if self.requested.exact else []
        words += [self.requested.words, self.requested.common, self.requested.source]
        words += [f"--device {self.device}"] if self.device != "auto" and "--device" not in given else []
        return " ".join(word for word in (*words, *more) if word)


def doctor(
    data: Path | None = argument("[DATA]", "Data that will be built.", None),
    *,
    out_folder: flags.Out = None,
    requested: flags.Requested,
    source: flags.Source,
    device: str = option("auto", "--device DEVICE", "As for build. [default: auto]"),
    as_json: flags.Json = False,
) -> Result:
    """Check this machine, a model, a tokenizer and DATA before a build."""
    given = _Request(data=data, out=out_folder, requested=requested, source=source, device=device)
    found: list[Check] = []
    for check in _checks(given):
        found.append(check)
        for line in () if as_json else check.lines():  # now: some checks take seconds
            out(line)
    problems = [check for check in found if check.problem]
    exit_code = 3 if any(check.of_machine for check in problems) else int(bool(problems))
    payload = {"data": None if data is None else str(data), "checks": [check.as_json() for check in found]}
    last = f"{count_of(len(problems), 'problems')} found" if problems else "ready"
    return Result(payload, [last], exit_code=exit_code)


def _checks(given: _Request) -> Iterator[Check]:
    yield _packages()
    device = _tried("device", _device, given)
    yield device
    if device.problem:  # the rest is looked at all the same
        given = replace(given, device="auto")
    yield _limits()
    yield _tried("disk", _place, given)
    for name, settings in given.requested.fields.items():
        check = _tried(name, _encoder, name, settings)
        if check.text:
            yield check
    if given.data is None:
        return
    try:
        plan = _plan(given, given.data)
    except LatentcacheError as error:
        yield _failed("data", error)
        return
    yield _findings(plan, given)
    yield _tried("space", _space, plan)
    for name in plan.fields:
        yield _tried("time", _time, plan, name)


def _tried(name: str, check: Callable[..., Check], *given: Any) -> Check:
    try:
        return check(*given)
    except LatentcacheError as error:
        return _failed(name, error)


def _failed(name: str, error: LatentcacheError) -> Check:
    """An error as a check; its fix is a command or words."""
    is_command = error.fix.startswith(("latentcache ", "git ", "pip ", "chmod ", "mkdir ", "ls ", "rm "))
    why = f": {error.why}" if error.why else ""
    return Check(
        name=name,
        problem=True,
        text=f"{error.what}{why}",
        of_machine=isinstance(error, _ENVIRONMENT),
        details={"slug": error.slug, "where": error.where},
        **{"fix" if is_command else "hint": error.fix},
    )


# the machine


def _packages() -> Check:
    from latentcache.encoders.versions import installed
    from latentcache.store.gather import LIBRARY

    versions = {"python": platform.python_version(), **installed((*_PACKAGES, *_OPTIONAL))}
    missing = " ".join(name for name in _PACKAGES if not versions[name])
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    text = f"{missing} missing; {text}" if missing else text
    return Check(
        name="packages",
        problem=bool(missing),
        text=f"{text}; compiled reader: {'used' if LIBRARY else 'not there'}",
        fix=f"pip install {missing}" if missing else "",
        of_machine=bool(missing),
        details={"versions": versions, "compiled_reader": LIBRARY is not None},
    )


def _device(given: _Request) -> Check:
    """The device that encoders will run on; torch is imported by a worker, and only where there is a CUDA device."""
    from latentcache.encoders.versions import cuda_count, cuda_version
    from latentcache.pipeline.devices import devices_for
    from latentcache.pipeline.workers.memory import cpu_count, host_memory
    from latentcache.pipeline.workers.process import WarmWorker

    host = f"{count_of(cpu_count(), 'CPU cores')}, {human_bytes(host_memory())} of memory"
    details: dict[str, Any] = {"cores": cpu_count(), "host_memory": host_memory(), "driver": cuda_version()}
    fix = given.build("--device cpu")
    devices_for(given.device, needs_torch=True)
    if given.device.startswith("cpu") or not (cuda_count() or Path("/dev/nvidia0").exists()):
        if given.device.startswith("cuda"):
            raise DeviceError("this machine has no CUDA device", fix=fix or "give --device cpu")
        return Check(name="device", text=f"no CUDA device in use; {host}", details=details)
    with WarmWorker(given.device) as worker:
        details |= worker.ask("latentcache.encoders.versions:device_report")
    driver = f"driver for CUDA {details['driver']}" if details["driver"] else "no driver"
    if details["usable"]:
        memory = f"{human_bytes(details['free_bytes'])} of {human_bytes(details['total_bytes'])} free"
        return Check(name="device", text=f"{details['name']}, {memory}, {driver}; {host}", details=details)
    built = (
        f"torch {details['torch']} is built for {'CUDA ' + details['cuda'] if details['cuda'] else 'the CPU only'}"
    )
    text, hint = f"the CUDA device cannot be used: {built}, {driver}", "install the torch build that fits the driver"
    return Check(name="device", problem=True, text=text, hint=hint, fix=fix, of_machine=True, details=details)


def _limits() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112 - the system's
    details = {"open_files": soft, "shared_memory_free": shm}
    text, hint, fix = f"{soft} open files, {human_bytes(shm)} of shared memory free", "", ""
    if soft < _LEAST_FILES:
        text = f"{text}; caches need {_LEAST_FILES}"
        fix = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)}"
    elif shm < _LEAST_SHM:
        hint = "DataLoader workers pass batches through /dev/shm: give a container --shm-size 2g"
    return Check(name="limits", text=text, hint=hint, fix=fix, details=details)


def _place(given: _Request) -> Check:
    """The disk of the cache."""
    from latentcache.pipeline.preflight import check_paths, free_bytes
    from latentcache.pipeline.settings import beside

    cache = given.out or (beside(given.data) if given.data else Path.cwd())
    if given.data is not None:
        check_paths(given.data, cache)
    free, kind = free_bytes(cache), file_system(cache)
    text = f"{human_bytes(free)} free at {cache}{f' on {kind}' if kind else ''}"
    details = {"cache": str(cache), "free_bytes": free, "file_system": kind}
    if kind not in _NETWORK and not kind.startswith("fuse."):
        return Check(name="disk", text=text, details=details)
    hint = "build on a local disk, then copy the cache: readers need no locks"
    fix = given.build(f"--out {shlex.quote(str(Path(tempfile.gettempdir(), cache.name)))}")
    return Check(name="disk", text=f"{text}: a network file system", hint=hint, fix=fix, details=details)


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system of a path that need not exist; empty if the system does not say."""
    text = mounts.read_text("utf-8", "surrogateescape") if mounts.exists() else ""
    kinds = {Path(place.replace("\\040", " ")): kind for _, place, kind, *_ in map(str.split, text.splitlines())}
    whole = path.resolve()
    return next((kinds[one] for one in (whole, *whole.parents) if one in kinds), "")


# encoders and data


def _encoder(name: str, settings: Any) -> Check:
    """The encoder that was named for a field, without DATA and without loading it; no text: none was named."""
    from latentcache.fields.protocol import Cached, DescribeContext
    from latentcache.fields.registry import field_kinds, load

    kind = field_kinds()[name]
    if getattr(settings, fields(settings)[0].name) is None:
        return Check(name=name, text="")
    found = load(kind.describer)(settings, Cached(), DescribeContext(check=True))
    about = next(iter(kind.describe(found.recipe, found.provenance).values()), "")
    text = about if about.startswith(found.label) else f"{found.label}: {about}"
    hint = "give a VAE with --model: latents of the demo encoder are not for training" if found.demo else ""
    return Check(name=name, text=text, hint=hint)


def _plan(given: _Request, data: Path) -> BuildPlan:
    """Plan a build of DATA."""
    from latentcache.pipeline.build import plan_build
    from latentcache.pipeline.settings import BuildSettings

    options = {"source": given.source, **given.requested.build}
    return plan_build(BuildSettings(data=data, out=given.out, device=given.device, **options))


def _findings(plan: BuildPlan, given: _Request) -> Check:
    from latentcache.pipeline.report import quarantined

    rejected, notes = quarantined(plan.rejected), sum(note.count for note in plan.notes)
    entries = f"{count_of(plan.to_make, 'entries')} to make, {plan.cached} reused"
    text = f"{count_of(plan.samples, 'samples')}, {entries}{shared_entries(plan.duplicates)}"
    details = {"samples": plan.samples, "entries_to_make": plan.to_make, "quarantined": rejected, "notes": notes}
    hint, fix = f"{count_of(notes, 'notes')}: `latentcache inspect` lists them" if notes else "", ""
    if rejected:
        first, fix = plan.rejected[0], given.build(f"--allow-failed {rejected}")
        text = f"{text}, {rejected} rejected, the first is {first.name} [{first.reason}]"
    return Check(name="data", problem=bool(rejected), text=text, hint=hint, fix=fix, details=details)


def _space(plan: BuildPlan) -> Check:
    from latentcache.pipeline.preflight import check_space

    check_space(plan)
    text = f"about {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
    return Check(name="space", text=text, details={"bytes_to_write": plan.bytes_to_write})


def _time(plan: BuildPlan, name: str) -> Check:
    """The time and the bytes of a field, from a few of its items."""
    work = plan.fields[name]
    if not len(work.todo):
        return Check(name="time", text=f"{name}: nothing to encode", details={"field": name, "seconds": 0.0})
    warnings, started = list[str](), time.monotonic()
    result = _probed(plan, name, warnings)
    done = result.progress
    open_s = max((done.began or time.monotonic()) - started, 0.0)
    times = work.cost / done.cost_done if done.cost_done else 0.0
    seconds = open_s + result.encode_s * times
    num_bytes = int(done.written_bytes * times) if work.recipe.spec.ragged else work.bytes_to_write
    details = {"field": name, "seconds": round(seconds, 1), "bytes": num_bytes, "probed": result.encoded}
    if not result.encoded:
        text = f"{name}: none of {len(result.failed)} inputs of the largest group could be encoded"
        return Check(name="time", problem=True, text=text, details=details)
    group = work.plan.groups[work.plan.group[work.todo[0]]].label
    measured = f"{count_of(result.encoded, 'entries')}{f', {group} first,' if group else ''}"
    text = f"{name}: about {clock(seconds)} and {human_bytes(num_bytes)} (estimate from {measured} in"
    text = f"{text} {result.encode_s:.1f} s and {open_s:.1f} s to open the encoder)"
    return Check(name="time", text=text, hint="; ".join(warnings), details=details)


def _probed(plan: BuildPlan, name: str, warnings: list[str]) -> RunResult:
    """Encode a few items of a field by the normal workers, into a temporary folder."""
    from latentcache.pipeline.interrupt import StopSignal
    from latentcache.pipeline.workers.process import WarmWorker
    from latentcache.pipeline.workers.scheduler import Run

    assert plan.listing is not None  # of every build
    jobs, stop = list(islice(plan.fields[name].jobs(plan.listing), _PROBED)), StopSignal()

    def look(progress: Progress) -> None:
        if progress.began and progress.done and time.monotonic() - progress.began > _PROBE_S:
            stop.request()

    with tempfile.TemporaryDirectory(prefix="latentcache-doctor-") as folder, WarmWorker() as warm:
        Path(folder, "shards").mkdir()
        return Run(
            replace(plan.tasks[name], cache=folder, lookup="", stream=False),
            jobs,
            total=len(jobs),
            total_cost=sum(job.cost for job in jobs),
            items=sum(len(job.outputs) for job in jobs),
            stop=stop,
            warm=warm,
            warn=warnings.append,
        ).run(look)
