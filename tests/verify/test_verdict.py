import numpy as np
import pytest

from latentcache.verify.deep import Deep
from latentcache.verify.findings import Finding
from latentcache.verify.selection import Deadline
from latentcache.verify.verdict import decide, side_by_side


def finding(category, path=""):
    return Finding(category=category, reason="r", path=path)


def test_the_worst_decides_and_what_was_not_looked_at_only_counts_when_it_must_be_mended():
    said = {0: ["touched", "corrupt"], 1: ["touched"], 2: ["touched"], 3: ["stale"], 4: []}
    looked = np.array([True, True, False, False, True])
    found = decide(((n, f"n{n}") for n in said), looked, lambda n, name: [finding(one, name) for one in said[n]])
    assert [one.path for one in found.values()] == ["n0", "n1", "n3"]
    assert {number: one.category for number, one in found.items()} == {0: "corrupt", 1: "touched", 3: "stale"}


def test_an_error_in_the_sources_ends_the_reading():
    deadline, ended = Deadline(None), []
    deadline.when_cancelled(lambda: ended.append(True))

    def fails():
        raise RuntimeError("no disk")

    with pytest.raises(RuntimeError, match="no disk"):
        side_by_side(lambda: Deep(read=np.ones(1, dtype=bool)), fails, deadline)
    assert (deadline.cancelled, ended) == (True, [True])
    read = Deep(read=np.ones(1, dtype=bool))
    assert side_by_side(lambda: read, lambda: "sources", Deadline(None)) == (read, "sources")
