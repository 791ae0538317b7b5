import numpy as np

from latentcache.store.documents import MemoryTokens
from latentcache.store.token_accounts import fingerprint, length_histogram, token_accounts


def test_everything_is_counted():
    store = MemoryTokens([[1] * 10, [2] * 64, [3] * 65], [[(0, 4), (6, 2)], [], [(0, 65)]])
    found = token_accounts(store.documents, np.array([0, 2, 1], dtype=np.uint32), 1)
    assert (found["documents"], found["tokens"], found["trainable"], found["without_loss"]) == (3, 139, 71, 1)
    assert (found["control_strings"], found["documents_with_control"]) == (3, 2)
    assert (found["shortest"], found["longest"], found["tokens_by_source"]) == (10, 65, [139])
    assert [(one["up_to"], one["documents"]) for one in found["lengths"]] == [(64, 2), (128, 1)]


def test_nothing_at_all():
    found = token_accounts(MemoryTokens([]).documents, np.zeros(0, dtype=np.uint32), 0)
    assert (found["documents"], found["tokens"], found["longest"]) == (0, 0, 0)
    assert length_histogram(np.zeros(0, dtype=np.int64)) == []


def test_a_fingerprint_is_that_of_content_lengths_runs_and_recipe():
    one = MemoryTokens([[1, 2], [3]]).documents
    assert fingerprint(b"a", one) == fingerprint(b"a", MemoryTokens([[9, 9], [9]]).documents)
    others = [MemoryTokens([[1], [2, 3]]), MemoryTokens([[1, 2], [3]], [[(0, 1)], [(0, 1)]])]
    found = {fingerprint(b"a", one), fingerprint(b"b", one), *(fingerprint(b"a", o.documents) for o in others)}
    assert len(found) == 4
