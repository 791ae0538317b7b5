"""Files with equal pixels in other bytes, met by one build: encoded once, whoever decodes them and whoever dies."""

import json
import signal

import numpy as np
import pytest
from PIL import Image
from small_builds import (
    RECIPE,
    FakeEncoder,
    Talk,
    causes,
    draw,
    folder_of,
    jpeg_with_comment,
    pixels,
    png_with_text,
    recipe_of,
    rows_of,
    settings,
    within,
)

from latentcache import failpoint
from latentcache.errors import InterruptedBuildError
from latentcache.geometry.sizes import Size
from latentcache.identity.key import EntryKey
from latentcache.identity.stat import StatMemo
from latentcache.loader.cache import open_cache
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.twins import Twins, copied
from latentcache.pipeline.work import Looked
from latentcache.store.catalog import Catalog, load_catalog, payload_of
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout

MEMO = StatMemo(size=1, mtime_ns=2, ctime_ns=3, inode=4, device=5, seen_ns=6)


def key(number, height=64):
    content = bytes([number]) * 16
    return EntryKey(content=content, bucket=Size(height, 64), recipe=recipe_of().key_part).pack()


def with_twins(folder, originals, copies):
    """``originals`` pictures, and as many of each again with another comment."""
    folder_of(folder, originals)
    for number in range(originals):
        data = (folder / f"{number:03}.png").read_bytes()
        for copy in range(copies):
            (folder / f"{number:03}-{copy}.png").write_bytes(png_with_text(data, f"copy {copy}"))
    return folder


def built(data, cache, **changes):
    wanted = BuildSettings(data=data, out=cache, recipe=RECIPE, **{"device": "cpu", "batch_size": 3, **changes})
    return within(60, lambda: build_cache(wanted))


def entries(cache):
    """key -> what an entry says of itself and the bytes of its latents; each of them whole."""
    found = list(stored_entries(cache, payloads=True))
    assert len({item.key for item in found}) == len(found)
    assert all(item.intact for item in found)
    catalog = load_catalog(CacheLayout(cache))
    return {item.key: (item.header, catalog.locate(item.key).facts) for item in found}


def made_one_by_one(data, cache, **changes):
    """The entries of builds of one picture each: nobody to share with."""
    found = {}
    for path in sorted(data.iterdir()):
        alone = cache.parent / f"alone-{path.name}"
        alone.mkdir(parents=True)
        (alone / path.name).write_bytes(path.read_bytes())
        found |= entries(build_cache(settings(alone, **changes)).plan.cache)
    return found


def acknowledged(events):
    return [key for line in events.read_text().splitlines() for key in json.loads(line)["keys"]]


def test_the_first_is_encoded_and_stays_the_first():
    twins, hashed = Twins(), b"p" * 16
    assert twins.is_first(key(1), hashed, 1)
    assert not twins.is_first(key(2), hashed, 2)
    assert twins.is_first(key(1), hashed, 1)  # asked again by another worker
    assert twins.is_first(key(2, height=128), hashed, 2)  # another bucket has other pixels
    assert twins.is_first(key(3), b"q" * 16, 3)
    assert twins.waiting == 1


def test_who_waited_in_vain_is_let_go_and_nobody_waits_again():
    twins = Twins()
    for number in range(1, 5):
        twins.is_first(key(number), bytes([number % 2]) * 16, number)
    assert twins.waiting == 2
    assert twins.let_go({key(1)}) == {key(4): 4}
    assert twins.is_first(key(4), bytes(16), 4)
    assert twins.is_first(key(6), bytes(16), 6)
    assert twins.waiting == 1


def test_a_copy_is_made_only_of_what_is_there_and_for_a_sample_that_is_still_what_it_was(tmp_path):
    data = folder_of(tmp_path / "data", 1)
    cache = build_cache(settings(data)).plan.cache
    catalog, twins, recipe = load_catalog(CacheLayout(cache)), Twins(), recipe_of()
    (first,) = catalog.keys()
    twins.is_first(first, b"p" * 16, 0)
    for number in (1, 2, 3):
        twins.is_first(key(number), b"p" * 16, number)
    looked = {
        number: Looked(index=number, content=bytes([content]) * 16, memo=MEMO, size=Size(64, 64))
        for number, content in ((1, 1), (2, 99))  # the second was edited meanwhile, the third refused
    }
    copies = twins.copies(looked, recipe, catalog)
    assert [cut.key for _, cut in copies] == [key(1)]
    assert twins.copies(looked, recipe, Catalog([])) == []
    (entry,) = copied(copies, recipe, lambda found: payload_of(found, cache / "shards"))
    assert entry.value[112:] == payload_of(catalog.locate(first), cache / "shards")
    assert list(copied(copies, recipe, lambda found: None)) == []


@pytest.mark.parametrize("change", [{}, {"flip": True, "resolutions": (64, 128)}, {"latents": "moments"}])
def test_equal_pixels_of_one_build_are_encoded_once(tmp_path, use_encoder, change):
    data = with_twins(tmp_path / "data", 2, 2)
    draw(data / "photo.jpg", 7)
    (data / "again.jpg").write_bytes(jpeg_with_comment((data / "photo.jpg").read_bytes(), "saved again"))
    expected = made_one_by_one(data, tmp_path / "one" / "cache", recipe=change)
    encoder = use_encoder(FakeEncoder()) if change != {"latents": "moments"} else None
    each = 4 if "flip" in change else 1
    talk = Talk()
    report = build_cache(settings(data, events=tmp_path / "events", batch_size=3, recipe=change), observer=talk)
    assert (report.samples, report.encoded, report.cached) == (8, 3 * each, 5 * each)
    assert encoder is None or encoder.num_pictures == 3 * each
    assert entries(report.plan.cache) == expected
    said = acknowledged(tmp_path / "events")
    assert sorted(said) == sorted(found.hex() for found in expected)
    assert talk.looked[-1] == 8
    again = build_cache(settings(data, recipe=change))
    assert (again.encoded, again.cached, again.published) == (0, 8 * each, False)


