"""``--device``: the devices of a build, one worker for each.

Decides what ``auto`` is without importing torch, so that the build process never does. Guarantee: a worker sees only
its own CUDA device, so no library can open a context on another one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import field

from latentcache.encoders.versions import cuda_count
from latentcache.errors import DeviceError, UsageError
from latentcache.pipeline.workers.memory import cpu_count
from latentcache.value import Value

_ONE = re.compile(r"(auto|cpu|cuda|mps|xpu)(?::([0-9]+))?(?:\*([1-9][0-9]{0,2}))?")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


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
    found: list[tuple[str, int | None]] = []
    for word in text.split(","):
        match = _ONE.fullmatch(word)
        if match is None or (match[2] and match[1] in ("auto", "cpu")) or (match[1] == "auto" and text != "auto"):
            raise UsageError(
                "unknown device",
                argument="device",
                value=text,
                fix="--device=auto|cpu|cuda|cuda:0,cuda:1|cpu*2",
                fix_python="device='auto', 'cpu', 'cuda', 'cuda:0,cuda:1' or 'cpu*2'",
            )
        found += [(match[1], int(match[2]) if match[2] else None)] * int(match[3] or 1)
    if len({kind for kind, _ in found}) > 1:
        raise UsageError(
            "devices of several kinds",
            argument="device",
            value=text,
            why="they compute in different precisions, and one cache has one",
            fix="name devices of one kind",
        )
    return found


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
            fix_python="device='auto', or name a device that is there",
        )
    return [_device(kind, number, len(wanted)) for kind, number in wanted]


def _device(kind: str, number: int | None, workers: int) -> Device:
    name = kind if number is None else f"{kind}:{number}"
    if kind == "cuda" and number is not None:
        visible = [one for one in os.environ.get(_VISIBLE, "").split(",") if one]
        chosen = visible[number] if number < len(visible) else str(number)
        return Device(label=name, name=kind, variables={_VISIBLE: chosen})
    if kind == "cpu" and workers > 1 and "OMP_NUM_THREADS" not in os.environ:
        return Device(label=name, name=name, variables={"OMP_NUM_THREADS": str(max(cpu_count() // workers, 1))})
    return Device(label=name, name=name)
