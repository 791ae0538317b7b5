from pathlib import Path

import pytest

from latentcache.errors import UsageError
from latentcache.pipeline.token_settings import TokenSettings, options_json
from latentcache.sources.record_format import RECORD_RULE


@pytest.mark.parametrize("bad", [{"loss": "some"}, {"workers": -1}, {"commit_every": 0}])
def test_what_cannot_be_is_said_at_once(bad):
    with pytest.raises(UsageError, match=str(next(iter(bad.values())))):
        TokenSettings(data=Path("a"), **bad)


def test_the_cache_lies_beside_the_data(tmp_path):
    assert TokenSettings(data=tmp_path / "a.jsonl").cache == tmp_path / "a.jsonl.latentcache"
    assert TokenSettings(data=tmp_path, out=tmp_path / "c").cache == tmp_path / "c"


def test_how_data_is_read():
    found = options_json(TokenSettings(data=Path("a"), datasets=("x",), text_lines=True))
    assert found == {"datasets": ["x"], "text_lines": True, "rule": RECORD_RULE}
