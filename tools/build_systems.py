"""The systems that ``bench_build`` compares, each as one call that makes the latents of the same images."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from build_data import BATCH, batches_in_memory, latents_settings, opened, placed
from build_peers import Encode, Planned, diffusers_loop, sequential_loop, sleeping, with_vae

from latentcache import BuildSettings, build_cache
from latentcache.encoders.pixels import Pixels
from latentcache.encoders.vae.builtin import Encoder

PURE = "encoder alone"


class Kept:
    """An encoder that stays open after a build, so that no system's time includes loading."""

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._encoder, name)

    def close(self) -> None:
        """Keep the encoder open."""


@contextmanager
def inside(encoder: Encoder) -> Iterator[None]:
    """Builds have their worker in a thread of this process, with this open encoder."""
    with (
        patch("latentcache.encoders.vae.producer.open_encoder", lambda *_, **__: encoder),
        patch("latentcache.pipeline.workers.local.worker_count", lambda *_: 0),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One encoder and the images, for all systems."""

    name: str
    model: str
    data: Path
    work: Path
    torch_threads: int
    """Torch threads of the encoder in every system."""
    encoder: Encoder
    peer: Encode
    batches: list[Pixels]
    plan: list[Planned]
    images: int = field(default=0)

    def clear(self) -> None:
        """Delete the output of the last system."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()

    def build(self, resample: str) -> None:
        """Build with the open encoder, so that all systems use the same one."""
        settings = BuildSettings(
            data=self.data,
            out=self.work / "cache",
            fields={"latents": latents_settings(self.model, resample=resample)},
            device="cpu",
            batch_size=BATCH,
        )
        with inside(self.encoder):
            report = build_cache(settings)
        if report.encoded != self.images or report.rejected:
            raise SystemExit(f"the build encoded {report.encoded} of {self.images}: {report.rejected}")


def bench_for(name: str, folder: Path) -> Bench:
    """Create the bench: ``sim10`` and ``sim2`` are stubs with that delay; ``vae`` has one thread, ``vae-all`` all."""
    is_stub = name.startswith("sim")
    model = f"stub:delay_ms={name.removeprefix('sim')}" if is_stub else str(folder / "vae")
    threads = len(os.sched_getaffinity(0)) if name == "vae-all" else 1
    torch.set_num_threads(threads)
    recipe, encoder = opened(latents_settings(model, resample="lanczos-u8"))
    data = folder / "data"
    plan = [Planned(path=path, placement=placed(path, recipe)[1]) for path in sorted(data.iterdir())]
    return Bench(
        name=name,
        model=model,
        data=data,
        work=folder / "work",
        torch_threads=threads,
        encoder=cast("Encoder", Kept(encoder)),
        peer=sleeping(int(name.removeprefix("sim"))) if is_stub else with_vae(model),
        batches=batches_in_memory(data, recipe),
        plan=plan,
        images=len(plan),
    )


def encode_alone(bench: Bench) -> None:
    """Encode the batches of a build from memory and discard the latents."""
    torch.set_num_threads(bench.torch_threads)
    for batch in bench.batches:
        bench.encoder.encode(batch)


def whole_build(bench: Bench) -> None:
    """Run ``build_cache``."""
    torch.set_num_threads(bench.torch_threads)
    bench.build("lanczos-u8")


def pillow_build(bench: Bench) -> None:
    """Run ``build_cache`` with Pillow only; the other decoder is patched out."""
    torch.set_num_threads(bench.torch_threads)
    with ExitStack() as stack:
        stack.enter_context(patch("latentcache.images.decode.turbo_pixels", lambda *_: None))
        bench.build("lanczos-pil")


def one_file_each(bench: Bench) -> None:
    """Run the DataLoader loop with torch.save."""
    torch.set_num_threads(bench.torch_threads)
    _expect(diffusers_loop(bench.plan, bench.work / "files", bench.peer, batch=BATCH), bench)


def large_files(bench: Bench) -> None:
    """Run the DataLoader loop with sequential files."""
    torch.set_num_threads(bench.torch_threads)
    _expect(sequential_loop(bench.plan, bench.work / "files", bench.peer, batch=BATCH), bench)


SYSTEMS: Mapping[str, Callable[[Bench], None]] = {
    PURE: encode_alone,
    "latentcache": whole_build,
    "latentcache, Pillow only": pillow_build,
    "DataLoader, file per latent": one_file_each,
    "DataLoader, large files": large_files,
}


def again(data: Path, work: Path, rounds: int) -> dict[str, list[float]]:
    """Measure seconds of builds that reuse everything: young, touched and unchanged old files."""
    times: dict[str, list[float]] = {"young": [], "touched": [], "old": []}
    settings = BuildSettings(
        data=data, out=work / "cache", fields={"latents": latents_settings("stub")}, device="cpu"
    )
    shutil.rmtree(work, ignore_errors=True)
    build_cache(settings)
    for _ in range(rounds):
        for path in data.iterdir():
            os.utime(path)
        times["touched"].append(_seconds_of(settings))
        times["young"].append(_seconds_of(settings))
        time.sleep(2.1)
        build_cache(settings)  # hashes once more: the memo is trusted from then on
        times["old"].append(_seconds_of(settings))
    return times


def _seconds_of(settings: BuildSettings) -> float:
    started = time.perf_counter()
    report = build_cache(settings)
    if report.encoded:
        raise SystemExit(f"a second build encoded {report.encoded} entries")
    return time.perf_counter() - started


def _expect(done: int, bench: Bench) -> None:
    if done != bench.images:
        raise SystemExit(f"{done} latents of {bench.images} images")
