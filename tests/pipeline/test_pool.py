"""Real worker processes that crash, hang, are stopped and are killed, and the cache that comes of it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from small_builds import RECIPE, Talk, causes, draw, folder_of, within
from tiny_vae import tiny_vae

from latentcache import failpoint
from latentcache.errors import DeviceError, InterruptedBuildError, StoreError, WorkerError
from latentcache.pipeline import pool as pool_module
from latentcache.pipeline.books import Books
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.launch import WorkerProcess
from latentcache.pipeline.preflight import default_threads
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.watch import VARIABLE as DEADLINE
from latentcache.store.generation import load_generation
from latentcache.store.inventory import stored_entries


@pytest.fixture
def armed(monkeypatch):
    """Arm a failpoint in the workers of the builds to come."""

    def arm(text, deadline="60"):
        monkeypatch.setenv(failpoint.VARIABLE, text)
        monkeypatch.setenv(DEADLINE, deadline)

    return arm


@pytest.fixture
def hired(monkeypatch):
    """Every worker process that is started."""
    found, real = [], WorkerProcess.__init__

    def remember(process, *words, **options):
        real(process, *words, **options)
        found.append(process)

    monkeypatch.setattr(WorkerProcess, "__init__", remember)
    return found


def built(data, out, device="cpu*2", talk=None, **changes):
    changes = {"recipe": RECIPE, "batch_size": 4, **changes}
    wanted = BuildSettings(data=data, out=out, device=device, **changes)
    return within(60, lambda: build_cache(wanted, observer=talk))


def content(cache):
    """What a cache says, but for the names of its shards."""
    made = load_generation(cache)
    rows, samples = made.rows, made.samples
    return {
        "entries": {
            item.key: (item.header.payload_checksum, item.intact) for item in stored_entries(cache, payloads=True)
        },
        "names": list(samples.names),
        "rows": [column.tolist() for column in (rows.key, rows.sample, rows.crop, rows.resize, rows.pixel_hash)],
        "buckets": [made.buckets[number] for number in rows.bucket],
        "refused": [{**item, "stat": None} for item in made.refused],
    }


def acknowledged(events):
    return [key for line in events.read_text().splitlines() for key in json.loads(line)["keys"]]


def test_the_number_of_workers_changes_nothing(tmp_path):
    data = folder_of(tmp_path / "data", 30)
    for number in range(7):
        draw(data / f"wide{number}.png", 50 + number, height=32, width=128)
    (data / "copy.png").write_bytes((data / "003.png").read_bytes())
    (data / "bad.png").write_bytes((data / "004.png").read_bytes()[:-60])
    one = built(data, tmp_path / "one", device="cpu")
    several = built(data, tmp_path / "several", device="cpu*3")
    assert content(tmp_path / "one") == content(tmp_path / "several")
    for name in ("samples", "encoded", "cached", "notes", "buckets", "generation", "written_bytes"):
        assert getattr(one, name) == getattr(several, name)
    assert one.encoded == 37
    assert len(load_generation(tmp_path / "several").shards) > 1


def test_a_worker_gets_no_more_than_its_device_keeps_up_with(tmp_path, monkeypatch):
    """Decoders are quicker than the device here: they must not take what another device could do."""
    data, held, give = folder_of(tmp_path / "data", 160), [], Books.give

    def giving(books, holding, unit):
        give(books, holding, unit)
        held.append((holding.unmade, len(unit.items)))

    monkeypatch.setattr(Books, "give", giving)
    slow = replace(RECIPE, model="stub:delay_ms=20")
    report = built(data, tmp_path / "cache", recipe=slow, batch_size=2)
    assert report.encoded == 160
    low_water = 2 * max(2, default_threads(2))
    largest = max(items for _, items in held)
    assert largest == 10
    assert max(unmade for unmade, _ in held) < low_water + 2 * largest


def test_a_key_is_encoded_by_one_worker_only(tmp_path):
    data = folder_of(tmp_path / "data", 4)
    for number in range(40):
        (data / f"copy{number}.png").write_bytes((data / f"{number % 4:03}.png").read_bytes())
    report = built(data, tmp_path / "cache", device="cpu*3", batch_size=2, events=tmp_path / "events")
    said = acknowledged(tmp_path / "events")
    assert report.encoded == len(said) == len(set(said)) == 4


@pytest.mark.parametrize(("place", "cause"), [("decoding", "decoder-crash"), ("encoding", "encoder-crash")])
def test_pictures_that_crash_a_worker_are_found_and_the_rest_is_made(tmp_path, armed, monkeypatch, place, cause):
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    data, talk = folder_of(tmp_path / "data", 24), Talk()
    (data / "again13.png").write_bytes((data / "013.png").read_bytes())
    armed(f"{place}@*13.png:1:crash")
    report = built(data, tmp_path / "cache", talk=talk, events=tmp_path / "events")
    assert causes(report) == {"013.png": cause, "again13.png": cause}
    assert "SIGSEGV" in report.refused[0].detail
    assert report.encoded == 23
    assert any("given out again" in words for words in talk.warnings)
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 23
    armed("")
    assert causes(built(data, tmp_path / "cache")) == causes(report)  # until its bytes change, or it is asked for
    healed = built(data, tmp_path / "cache", retry_failed=True)
    assert (healed.encoded, healed.refused) == (1, ())


@pytest.mark.parametrize("armed_as", ["decoding@005.png:1:hang", "encoding@005.png:1:stop"])
def test_a_picture_that_hangs_its_workers_is_found(tmp_path, armed, armed_as):
    data = folder_of(tmp_path / "data", 8)
    armed(armed_as, deadline="2")
    report = built(data, tmp_path / "cache", device="cpu*1", batch_size=1)
    assert causes(report) == {"005.png": f"{armed_as[:2]}coder-crash"}
    assert report.encoded == 7


@pytest.mark.parametrize("action", ["die", "crash", "stop", "lost"])
def test_a_worker_that_is_lost_once_costs_nothing(tmp_path, armed, action):
    data = folder_of(tmp_path / "data", 24)
    built(data, tmp_path / "plain", device="cpu")
    armed(f"encoding:6:{action}", deadline="2")
    report = built(data, tmp_path / "cache", commit_every=2, events=tmp_path / "events")
    assert (report.encoded, report.refused) == (24, ())
    assert content(tmp_path / "cache") == content(tmp_path / "plain")
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 24


@pytest.mark.parametrize("place", ["before-put", "after-put", "after-commit", "after-rename"])
def test_a_worker_that_dies_while_it_commits_loses_nothing_that_is_durable(tmp_path, armed, place):
    data = folder_of(tmp_path / "data", 12)
    armed(f"{place}:1:die")
    report = built(data, tmp_path / "cache", device="cpu*1", commit_every=2, events=tmp_path / "events")
    said = acknowledged(tmp_path / "events")
    assert (report.encoded, report.refused) == (12, ())
    assert len(said) == len(set(said)) == 12


def test_a_device_that_goes_on_failing_ends_the_build_after_three_more_tries(tmp_path, armed, hired):
    data = folder_of(tmp_path / "data", 12)
    armed("encoding@*:1:lost")
    with pytest.raises(DeviceError, match="the device failed"):
        built(data, tmp_path / "cache", device="cpu*1")
    assert len(hired) == 4


def test_workers_that_die_of_nothing_end_the_build(tmp_path, monkeypatch, hired):
    monkeypatch.setattr("latentcache.pipeline.launch._COMMAND", ("-c", "raise SystemExit('no such module: x')"))
    with pytest.raises(WorkerError, match="keep dying") as error:
        built(folder_of(tmp_path / "data", 3), tmp_path / "cache", device="cpu*1")
    assert "no such module: x" in error.value.why
    assert len(hired) == 4


def test_too_many_culprits_end_the_build(tmp_path, armed, monkeypatch):
    monkeypatch.setattr(pool_module, "_MAX_CONVICTED", 1)
    armed("decoding@*:1:crash")
    with pytest.raises(WorkerError, match="keep dying"):
        built(folder_of(tmp_path / "data", 4), tmp_path / "cache", device="cpu*1")


def test_a_failing_disk_in_a_worker_is_the_error_of_the_build(tmp_path, armed):
    data = folder_of(tmp_path / "data", 12)
    armed("before-put:2:raise")
    with pytest.raises(StoreError, match="the disk reports an error"):
        built(data, tmp_path / "cache", commit_every=2, events=tmp_path / "events")
    armed("")
    before = len(acknowledged(tmp_path / "events"))
    assert built(data, tmp_path / "cache").encoded <= 12 - before


def test_killed_at_random_the_workers_are_replaced_and_nobody_is_blamed(tmp_path, hired):
    data = folder_of(tmp_path / "data", 60)
    over, events = threading.Event(), tmp_path / "events"

    def num_said():
        return len(acknowledged(events)) if events.exists() else 0

    def kill():
        # In the order of hiring: of four in a row on one device that never came to work, the build would end. Not by
        # process id: whoever has ended meanwhile has none any more.
        for number in range(4):
            said = num_said()
            while num_said() < said + 4 or len(hired) <= number:
                if over.wait(0.02):
                    return
            hired[number].kill()

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    wanted = BuildSettings(
        data=data,
        out=tmp_path / "cache",
        recipe=type(RECIPE)(model="stub:delay_ms=20", resolutions=(64,), bucket_step=32),
        device="cpu*2",
        batch_size=4,
        commit_every=4,
        events=tmp_path / "events",
    )
    report = within(60, lambda: build_cache(wanted))
    over.set()
    killer.join()
    assert (report.encoded, report.refused) == (60, ())
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 60
    assert len(hired) > 2


def test_a_worker_that_does_not_stop_is_left_to_itself(tmp_path, armed, monkeypatch):
    data = folder_of(tmp_path / "data", 8)
    monkeypatch.setattr(pool_module, "PATIENCE_S", 0.3)
    armed("encoding:2:stop")
    wanted = BuildSettings(data=data, out=tmp_path / "cache", recipe=RECIPE, device="cpu*1", batch_size=1)
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    started = time.monotonic()
    with pytest.raises(InterruptedBuildError):
        build_cache(wanted)
    assert time.monotonic() - started < 30


def test_a_real_model_is_made_by_workers_and_the_build_does_not_import_torch(tmp_path):
    data, model = folder_of(tmp_path / "data", 10), tiny_vae(tmp_path / "vae")
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from latentcache.pipeline import build\n"
        "from latentcache.pipeline.build import build_cache\n"
        "from latentcache.pipeline.settings import BuildSettings, RecipeSettings\n"
        "recipe = RecipeSettings(model=sys.argv[2], resolutions=(64,), bucket_step=32)\n"
        "build.cuda_available = lambda: True\n"  # so that the precision is looked for, as on a CUDA device
        "if __name__ == '__main__':\n"
        "    report = build_cache(BuildSettings(data=Path(sys.argv[1]), out=Path(sys.argv[3]), recipe=recipe,\n"
        "                                       device=sys.argv[4], batch_size=2))\n"
        "    print(report.encoded, len(report.refused), 'torch' in sys.modules)\n"
    )
    for device in ("cpu*2", "cpu", "auto"):
        words = [sys.executable, "-c", script, data, model, tmp_path / device, device]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False, timeout=300)
        assert done.stdout.split() == ["10", "0", "False"], done.stderr
    for device in ("cpu", "auto"):
        assert content(tmp_path / "cpu*2")["names"] == content(tmp_path / device)["names"]
        assert set(content(tmp_path / "cpu*2")["entries"]) == set(content(tmp_path / device)["entries"])
    made = load_generation(tmp_path / "cpu*2").manifest
    assert made["recipe"]["pixels"]["resample"] == "lanczos-u8"
    assert made["provenance"]["devices"] == ["cpu"]
    assert made["provenance"]["noise_floor"]["largest"] >= 0
