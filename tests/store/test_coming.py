import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_entries import RECIPE, SQUARE, content_of

from latentcache.errors import CacheDamagedError, CacheFormatError, StoreError
from latentcache.store.columns import StringColumn
from latentcache.store.coming import (
    Announcement,
    ArrivalLog,
    announce,
    load_announced,
    log_path,
    read_arrivals,
    withdraw,
)
from latentcache.store.durable import read_json, write_json
from latentcache.store.layout import CacheLayout
from latentcache.store.manifest import signed


def coming(count=3, known=(), before=0):
    contents = [content_of(i) if i in known else bytes(16) for i in range(count)]
    return Announcement(
        recipe=RECIPE,
        names=StringColumn.of(f"p{i}.png" for i in range(count)),
        captions=StringColumn.of("" for _ in range(count)),
        content=np.frombuffer(b"".join(contents), dtype=np.uint8).reshape(-1, 16),
        original_size=np.full((count, 2), 80, dtype=np.uint32),
        sample=np.arange(count, dtype=np.int32),
        bucket=np.zeros(count, dtype=np.int32),
        crop=np.zeros((count, 2), dtype=np.uint32),
        resize=np.full((count, 2), 64, dtype=np.uint32),
        buckets=(SQUARE,),
        facts={"source": {"root": "/data"}, "demo": False},
        before=before,
    )


def test_what_was_announced_is_loaded_again(tmp_path):
    layout = CacheLayout(tmp_path)
    announce(layout, coming(3, known={1}, before=4))
    found = load_announced(layout)
    assert found.number == 5
    assert list(found.samples.names) == ["p0.png", "p1.png", "p2.png"]
    assert found.rows.shard.tolist() == [-1, -1, -1]
    assert found.samples.content[1].tobytes() == content_of(1)
    assert found.recipe == RECIPE
    assert found.buckets == (SQUARE,)


def test_nothing_is_announced_before_and_after(tmp_path):
    layout = CacheLayout(tmp_path)
    assert load_announced(layout) is None
    announce(layout, coming())
    withdraw(layout)
    withdraw(layout)
    assert load_announced(layout) is None
    assert not layout.coming.exists()


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(min_size=16, max_size=16))), st.integers(0, 31))
def test_the_log_round_trip_and_a_record_cut_short(tmp_path_factory, found, cut):
    path = tmp_path_factory.mktemp("log") / "arrived-1.log"
    with ArrivalLog(path) as log:
        log.usable(found)
        log.refused([7])
    data = path.read_bytes()
    assert read_arrivals(path) == ([*found, (7, None)], len(data))
    path.write_bytes(data[: len(data) - 1 - cut])
    read, place = read_arrivals(path)
    assert read == found[: len(read)]
    assert len(found) - len(read) <= (0 if cut < 31 else 1)
    path.write_bytes(data)
    assert read_arrivals(path, place) == ([*found, (7, None)][len(read) :], len(data))


def test_a_flipped_bit_ends_the_log_there(tmp_path):
    path = tmp_path / "arrived-1.log"
    with ArrivalLog(path) as log:
        log.usable([(0, content_of(0)), (1, content_of(1))])
    data = bytearray(path.read_bytes())
    data[len(data) // 2 + 9] ^= 1
    path.write_bytes(data)
    assert read_arrivals(path) == ([(0, content_of(0))], len(data) // 2)


def test_no_log_is_no_arrival(tmp_path):
    assert read_arrivals(tmp_path / "arrived-1.log", 64) == ([], 64)


def test_another_build_has_another_log(tmp_path):
    layout = CacheLayout(tmp_path)
    first = announce(layout, coming())
    assert first == log_path(layout, str(load_announced(layout).manifest["log"]))
    assert announce(layout, coming()) != first


def test_a_newer_or_a_damaged_announcement_is_refused(tmp_path):
    layout = CacheLayout(tmp_path)
    announce(layout, coming())
    path = layout.coming / "manifest.json"
    manifest = read_json(path)
    unsigned = {name: value for name, value in manifest.items() if name != "checksum"}
    write_json(path, signed(unsigned | {"version": 2}))
    with pytest.raises(CacheFormatError):
        load_announced(layout)
    write_json(path, manifest | {"before": 3})
    with pytest.raises(CacheDamagedError, match="damaged"):
        load_announced(layout)
    write_json(path, manifest)
    (layout.coming / "bucket.npy").write_bytes(b"")
    with pytest.raises(CacheDamagedError, match=r"bucket\.npy"):
        load_announced(layout)


def test_an_announcement_that_cannot_be_taken_away_is_said(tmp_path):
    layout = CacheLayout(tmp_path)
    withdraw(layout)  # none is there
    (layout.coming / "manifest.json").mkdir(parents=True)
    with pytest.raises(StoreError) as caught:
        withdraw(layout)
    assert "manifest.json" in caught.value.where + caught.value.why
