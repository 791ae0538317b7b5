import json
import time

import pytest
from small_builds import FakeEncoder, folder_of, settings

from latentcache.geometry.sizes import Size
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.speed import Speed, StageClock, speed_of

BIG, SMALL = Size(1000, 1000), Size(100, 100)


def clock(**values):
    made = StageClock(**values)
    made.pictures.update({BIG: 30, SMALL: 10})
    return made


def test_rates_are_those_of_the_device_loop():
    speed = speed_of(clock(span_s=10.0, device_s=9.0, decode_wait_s=0.5, write_wait_s=0.25, device_wait_s=8.0))
    assert (speed.pictures_per_s, speed.megapixels_per_s) == (4.0, pytest.approx(3.01))
    assert (speed.bound, speed.device_busy) == ("device", 0.9)
    assert speed.waits == {"decode": 0.05, "write": 0.025, "device": 0.8}
    assert speed.teraflops is None
    assert speed.ceiling is None


@pytest.mark.parametrize(
    ("device_s", "decode_wait_s", "write_wait_s", "bound"),
    [(5, 1, 1, "device"), (2, 6, 1, "host"), (2, 1, 6, "disk")],
)
def test_the_stage_that_the_others_wait_for(device_s, decode_wait_s, write_wait_s, bound):
    found = speed_of(clock(span_s=10.0, device_s=device_s, decode_wait_s=decode_wait_s, write_wait_s=write_wait_s))
    assert found.bound == bound


def test_loops_that_ran_side_by_side_are_added():
    one = clock(span_s=10.0, device_s=8.0, ceiling_flops=1e12)
    two = clock(span_s=10.0, device_s=4.0, ceiling_flops=3e12)
    for each in (one, two):
        each.count(lambda: lambda size: size.area * 1e4)
    one.add(two)
    speed = speed_of(one)
    assert speed.pictures_per_s == 8.0
    assert speed.device_busy == pytest.approx(0.6)
    assert speed.teraflops == pytest.approx(2 * (30 * 1e10 + 10 * 1e8) / 10 / 1e12)
    assert speed.ceiling == pytest.approx(speed.teraflops / 4)


def test_a_clock_travels_between_processes():
    made = clock(span_s=10.0, device_s=8.0, decode_wait_s=1.5, ceiling_flops=1e12, flops=2e12)
    assert StageClock.from_json(json.loads(json.dumps(made.as_json()))) == made


def test_without_a_ceiling_no_work_is_counted():
    def never():
        raise AssertionError("it costs a second")

    made = clock(span_s=1.0)
    made.count(never)
    assert (made.flops, speed_of(made).ceiling) == (0, None)


def test_nothing_encoded_has_no_speed():
    assert speed_of(StageClock(span_s=5.0)) is None
    assert speed_of(StageClock()) is None


def test_waiting_counts_from_the_beginning_to_the_end():
    made = StageClock()
    with made.waiting("decode"):
        time.sleep(0.01)
    assert made.decode_wait_s == 0
    made.begin()
    with made.waiting("decode"):
        time.sleep(0.01)
    with made.waiting("write"), made.waiting("decode", counts=False):
        time.sleep(0.01)
    made.begin()
    made.end()
    assert made.decode_wait_s >= 0.01
    assert made.write_wait_s >= 0.01
    assert made.decode_wait_s + made.write_wait_s <= made.span_s
    before = made.span_s
    made.end()
    assert made.span_s == before


def test_in_words_and_as_json():
    speed = Speed(
        pictures_per_s=80.5, megapixels_per_s=84.41, bound="device", device_busy=0.97, waits={"decode": 0.01},
        teraflops=392.123, ceiling=0.587,
    )  # fmt: skip
    assert speed.in_words() == "device-bound: the device worked 97% of the time, 84.4 MP/s, 59% of its ceiling"
    assert speed.as_json() == {
        "pictures_per_s": 80.5,
        "megapixels_per_s": 84.41,
        "bound": "device",
        "device_busy": 0.97,
        "waits": {"decode": 0.01},
        "teraflops": 392.123,
        "ceiling": 0.587,
    }


class Sleepy(FakeEncoder):
    def encode(self, pixels, *, precise=False):
        time.sleep(0.02)
        return super().encode(pixels, precise=precise)


def test_a_build_with_a_slow_encoder_is_device_bound(tmp_path, use_encoder):
    use_encoder(Sleepy())
    report = build_cache(settings(folder_of(tmp_path / "data", 12), batch_size=1))
    assert report.speed.bound == "device"
    assert 0 < report.speed.device_busy <= 1
    assert report.speed.ceiling is None
    again = build_cache(settings(tmp_path / "data"))
    assert again.speed is None
