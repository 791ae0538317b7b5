"""Hires the workers of one build, and takes over what dead ones leave.

Decides where a worker lives: an encoder that needs no torch and has one device runs in a thread of the build, because
a process would cost a small build more than all of its pictures; everything else gets a process of its own, which
costs nothing there, since torch is imported once either way (decision record 18).
"""

from __future__ import annotations

import secrets
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.encoders.describe import ModelDescription
from latentcache.encoders.protocol import Precision
from latentcache.errors import WorkerError
from latentcache.pipeline.budget import default_budget_bytes
from latentcache.pipeline.channel import Message
from latentcache.pipeline.devices import Device, devices_for
from latentcache.pipeline.forms import as_error, description_form
from latentcache.pipeline.launch import Launched, WorkerProcess, WorkerThread
from latentcache.pipeline.preflight import default_threads
from latentcache.pipeline.resize import resample_self_test
from latentcache.pipeline.run import expected_pieces
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.work import Planned
from latentcache.pipeline.worker import Job
from latentcache.recipe import Recipe
from latentcache.store.catalog import undamaged_index
from latentcache.store.layout import OPEN_SUFFIX, CacheLayout
from latentcache.store.salvage import salvage
from latentcache.store.shard import recover_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a build has made, of what, and where it goes."""

    settings: BuildSettings
    root: Path
    """The data folder."""
    layout: CacheLayout
    recipe: Recipe
    description: ModelDescription
    """The model."""


class Reception:
    """A worker process that may be started before it is known what there is to do: it imports torch meanwhile.

    Args:
        device: As in the settings.
        lock: Descriptor of the lock on the cache.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._early: tuple[Device, WorkerProcess] | None = None
        self._works: bool | None = None
        self.lock: int | None = None

    def resample_works(self) -> bool:
        """Whether torch's resize can be used here; the build itself does not import torch for it.

        Raises:
            WorkerError: The process that was to find out has died.
        """
        if "torch" in sys.modules:
            return resample_self_test()
        if self._works is None:
            self._works = bool(self._ask("can-resample")["works"])
        return self._works

    def find_precision(self, description: ModelDescription, fold: bool) -> Precision:
        """In which precision a new cache of a model is computed on the first device; the model is loaded there.

        Args:
            description: The model.
            fold: Do the causal 3D convolutions of clip encoders as 2D ones.

        Raises:
            DeviceError: The device is not there or failed.
            DeviceMemoryError: The encoder, or one small picture, does not fit.
            WorkerError: The process that was to find out has died.
        """
        found = self._ask("find-precision", description=description_form(description), fold=fold)
        return Precision(compute_dtype=found["compute_dtype"], why=found["why"])

    def early(self, device: Device) -> WorkerProcess | None:
        """The process that was started, if it is one for this device; it is the caller's from now on."""
        if self._early is None or self._early[0] != device:
            return None
        _, process = self._early
        self._early = None
        return process

    def close(self) -> None:
        """Nobody wanted it."""
        if self._early is not None:
            _, process = self._early
            process.kill()
            process.ended()
            process.line.close()
            self._early = None

    def _ask(self, question: str, **facts: Any) -> Message:
        """Ask the worker of the first device, which is started where there is none."""
        if self._early is None:
            device = devices_for(self._device, needs_torch=True)[0]
            self._early = device, WorkerProcess(device.variables, lock=self.lock)
        device, process = self._early
        process.line.send(question, device=device.name, **facts)
        while True:
            select.select([process.line], [], [])
            for message in process.line.arrived():
                if message["kind"] == "error":
                    self.close()
                    raise as_error(message)
                return message
            if process.line.ended:
                self._early = None
                _, words = process.ended()
                process.line.close()
                raise WorkerError("a worker process cannot be started", why=f"it {words}")


class Workers:
    """The :class:`latentcache.pipeline.pool.Staff` of a build.

    Args:
        task: What they have to know.
        reception: May have a process ready.
        todo: Everything that they are to make.
    """

    def __init__(self, task: Task, reception: Reception, todo: Sequence[Planned]) -> None:
        settings = task.settings
        needs_torch = task.description.kind == "diffusers"
        self.devices: Sequence[Device] = devices_for(settings.device, needs_torch=needs_torch)
        count = len(self.devices)
        self.in_process = count == 1 and not needs_torch and "*" not in settings.device
        self.decode_threads = settings.decode_threads or default_threads(count)
        self._layout, self._reception = task.layout, reception
        self.expected = expected_pieces(todo, task.recipe.variants, workers=count)
        budget = max((settings.host_memory or default_budget_bytes()) // count, 1)
        self._job: Callable[[Device, str], Job] = lambda device, shard: Job(
            root=task.root,
            shards=task.layout.shards,
            shard=shard,
            recipe=task.recipe,
            description=task.description,
            settings=settings,
            device=device.name,
            budget_bytes=budget,
            decode_threads=self.decode_threads,
            expected=self.expected,
        )

    def hire(self, device: Device, *, again: bool) -> tuple[Launched, Message, str]:
        """As in ``Staff``."""
        shard = f"{secrets.token_hex(8)}{OPEN_SUFFIX}"
        job = self._job(device, shard).form()
        if self.in_process:
            return WorkerThread(), job, shard
        early = None if again else self._reception.early(device)
        process = early or WorkerProcess(device.variables, lock=self._reception.lock, again=again)
        return process, job, shard

    def left_by(self, shard: str) -> list[bytes]:
        """As in ``Staff``; nothing where it is sealed already, and all of it was said."""
        folder = self._layout.shards / shard
        if not folder.exists():
            sealed = folder.with_name(shard.removesuffix(OPEN_SUFFIX))
            return _keys_in(sealed) if sealed.exists() else []
        sealed_now = recover_shard(folder, self._layout.quarantine, lambda lost: salvage(self._layout, lost))
        return [] if sealed_now is None else _keys_in(sealed_now)


def _keys_in(sealed: Path) -> list[bytes]:
    """Keys of a sealed shard; none of one that is damaged, which the next build says.

    Raises:
        StoreError: The system refuses to read it.
    """
    index = undamaged_index(sealed)
    return [] if index is None else index.keys()
