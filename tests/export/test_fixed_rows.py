import numpy as np
import pytest

from latentcache.errors import ExportError
from latentcache.export.fixed_rows import checked

LENGTH = 16


def rows(**arrays):
    """One row of nine tokens, or what is said of it."""
    ids, mask = np.arange(LENGTH)[None] + 1, (np.arange(LENGTH) < 9)[None].astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask, ids, -100)} | arrays


@pytest.mark.parametrize(
    ("change", "what"),
    [({"input_ids": np.ones((1, 15))}, "different length"), ({"labels": np.full((1, 16), -100)}, "no token"),
     ({"labels": np.full((1, 16), 7)}, "padding"), ({"input_ids": np.full((1, 16), 7)}, "differs from its token")],
)  # fmt: skip
def test_rows_are_checked(change, what):
    with pytest.raises(ExportError, match=what):
        checked(rows(**change), LENGTH)
