"""LLaMA-Factory: epochs are wrong in streaming mode, because the length is unknown.

Here ``len`` is exact before anything is read, on every rank and for every policy. The tests fail if the length is
estimated as entries divided by batch size, because no bucket here divides evenly.
"""

import pytest
from small_cache import of_three_sizes

from latentcache import open_cache

pytestmark = pytest.mark.filterwarnings("ignore:bucket .* in an epoch to fill a batch")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Thirteen images in buckets of five, four and four."""
    return of_three_sizes(tmp_path_factory.mktemp("length"), 13)


def test_lengths_are_exact_not_estimated(cache):
    """13 entries in batches of 3 are not 5 steps: each of three buckets rounds up."""
    assert -(-13 // 3) == 5
    assert len(open_cache(cache).loader(batch_size=3)) == 6
    assert len(open_cache(cache).loader(batch_size=3, remainder="drop")) == 3
