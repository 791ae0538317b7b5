from dataclasses import replace

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


def test_pieces_come_to_their_places():
    tokens = MemoryTokens([[1, 2, 3], [4], [5, 6]])
    out = np.full(7, 9, dtype=np.uint16)
    tokens.gather(np.array([2, 0, 2]), np.array([0, 1, 1]), np.array([2, 2, 1]), out, np.array([3, 0, 5]))
    assert out.tolist() == [2, 3, 9, 5, 6, 6, 9]


def test_where_a_document_came_from():
    documents = MemoryTokens([[1], [2]]).documents
    assert documents.where(1) == "memory:2"
    assert replace(documents, sources=()).where(0) == "source 0:1"
