from small_builds import built, described

from latentcache.fields.protocol import Failure, Made
from latentcache.pipeline.reencode import Reencode
from latentcache.store.snapshot import open_snapshot


def test_changed_and_removed_inputs_are_failures(case, tmp_path):
    data = case.data(tmp_path / "data", 3)
    snapshot = open_snapshot(built(case, data).cache)
    case.write(data, 0, seed=50)
    case.path(data, 1).unlink()
    made = dict(Reencode("cpu").encode(snapshot, data, case.field, [0, 1, 2], described(snapshot, case.field)))
    assert isinstance(made[0], Failure)
    assert made[0].reason == "source-changed"
    assert isinstance(made[1], Failure)
    assert isinstance(made[2], Made)
