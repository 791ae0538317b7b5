import numpy as np
import pytest
from small_builds import CASES, arrays_of, built

from latentcache.errors import EncoderError
from latentcache.fields.protocol import Failure, Made
from latentcache.fields.registry import field_kind
from latentcache.pipeline.reencode import Reencode
from latentcache.store.snapshot import open_snapshot


def test_what_is_made_again_is_what_is_stored(case, tmp_path):
    data = case.data(tmp_path / "data", 5)
    cache = built(case, data).cache
    snapshot, stored = open_snapshot(cache), arrays_of(cache, case.field)
    rows = snapshot.fields[case.field]
    again = Reencode(device="cpu")
    made = dict(again.encode(snapshot, data, case.field, [4, 0, 2]))
    assert set(made) == {0, 2, 4}
    names = [name.removesuffix(":1") for name in snapshot.samples.names]
    for row, array in ((row, one.array) for row, one in made.items()):
        (kept,) = stored[names[int(rows.sample[row])]]
        assert array.dtype == kept.dtype
        assert np.array_equal(array, kept)
    assert again.device


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


def test_flips_are_made_again_as_they_were(tmp_path):
    case = CASES["latents"]
    data = case.data(tmp_path / "data", 2)
    cache = built(case, data, recipe={"latents": "moments", "flip": True}).cache
    snapshot, stored = open_snapshot(cache), arrays_of(cache, "latents")
    made = dict(Reencode(device="cpu").encode(snapshot, data, "latents", [0, 1, 2, 3]))
    kept = [array for arrays in stored.values() for array in arrays]
    assert all(np.array_equal(made[row].array, kept[row]) for row in range(4))


def test_an_encoder_that_is_gone_is_an_error_that_names_the_flag(tmp_path):
    case = CASES["latents"]
    snapshot = open_snapshot(built(case, case.data(tmp_path / "data", 2)).cache)
    with pytest.raises(EncoderError):
        Reencode(settings={"latents": field_kind("latents").settings(model=str(tmp_path / "gone"))}).described(
            snapshot, "latents"
        )
