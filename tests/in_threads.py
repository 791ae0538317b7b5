"""Builds whose workers are threads: for tests of encoders, where another process would import torch once more."""

import json
from contextlib import contextmanager
from unittest.mock import patch

from latentcache.pipeline.devices import devices_for
from latentcache.pipeline.workers import process, scheduler
from latentcache.pipeline.workers.transport import as_error


def _ask(self, target, /, **arguments):
    """The answer of a worker process, given here; it travels as JSON all the same."""
    device = devices_for("cpu", needs_torch=False)[0].name
    head = {"target": target, "device": device, "arguments": json.loads(json.dumps(arguments))}
    answer = json.loads(json.dumps(process.answer(head)))
    if "error" in answer:
        raise as_error(answer["error"])
    return answer["value"]


@contextmanager
def in_threads():
    """Builds of this block start no process."""
    with patch.object(scheduler, "worker_count", lambda *_: 0), patch.object(process.WarmWorker, "ask", _ask):
        yield
