"""Show how DATA is understood, and check this machine before a build; the facts of ``inspect``.

Of DATA: layout, captions, sizes, records, and a few samples as a build would use them. Of the machine: packages,
device, limits, disk. Only a worker process imports torch.
"""

from __future__ import annotations

import os
import platform
import resource
import shlex
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.encoders.devices import cuda_count, cuda_version, installed
from latentcache.errors import DeviceError, LatentcacheError, count_of
from latentcache.fields.captions import BETWEEN
from latentcache.fields.clips import CLIP
from latentcache.pipeline.preflight import check_space, free_bytes
from latentcache.pipeline.publish import quarantined
from latentcache.pipeline.workers.resources import cpu_count, devices_for, host_memory
from latentcache.plan.numbers import human_bytes
from latentcache.store.gather import reader_kind
from latentcache.verify.findings import path_json

if TYPE_CHECKING:
    from latentcache.fields.table import SampleTable
    from latentcache.pipeline.publish import BuildPlan
    from latentcache.sources.records import Record
    from latentcache.sources.scan import Listing

#: ``Record.form`` of a conversation.
_CHAT = 1
#: Records whose roles are counted, and files of records that are named.
_LOOKED_AT, _FILES = 200, 10
#: Characters of a text that is shown.
_EXCERPT = 200
#: Parts of a record that are counted.
_RECORD_FIELDS = ("text", "begin", "messages", "tools", "options")
_PACKAGES = ("latentcache", "numpy", "lmdb", "pillow", "simplejpeg", "xxhash", "safetensors", "torch", "diffusers",
             "transformers", "tokenizers")  # fmt: skip
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


# data


def describe_data(listing: Listing) -> dict[str, Any]:
    """Describe DATA by its listing, as keys of ``inspect``; records are opened for their roles alone."""
    samples, layout, images = listing.samples, listing.layout, listing.images
    about: dict[str, Any] = {"data_kind": listing.data_kind, "duplicates": _duplicates(samples)}
    if layout is not None and images is not None:
        numbers = zip(layout.sets, images.set_samples, strict=False)
        sets = [{**part.as_json(), "samples": number} for part, number in numbers]
        about["layout"] = {"word": layout.word, "why": layout.why, "sets": sets}
        about |= {"captions": images.captions, "first_without_caption": images.first_without}
        about["several_captions"] = images.several
        further = {name: part for name, part in samples.inputs.items() if name not in ("image", "caption")}
        about["further"] = {name: int((part.file >= 0).sum()) for name, part in further.items()}
    if listing.data_kind == "records":
        about["records"] = _records(listing)
    if "original_size" in samples.columns:
        about["sizes"] = _sizes(samples)
    clips = samples.columns.get(CLIP)
    if clips is not None and clips.any():
        frames = clips[clips[:, 0] > 0, 0]
        about["clips"] = {"samples": len(frames), "shortest": int(frames.min()), "longest": int(frames.max())}
    count = len(samples) + quarantined(listing.rejected)
    return about | {"counts": {"samples": count, "no_caption": listing.no_caption}}


def _sizes(samples: SampleTable) -> dict[str, Any]:
    """The smallest and the largest image of those whose header was read."""
    sizes = samples.columns["original_size"]
    area = np.asarray(sizes).astype(np.int64).prod(axis=1)
    read = np.flatnonzero(area)
    about: dict[str, Any] = {"read": len(read)}
    for name, choose in (("smallest", np.argmin), ("largest", np.argmax)) if len(read) else ():
        row = int(read[choose(area[read])])
        height, width = map(int, sizes[row])
        about[name] = {"height": height, "width": width, **path_json(samples.names[row])}
    return about


def _duplicates(samples: SampleTable) -> dict[str, Any]:
    """Count samples with the content of an earlier one, as far as files were hashed, and name the first."""
    content = np.ascontiguousarray(samples.first_input.content)
    known = np.flatnonzero(content.any(axis=1))
    _, first = np.unique(content[known].view("V16").reshape(-1), return_index=True)
    again = known[np.setdiff1d(np.arange(len(known)), first)]
    return {"known": len(again), "first": samples.names[int(again[0])] if len(again) else ""}


