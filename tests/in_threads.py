"""Builds with threads as workers, for encoder tests: a worker process would import torch again."""

import json
from contextlib import contextmanager
from unittest.mock import patch

from latentcache.pipeline.devices import devices_for
from latentcache.pipeline.workers import process, scheduler
from latentcache.pipeline.workers.transport import as_error


def _ask(self, target, /, **arguments):
    """Answer a worker request in this process; the answer passes through JSON."""
    device = devices_for("cpu", needs_torch=False)[0].name
    head = {"target": target, "device": device, "arguments": json.loads(json.dumps(arguments))}
    answer = json.loads(json.dumps(process.answer(head)))
    if "error" in answer:
        raise as_error(answer["error"])
    return answer["value"]


@contextmanager
def in_threads():
    """Run builds without worker processes."""
    with patch.object(scheduler, "worker_count", lambda *_: 0), patch.object(process.WarmWorker, "ask", _ask):
        yield
