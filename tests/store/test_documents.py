import numpy as np

from latentcache.store.documents import MemoryTokens


def test_the_twin_in_memory():
    tokens = MemoryTokens([[1, 2, 3], [4], [5, 6]], [[(1, 2)], [], [(0, 1), (1, 1)]])
    documents = tokens.documents
    assert len(documents) == 3
    assert documents.length.tolist() == [3, 1, 2]
    assert [documents.runs(i).tolist() for i in range(3)] == [[[1, 2]], [], [[0, 1], [1, 1]]]
    assert np.array_equal(tokens.ids(2), [5, 6])


def test_without_runs_everything_carries_loss():
    assert MemoryTokens([[1, 2], [3]]).documents.spans.tolist() == [[0, 2], [0, 1]]