def _records(listing: Listing) -> dict[str, Any]:
    """Describe forms, lengths and files of records, and roles of the first ones."""
    samples = listing.samples
    chat = int(np.count_nonzero(np.asarray(samples.columns["form"]) == _CHAT))
    files = np.bincount(np.asarray(samples.inputs["record"].file), minlength=len(samples.files))
    named = [int(number) for number in np.flatnonzero(files)[:_FILES]]
    about: dict[str, Any] = {"conversations": chat, "texts": len(samples) - chat}
    about["files"] = [{**path_json(samples.files.names[at]), "records": int(files[at])} for at in named]
    characters = np.asarray(samples.columns["characters"])
    if len(characters):
        about["characters"] = {"shortest": int(characters.min()), "longest": int(characters.max())}
    roles, fields = Counter[str](), Counter[str]()
    looked = np.arange(min(len(samples), _LOOKED_AT))
    for _, inputs in listing.job_inputs(looked, ("record",), strict=False):
        record: Record | None = inputs["record"]
        if record is not None:
            fields.update(name for name in _RECORD_FIELDS if getattr(record, name))
            roles.update(message.role for message in record.messages or ())
    return about | {"roles": dict(roles), "fields": dict(fields), "looked_at": len(looked)}


def shown_samples(listing: Listing, plan: BuildPlan | None) -> list[dict[str, Any]]:
    """Show how the first, a middle and the last sample were understood; ``plan`` gives their buckets."""
    samples = listing.samples
    rows = sorted({0, len(samples) // 2, len(samples) - 1}) if len(samples) else []
    if listing.data_kind == "records":
        return [
            {**path_json(samples.names[row]), "turns": _turns(inputs["record"])}
            for row, inputs in listing.job_inputs(rows, ("record",), strict=False)
        ]
    return [_shown_image(listing, row, plan) for row in rows]


def _turns(record: Record | None) -> list[dict[str, str]]:
    """Roles and beginnings of the texts of a record; the role of a plain text is ``text``."""
    if record is None or record.messages is None:
        return [{"role": "text", "text": _excerpt((record and record.text) or "")}]
    return [{"role": message.role, "text": _excerpt(message.content)} for message in record.messages]


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _shown_image(listing: Listing, row: int, plan: BuildPlan | None) -> dict[str, Any]:
    samples, layout = listing.samples, listing.layout
    assert layout is not None  # of images
    name = samples.names[row]
    inside = (part for part in layout.sets if not part.folder or name.startswith(f"{part.folder}/"))
    owner = max(inside, key=lambda part: len(part.folder), default=None)
    numbers = {role: int(part.file[row]) for role, part in samples.inputs.items()}
    files = {role: samples.files.names[number] for role, number in numbers.items() if number >= 0}
    buckets = {}
    for field, work in plan.fields.items() if plan else ():
        items = np.flatnonzero(work.plan.sample == row)
        if len(items) and (label := work.plan.groups[int(work.plan.group[items[0]])].label):
            buckets[field] = label
    shown: dict[str, Any] = {
        "set": owner.label if owner is not None and len(layout.sets) > 1 else "",
        "split": (owner.split if owner is not None else "") or layout.split,
        "caption_file": files.get("caption", ""),
        "paired": {role: file for role, file in files.items() if role not in ("image", "caption")},
        "buckets": buckets,
    }
    shown = {key: value for key, value in shown.items() if value}
    captions = samples.inputs["caption"].text if "caption" in samples.inputs else None
    if captions is not None:
        shown["caption"] = _excerpt(captions[row].replace(BETWEEN, " | "))
    return path_json(name) | shown


# machine


def _check(name: str, text: str, *, problem: bool = False, hint: str = "", fix: str = "", **details: Any) -> Check:
    """Make a check; a problem is what fails a build or rejects data."""
    state = "problem" if problem else "warning" if hint or fix else "ok"
    shown = {"name": name, "state": state, "text": text, "hint": hint, "fix": fix}
    return {key: value for key, value in shown.items() if value} | details


def machine_checks(device: str, ask: Ask, cache: Path, rebuild: Rebuild) -> Iterator[Check]:
    """Check the machine for a build of ``cache`` on ``device``."""
    yield _packages()
    kind = reader_kind()
    slow = f": {kind.why}, so loaders read at a third of the speed" if kind.why else ""
    yield _check("reader", f"{kind.kind}{slow}", fix=kind.fix, compiled_reader=not kind.why)
    yield checked("device", lambda: device_check(device, ask, rebuild))
    yield _limits()
    yield checked("disk", lambda: _disk(cache, rebuild))


def checked(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; its error becomes a problem."""
    try:
        return check()
    except LatentcacheError as error:
        text = f"{error.what}: {error.why}" if error.why else error.what
        return _check(name, text, problem=True, fix=error.fix, slug=error.slug, where=error.where)


def _packages() -> Check:
    versions = {"python": platform.python_version(), **installed((*_PACKAGES, "pyarrow"))}
    missing = " ".join(name for name in _PACKAGES if not versions[name])
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if not missing:
        return _check("packages", text, versions=versions)
    fix = f"pip install {missing}"
    return _check("packages", f"{missing} missing; {text}", problem=True, fix=fix, versions=versions)


def device_check(device: str, ask: Ask, rebuild: Rebuild) -> Check:
    """Check the device that encoders will run on; a worker imports torch if there is a CUDA device."""
    host = f"{count_of(cpu_count(), 'cores')}, {human_bytes(host_memory())} of memory"
    details: dict[str, Any] = {"cores": cpu_count(), "host_memory": host_memory(), "driver": cuda_version()}
    devices_for(device, needs_torch=True)
    if device.startswith("cpu") or not (cuda_count() or Path("/dev/nvidia0").exists()):
        if device.startswith("cuda"):
            raise DeviceError("this machine has no CUDA device", fix=rebuild("--device cpu") or "give --device cpu")
        return _check("device", f"no CUDA device in use; {host}", **details)
    details |= ask("latentcache.encoders.devices:device_report")
    driver = f"driver for CUDA {details['driver']}" if details["driver"] else "no driver"
    if details["usable"]:
        memory = f"{human_bytes(details['free_bytes'])} of {human_bytes(details['total_bytes'])} free"
        return _check("device", f"{details.pop('name')}, {memory}, {driver}; {host}", **details)
    target = f"CUDA {details['cuda']}" if details["cuda"] else "the CPU only"
    return _check(
        "device",
        f"the CUDA device cannot be used: torch {details['torch']} is built for {target}, {driver}",
        problem=True,
        hint="install the torch build that fits the driver",
        fix=rebuild("--device cpu"),
        **details,
    )


def _limits() -> Check:
    """Check open files and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    shm = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0  # noqa: PTH112 - the system's
    text, hint, fix = f"{soft} open files, {human_bytes(shm)} of shared memory free", "", ""
    if soft < _LEAST_FILES:
        text = f"{text}; caches need {_LEAST_FILES}"
        fix = f"ulimit -n {4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)}"
    elif shm < _LEAST_SHM:
        hint = "DataLoader workers pass batches through /dev/shm: give a container --shm-size 2g"
    return _check("limits", text, hint=hint, fix=fix, open_files=soft, shared_memory_free=shm)


def _disk(cache: Path, rebuild: Rebuild) -> Check:
    """Check the disk of the cache."""
    free = free_bytes(cache)
    kind = file_system(cache)
    text, hint, fix = f"{human_bytes(free)} free at {cache}{f' on {kind}' if kind else ''}", "", ""
    if kind in _NETWORK or kind.startswith("fuse."):
        text = f"{text}: a network file system"
        hint = "build on a local disk, then copy the cache: readers need no locks"
        fix = rebuild(f"--out {shlex.quote(str(Path(tempfile.gettempdir(), cache.name)))}")
    return _check("disk", text, hint=hint, fix=fix, cache=str(cache), free_bytes=free, file_system=kind)


def space(plan: BuildPlan) -> Check:
    """Check the room for the entries of a build."""
    check_space(plan)
    text = f"about {human_bytes(plan.bytes_to_write)} to write, {human_bytes(plan.free_bytes)} free"
    return _check("space", text, bytes_to_write=plan.bytes_to_write)


def file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Name the type of the file system of a path that need not exist; empty if the system does not say."""
    text = mounts.read_text("utf-8", "surrogateescape") if mounts.exists() else ""
    kinds = {Path(at.replace("\\040", " ")): kind for _, at, kind, *_ in map(str.split, text.splitlines())}
    whole = path.resolve()
    return next((kinds[folder] for folder in (whole, *whole.parents) if folder in kinds), "")
