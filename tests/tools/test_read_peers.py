"""Every installed peer returns the given bytes, in the order of a plan if it takes one."""

from collections import Counter

import numpy as np
import pytest
import read_peers
import torch

pytestmark = pytest.mark.filterwarnings("ignore")  # of the measured libraries

BATCH, COUNT, SIZE = 4, 22, 4096
ALWAYS = {f"{kind} files, {workers} workers" for kind in ("safetensors", "npz", "pt") for workers in (0, 2)}


@pytest.fixture(scope="module")
def payloads():
    made = np.random.default_rng(3).integers(0, 256, (COUNT, SIZE), dtype=np.uint8)
    made[:, 0] = np.arange(COUNT)
    return made


@pytest.fixture(scope="module")
def peers(payloads, tmp_path_factory):
    return read_peers.peers(tmp_path_factory.mktemp("peers"), payloads, BATCH)


def plan_of(rows):
    return [rows[start : start + BATCH] for start in range(0, len(rows) - BATCH + 1, BATCH)]


def shuffled():
    return plan_of(np.random.default_rng(4).permutation(COUNT).tolist())


@pytest.mark.parametrize("plan", [shuffled(), plan_of(list(range(COUNT)))], ids=["shuffled", "sequential"])
def test_every_peer_returns_its_rows(peers, payloads, plan):
    """In this process, twice: an opened reader is reused."""
    for name in sorted(peers):
        if "2 workers" in name:
            continue
        for _ in range(2):
            check(name, plan, payloads, list(peers[name](plan)))


@pytest.mark.parametrize(
    "name", sorted(ALWAYS - {f"{kind} files, 0 workers" for kind in ("safetensors", "npz", "pt")})
)
def test_workers_serve_the_same(peers, payloads, name):
    check(name, shuffled(), payloads, list(peers[name](shuffled())))


def check(name, plan, payloads, batches):
    """Expected rows: those of the plan; for a peer with its own order, as many distinct rows."""
    assert len(batches) >= len(plan) - 1, name
    rows = [batch[:, 0].tolist() for batch in batches]
    if not name.startswith(read_peers.OWN_ORDER):
        assert rows == plan, name
    assert max(Counter(row for of_batch in rows for row in of_batch).values()) == 1, name
    for batch in batches:
        assert batch.shape == (BATCH, SIZE), name
        assert batch.dtype == torch.uint8, name
        assert batch.is_contiguous(), name
        assert np.array_equal(batch.numpy(), payloads[batch[:, 0].long().numpy()]), name
