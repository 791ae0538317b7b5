"""Run a toy kind in a process of its own: python run_toys.py FOLDER KIND ENGINE ADDRESS TEXT... -> one JSON line."""

import json
import os
import sys
from pathlib import Path

from latentcache.fields import registry
from latentcache.pipeline.workers.local import LocalEngine
from tests.pipeline.workers.conftest import TOYS, Toy


def new_engine(name, address):
    if name == "local":
        return LocalEngine("cpu*1")
    from latentcache.pipeline.workers.ray import RayEngine

    return RayEngine(address, device="cpu", workers=2, warn=lambda message: sys.stderr.write(f"{message}\n"))


def main(folder, kind, engine_name, address, *texts):
    registry.register(TOYS)
    toy = Toy(kind, Path(folder))
    with new_engine(engine_name, address) as engine:
        device = "cpu*2" if engine_name == "local" else "cpu"
        result = toy.run(list(texts), engine=engine, device=device, workers=2, batch_size=1)
    settled = sorted([*result.read.sample.tolist(), *(sample for sample, _ in result.failed)])
    failed = {sample: failure.reason for sample, failure in result.failed}
    stored = {key.hex(): value.hex() for key, value in toy.stored().items()}
    outcome = {"settled": settled, "failed": failed, "restarts": result.restarts, "encoded": result.encoded}
    sys.stdout.write(json.dumps(outcome | {"stored": stored, "details": [f.detail for _, f in result.failed]}))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
