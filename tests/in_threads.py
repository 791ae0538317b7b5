"""Builds with threads as workers, for encoder tests: a worker process would import torch again."""

from contextlib import contextmanager
from unittest.mock import patch

from latentcache.pipeline.workers import local
from latentcache.pipeline.workers.resources import devices_for
from latentcache.pipeline.workers.worker import Question, answer


def _ask(self, target, /, **arguments):
    """Answer a question in this process."""
    device = devices_for("cpu", needs_torch=False)[0].name
    reply = answer(Question(target=target, device=device, arguments=arguments))
    if reply.error is not None:
        raise reply.error
    return reply.value


@contextmanager
def in_threads():
    """Run builds without worker processes."""
    with patch.object(local, "worker_count", lambda *_: 0), patch.object(local.LocalEngine, "ask", _ask):
        yield
