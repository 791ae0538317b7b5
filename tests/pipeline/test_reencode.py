import pytest
from small_builds import built, described

from latentcache import verify_cache
from latentcache.errors import UsageError
from latentcache.fields.protocol import Failure, Made
from latentcache.pipeline.reencode import reencode
from latentcache.store.snapshot import open_snapshot


def test_changed_and_removed_inputs_are_failures(case, tmp_path):
    data = case.data(tmp_path / "data", 3)
    snapshot = open_snapshot(built(case, data).cache)
    case.write(data, 0, seed=50)
    case.path(data, 1).unlink()
    again = reencode(snapshot, data, case.field, [0, 1, 2], described(snapshot, case.field), device="cpu")
    results = {row: result for row, result, _ in again}
    assert isinstance(results[0], Failure)
    assert results[0].reason == "source-changed"
    assert isinstance(results[1], Failure)
    assert isinstance(results[2], Made)


def test_verify_cache_accepts_command_options(case, tmp_path):
    data = case.data(tmp_path / "data", 3)
    cache = built(case, data).cache
    report = verify_cache(cache, full=True, reencode=2, device="cpu")
    assert (report.mode, report.counts["ok"], report.reencoded.samples) == ("full", 3, 2)
    assert verify_cache(cache, data, sample="1/1").checked["payloads"] == report.checked["payloads"] > 0
    assert verify_cache(cache, fields={case.field: {}}).recipe_diff == ()
    wrong = [{"cache": 5}, {"data": 5}, {"device": 5}, {"fields": [5]}, {"fields": {5: {}}}, {"fields": {"nope": {}}}]
    for arguments in ({"sample": "no"}, {"reencode": -1}, {"seed": "x"}, *wrong):
        with pytest.raises(UsageError, match="nope" if "nope" in str(arguments) else next(iter(arguments))):
            verify_cache(**{"cache": cache, **arguments})
