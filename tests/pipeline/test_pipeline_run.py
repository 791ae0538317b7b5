import json
import signal
import time

import pytest
from small_builds import (
    FakeEncoder,
    LateEncoder,
    Talk,
    causes,
    draw,
    folder_of,
    one_row_less,
    pixels,
    recipe_of,
    rows_of,
    settings,
    within,
)

from latentcache.errors import DiskFullError, EncoderError, InterruptedBuildError
from latentcache.geometry.sizes import Size
from latentcache.pipeline import decoding as decoding_module
from latentcache.pipeline.board import ENCODING, Board
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.run import expected_pieces
from latentcache.pipeline.survey import Memory, survey
from latentcache.sources.resolve import scan
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout
from latentcache.store.shard import ShardWriter


def built(data, talk=None, **changes):
    return within(30, lambda: build_cache(settings(data, **changes), observer=talk))


def stored(cache):
    return {item.key: (item.header.payload_checksum, item.intact) for item in stored_entries(cache, payloads=True)}


def test_batches_are_full_but_for_the_last_of_each_bucket(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 10)
    for number in range(5):
        draw(data / f"wide{number}.png", 50 + number, height=32, width=128)
    encoder = use_encoder(FakeEncoder())
    built(data, batch_size=4)
    assert sorted(size for size, _ in encoder.calls) == [1, 2, 4, 4, 4]
    assert encoder.closed


@pytest.mark.parametrize("host_memory", [1, 5_000, 60_000])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_pictures_larger_than_the_budget_still_come_through(tmp_path, use_encoder, host_memory, num_threads):
    data = folder_of(tmp_path / "data", 7)
    for number in range(3):
        draw(data / f"wide{number}.png", 50 + number, height=64, width=256)
    draw(data / "large.png", 99, height=300, width=300)
    encoder = use_encoder(FakeEncoder())
    report = built(data, host_memory=host_memory, decode_threads=num_threads, recipe={"resolutions": (64, 128)})
    assert report.encoded == encoder.num_pictures == 22
    assert report.refused == ()


def test_a_half_filled_bucket_goes_on_when_it_holds_the_memory(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 6)
    encoder = use_encoder(FakeEncoder())
    built(data, batch_size=6, host_memory=2 * 64 * 64 * 3 + 64 * 64 * 8)
    assert encoder.num_pictures == 6
    assert 1 < len(encoder.calls) <= 6


def test_out_of_memory_is_survived_and_said(tmp_path, use_encoder):
    data, talk = folder_of(tmp_path / "data", 16), Talk()
    encoder = use_encoder(FakeEncoder(most=2))
    report = built(data, talk)
    assert report.encoded == 16
    assert [size for size, _ in encoder.calls if size > 2] == [8, 4]  # the second batch knows
    assert talk.warnings == [
        "out of memory at batch 8 of 64x64; going on with 4",
        "out of memory at batch 4 of 64x64; going on with 2",
    ]


def test_a_picture_that_is_never_finite_is_quarantined_and_the_rest_is_there(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 6)
    (data / "copy.png").write_bytes((data / "002.png").read_bytes())
    use_encoder(FakeEncoder(broken=[pixels(2)]))
    report = built(data)
    assert causes(report) == {"002.png": "non-finite", "copy.png": "non-finite"}
    assert report.encoded == len(stored(report.plan.cache)) == 5
    assert set(rows_of(report.plan.cache)) == {f"{number:03}.png" for number in (0, 1, 3, 4, 5)}


def test_a_picture_that_is_finite_in_float32_is_stored_from_there(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 3)
    use_encoder(FakeEncoder(broken=[pixels(1)], mends=True))
    mended = built(data, out=tmp_path / "mended").plan.cache
    use_encoder(FakeEncoder())
    plain = built(data, out=tmp_path / "plain").plan.cache
    assert stored(mended) == stored(plain)


def test_a_picture_out_of_memory_alone_is_quarantined_and_tried_again_by_the_next_build(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 3)
    use_encoder(FakeEncoder(most=0))
    report = built(data)
    assert set(causes(report).values()) == {"out-of-memory"}
    use_encoder(FakeEncoder())
    assert built(data).encoded == 3


def test_latents_of_another_shape_end_the_build_and_nothing_is_stored(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 3)
    use_encoder(FakeEncoder(change=one_row_less))
    with pytest.raises(EncoderError, match="another shape"):
        built(data)
    assert stored(tmp_path / "data.latentcache") == {}


def test_a_fault_in_a_decode_thread_ends_the_build(tmp_path, monkeypatch):
    data = folder_of(tmp_path / "data", 20)

    def broken(*args, **options):
        raise ZeroDivisionError("a fault of our own")

    monkeypatch.setattr(decoding_module, "resize_crop", broken)
    with pytest.raises(RuntimeError, match="decode thread"):
        built(data)


