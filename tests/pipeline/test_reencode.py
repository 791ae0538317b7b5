import pytest
from small_builds import CASES, built

from latentcache.errors import EncoderError
from latentcache.fields.protocol import Failure, Made
from latentcache.fields.registry import field_kind
from latentcache.pipeline.reencode import Reencode
from latentcache.store.snapshot import open_snapshot


def test_changed_and_removed_inputs_are_failures(case, tmp_path):
    data = case.data(tmp_path / "data", 3)
    snapshot = open_snapshot(built(case, data).cache)
    case.write(data, 0, seed=50)
    case.path(data, 1).unlink()
    made = dict(Reencode(device="cpu").encode(snapshot, data, case.field, [0, 1, 2]))
    assert isinstance(made[0], Failure)
    assert made[0].reason == "source-changed"
    assert isinstance(made[1], Failure)
    assert isinstance(made[2], Made)


def test_an_encoder_that_is_gone_is_an_error_that_names_the_flag(tmp_path):
    case = CASES["latents"]
    snapshot = open_snapshot(built(case, case.data(tmp_path / "data", 2)).cache)
    with pytest.raises(EncoderError):
        Reencode(settings={"latents": field_kind("latents").settings(model=str(tmp_path / "gone"))}).described(
            snapshot, "latents"
        )