def test_a_mirror_image_that_looks_like_its_picture_is_encoded_once(tmp_path, use_encoder):
    (tmp_path / "data").mkdir()
    half = pixels(1)[:, :32]
    Image.fromarray(np.concatenate([half, half[:, ::-1]], axis=1)).save(tmp_path / "data" / "a.png")
    encoder = use_encoder(FakeEncoder())
    report = build_cache(settings(tmp_path / "data", recipe={"flip": True}))
    assert (report.encoded, report.cached, encoder.num_pictures) == (1, 1, 1)


def test_several_workers_share_what_they_find(tmp_path):
    data = with_twins(tmp_path / "data", 8, 4)
    report = built(data, tmp_path / "cache", device="cpu*3", events=tmp_path / "events", commit_every=2)
    assert (report.encoded, report.cached, report.refused) == (8, 32, ())
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 40
    plain = built(data, tmp_path / "plain")
    assert entries(tmp_path / "cache") == entries(plain.plan.cache)


@pytest.mark.parametrize("where", ["encoding:5:die", "after-commit:2:die"])
def test_a_worker_that_dies_leaves_nobody_waiting(tmp_path, monkeypatch, where):
    data = with_twins(tmp_path / "data", 8, 2)
    monkeypatch.setenv(failpoint.VARIABLE, where)
    report = built(data, tmp_path / "cache", device="cpu*2", commit_every=2, events=tmp_path / "events")
    assert (report.encoded, report.cached, report.refused) == (8, 16, ())
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 24


@pytest.mark.slow
def test_of_pictures_that_crash_a_worker_the_others_are_tried_and_named(tmp_path, monkeypatch):
    data = with_twins(tmp_path / "data", 3, 1)
    monkeypatch.setenv(failpoint.VARIABLE, "encoding@*001*.png:1:crash")
    report = built(data, tmp_path / "cache", device="cpu*1", decode_threads=1)
    assert set(causes(report)) == {"001.png", "001-0.png"}
    assert (report.encoded, report.cached) == (2, 2)


@pytest.mark.parametrize("mends", [False, True])
def test_when_the_first_cannot_be_encoded_the_others_are_tried(tmp_path, use_encoder, mends):
    class Encoder(FakeEncoder):
        def encode(self, pixels, *, precise=False):
            encoded = super().encode(pixels, precise=precise)
            if mends and precise:
                self.broken = set()  # whoever comes next is finite
            return encoded

    data = with_twins(tmp_path / "data", 3, 2)
    encoder = use_encoder(Encoder(broken=[pixels(1)]))
    talk = Talk()
    report = build_cache(settings(data, events=tmp_path / "events", decode_threads=1), observer=talk)
    refused = {"001-0.png"} if mends else {"001.png", "001-0.png", "001-1.png"}
    assert causes(report) == dict.fromkeys(refused, "non-finite")
    assert (report.samples, report.encoded + report.cached) == (9, 9 - len(refused))
    assert report.encoded == (4 if mends else 2)
    assert len(encoder.calls) >= 2
    assert talk.looked[-1] == 9
    said = acknowledged(tmp_path / "events")
    assert len(said) == len(set(said)) == 9 - len(refused)


def test_a_build_that_is_stopped_before_its_copies_leaves_them_to_the_next_one(tmp_path, use_encoder):
    class Stopped(FakeEncoder):
        def close(self):
            signal.raise_signal(signal.SIGTERM)

    data = with_twins(tmp_path / "data", 3, 2)
    use_encoder(Stopped())
    with pytest.raises(InterruptedBuildError):
        build_cache(settings(data))
    encoder = use_encoder(FakeEncoder())
    report = build_cache(settings(data))
    assert (report.encoded, report.cached, encoder.num_pictures) == (0, 9, 0)


def test_a_stop_request_among_the_copies_keeps_those_that_are_made(tmp_path):
    data, said = with_twins(tmp_path / "data", 2, 20), []

    class Stopping(Talk):
        def advanced(self, progress):
            if progress.cached >= 3:
                said.append(progress.cached)
                signal.raise_signal(signal.SIGTERM) if len(said) == 1 else None

    with pytest.raises(InterruptedBuildError):
        build_cache(settings(data, commit_every=1, events=tmp_path / "events"), observer=Stopping())
    before = set(acknowledged(tmp_path / "events"))
    assert 5 <= len(before) <= 42
    cache = settings(data).cache
    assert before == {item.key.hex() for item in stored_entries(cache, payloads=False)}
    report = build_cache(settings(data, events=tmp_path / "events"))
    assert (report.encoded, report.cached) == (0, 42)
    assert len(acknowledged(tmp_path / "events")) == 42


def test_who_follows_a_build_gets_the_copies_too(tmp_path):
    data = with_twins(tmp_path / "data", 4, 2)
    report = built(data, tmp_path / "cache", stream=True)
    assert (report.encoded, report.cached) == (4, 8)
    loader = open_cache(tmp_path / "cache", follow=True).loader(batch_size=2, seed=0)
    assert sorted(name for batch in loader for name in batch["names"]) == sorted(rows_of(tmp_path / "cache"))