def test_a_failing_writer_ends_the_build_and_what_was_said_is_there(tmp_path, monkeypatch, use_encoder):
    data, real, count = folder_of(tmp_path / "data", 20), ShardWriter.write, iter(range(99))

    def full_after_five(shard, batch):
        if next(count) >= 5:
            raise DiskFullError("the disk is full")
        real(shard, batch)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", full_after_five)
        with pytest.raises(DiskFullError):
            built(data, commit_every=1, events=tmp_path / "events")
    said = {key for line in (tmp_path / "events").read_text().splitlines() for key in json.loads(line)["keys"]}
    assert len(said) == 5
    assert said <= {key.hex() for key in stored(tmp_path / "data.latentcache")}
    encoder = use_encoder(FakeEncoder())
    assert built(data).encoded == encoder.num_pictures == 15


def test_two_batches_are_on_the_device_and_everything_is_fetched(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 11)
    encoder = use_encoder(LateEncoder())
    report = built(data, batch_size=2)
    assert (report.encoded, encoder.num_pictures, encoder.in_flight, encoder.peak) == (11, 11, 0, 2)
    again = built(folder_of(tmp_path / "plain", 11))
    assert stored(report.plan.cache) == stored(again.plan.cache)


def test_the_board_names_all_pictures_on_the_device(tmp_path, use_encoder, monkeypatch):
    named, real = [], Board.doing

    def doing(self, slot, stage, items=()):
        named.append(list(items)) if stage == ENCODING else None
        return real(self, slot, stage, items)

    monkeypatch.setattr(Board, "doing", doing)
    use_encoder(LateEncoder())
    built(folder_of(tmp_path / "data", 6), batch_size=2, decode_threads=1)
    assert named[0] == [0, 1]
    assert [0, 1, 2, 3] in named
    assert named[-1][-2:] == [4, 5]


def test_a_stop_request_commits_what_the_device_has(tmp_path, use_encoder):
    class Stopped(LateEncoder):
        def submit(self, pictures, *, precise=False):
            if self.in_flight:
                signal.raise_signal(signal.SIGTERM)
                time.sleep(0.3)
            return super().submit(pictures, precise=precise)

    use_encoder(Stopped())
    with pytest.raises(InterruptedBuildError):
        build_cache(settings(folder_of(tmp_path / "data", 40), batch_size=4))
    assert len(stored(tmp_path / "data.latentcache")) == 8


def test_expected_pieces_are_shared_by_the_workers(tmp_path):
    recipe = recipe_of(resolutions=(64, 128), flip=True)
    todo = survey(scan(folder_of(tmp_path / "data", 5)), recipe, Catalog([]), Memory({}, {}), max_pixels=10**8).todo
    assert expected_pieces(todo, recipe.variants) == {Size(64, 64): 10, Size(128, 128): 10}
    assert expected_pieces(todo, recipe.variants, workers=4) == {Size(64, 64): 3, Size(128, 128): 3}


def test_a_stop_request_commits_the_batch_in_hand(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 40)

    class Stopped(FakeEncoder):
        def encode(self, pixels, *, precise=False):
            signal.raise_signal(signal.SIGTERM)
            return super().encode(pixels, precise=precise)

    use_encoder(Stopped())
    with pytest.raises(InterruptedBuildError) as caught:
        build_cache(settings(data, batch_size=4, events=tmp_path / "events"))
    assert caught.value.exit_code == 143
    said = [key for line in (tmp_path / "events").read_text().splitlines() for key in json.loads(line)["keys"]]
    assert len(said) == len(stored(tmp_path / "data.latentcache")) == 4
    encoder = use_encoder(FakeEncoder())
    assert built(data).encoded == encoder.num_pictures == 36


def test_progress_counts_every_sample_once(tmp_path):
    data, talk = folder_of(tmp_path / "data", 5), Talk()
    (data / "bad.png").write_bytes(draw(data / "bad.png", 8).read_bytes()[:-60])
    built(data, talk)
    assert talk.looked[-1] == 6
    assert talk.looked == sorted(talk.looked)


def test_no_encoder_is_opened_for_what_is_there_already(tmp_path, use_encoder):
    data = folder_of(tmp_path / "data", 3)
    built(data)
    encoder = use_encoder(FakeEncoder())
    report = built(data)
    assert (report.encoded, report.cached, encoder.calls, encoder.closed) == (0, 3, [], False)


def test_sealed_shards_hold_each_key_once(tmp_path):
    data = folder_of(tmp_path / "data", 9)
    (data / "copy.png").write_bytes((data / "003.png").read_bytes())
    cache = built(data, decode_threads=4).plan.cache
    assert len(load_catalog(CacheLayout(cache)).keys()) == 9
