import os
from pathlib import Path

import pytest
from made_cache import KINDS, make

from latentcache.fields import registry


@pytest.fixture(autouse=True, scope="module")
def _made_kinds():
    """Register the made-up kinds for this module and its child processes."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", registry.VARIABLE)}
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(Path(__file__).parent), before["PYTHONPATH"]]))
    registry.register([f"made_cache:{name.capitalize()}" for name in KINDS])
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    registry.field_kinds.cache_clear()


@pytest.fixture(params=KINDS)
def case(request, tmp_path):
    return make(tmp_path, request.param)
