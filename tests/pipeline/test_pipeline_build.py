import json
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from small_builds import (
    FakeEncoder,
    Talk,
    causes,
    draw,
    folder_of,
    jpeg_with_comment,
    png_with_text,
    recipe_of,
    rows_of,
    settings,
    within,
)

from latentcache.encoders.stub import StubEncoder
from latentcache.errors import (
    CacheLockedError,
    EmptySourceError,
    EncoderError,
    SourceNotFoundError,
    UsageError,
)
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.decode import decode
from latentcache.pipeline.resize import pixel_hash, resize_crop
from latentcache.pipeline.settings import BuildSettings
from latentcache.store.catalog import load_catalog
from latentcache.store.generation import load_generation
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.reader import EntryReader


@pytest.fixture
def data(tmp_path):
    """Three pictures in three formats and two shapes, with captions."""
    folder = tmp_path / "data"
    draw(folder / "a.png", 1)
    draw(folder / "b.jpg", 2, height=96, width=60)
    draw(folder / "sub" / "c.webp", 3)
    for path in list(folder.rglob("*.*")):
        path.with_suffix(".txt").write_text(f"caption of {path.name}")
    return folder


@pytest.fixture
def encoder(use_encoder):
    return use_encoder(FakeEncoder())


def built(data, talk=None, **changes):
    return within(30, lambda: build_cache(settings(data, **changes), observer=talk))


def rebuilt(data, encoder, **changes):
    """A further build: its report, and how many pictures the encoder was given for it."""
    before = encoder.num_pictures
    return built(data, **changes), encoder.num_pictures - before


def test_every_entry_holds_the_latents_of_its_picture(data, encoder):
    cache = built(data).plan.cache
    generation = load_generation(cache)
    reader = EntryReader(CacheLayout(cache), generation)
    assert list(generation.samples.names) == ["a.png", "b.jpg", "sub/c.webp"]
    assert list(generation.samples.captions) == [f"caption of {name}" for name in ("a.png", "b.jpg", "c.webp")]
    for row in range(3):
        header, latents = reader.read(row)
        contents = (data / reader.sample_name(row)).read_bytes()
        placement = load_catalog(CacheLayout(cache)).locate(generation.rows.key[row].tobytes()).facts.placement
        cut = resize_crop(decode(contents, recipe_of().pixels), placement, "lanczos-pil")
        assert np.array_equal(latents, StubEncoder().encode(cut[None]).latents[0])
        assert header.content == content_hash(contents)
    reader.close()


def test_a_second_build_encodes_nothing(data, encoder):
    first = built(data)
    assert (first.encoded, first.cached, first.generation, first.published) == (3, 0, 1, True)
    second, encoded = rebuilt(data, encoder)
    assert (second.encoded, second.cached, encoded) == (0, 3, 0)


def test_an_unchanged_folder_publishes_nothing(data, encoder, monkeypatch):
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    built(data)
    again = built(data)
    assert (again.published, again.generation, again.plan.files_to_read) == (False, 1, 0)
    assert not (again.plan.cache / "BUILDING").exists()


def test_a_file_that_is_refused_at_every_build_publishes_nothing_new(data, encoder):
    draw(data / "large.png", 9, height=200, width=200)
    assert built(data, max_pixels=10_000).published
    again = built(data, max_pixels=10_000)  # looked at again, because --max-pixels is no part of the recipe
    assert (again.published, causes(again)) == (False, {"large.png": "too-many-pixels"})


def test_one_edited_picture_is_one_picture_to_encode(data, encoder):
    built(data)
    draw(data / "a.png", 77)
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, report.cached, encoded) == (1, 2, 1)


@pytest.mark.parametrize("name", ["a.png", "b.jpg"])
def test_an_edit_of_metadata_takes_over_the_latents(data, encoder, name):
    cache = built(data).plan.cache
    before = {item.key: item for item in stored_entries(cache, payloads=True)}
    (old,) = rows_of(cache)[name]
    change = png_with_text if name.endswith("png") else jpeg_with_comment
    (data / name).write_bytes(change((data / name).read_bytes(), "another comment"))
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)
    (new,) = rows_of(cache)[name]
    after = {item.key: item for item in stored_entries(cache, payloads=True)}
    assert new not in before
    assert after[new].header.payload_checksum == before[old].header.payload_checksum
    assert after[new].header.content == content_hash((data / name).read_bytes())


def test_damaged_latents_are_not_taken_over(data, encoder):
    cache = built(data).plan.cache
    located = load_catalog(CacheLayout(cache)).locate(rows_of(cache)["a.png"][0])
    shard = cache / "shards" / located.shard / "data.mdb"
    shard.chmod(0o644)
    with shard.open("r+b") as file:
        file.seek(located.offset + 112 + 5)
        file.write(b"\xff\xff\xff")
    (data / "a.png").write_bytes(png_with_text((data / "a.png").read_bytes(), "x"))
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, encoded) == (1, 1)


def test_one_content_under_several_names_is_one_entry(data, encoder):
    for number in range(5):
        (data / f"copy{number}.png").write_bytes((data / "a.png").read_bytes())
    report = built(data, decode_threads=4)
    assert (report.samples, report.encoded, encoder.num_pictures) == (8, 3, 3)
    rows = rows_of(report.plan.cache)
    assert len(rows) == 8
    assert {key for number in range(5) for key in rows[f"copy{number}.png"]} == set(rows["a.png"])


def test_several_resolutions_are_several_entries_and_a_further_one_encodes_only_itself(data, encoder):
    built(data)
    report, encoded = rebuilt(data, encoder, recipe={"resolutions": (64, 128)})
    assert (report.encoded, report.cached, encoded) == (3, 3, 3)
    assert {len(keys) for keys in rows_of(report.plan.cache).values()} == {2}
    report, encoded = rebuilt(data, encoder, recipe={"resolutions": (128,)})
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)
    assert {len(keys) for keys in rows_of(report.plan.cache).values()} == {1}


def test_a_caption_is_recorded_and_encodes_nothing(data, encoder):
    cache = built(data).plan.cache
    (data / "a.txt").write_text("something else")
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, encoded, report.published) == (0, 0, True)
    assert load_generation(cache).samples.captions[0] == "something else"


def test_a_renamed_file_encodes_nothing(data, encoder):
    cache = built(data).plan.cache
    (data / "a.png").rename(data / "sub" / "z.png")
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)
    assert set(rows_of(cache)) == {"b.jpg", "sub/c.webp", "sub/z.png"}


@pytest.mark.parametrize("how", ["move", "copy"])
def test_a_folder_elsewhere_encodes_nothing(data, encoder, how, tmp_path):
    cache = built(data).plan.cache
    elsewhere = tmp_path / "other" / "place"
    elsewhere.parent.mkdir()
    (shutil.move if how == "move" else shutil.copytree)(data, elsewhere)
    report, encoded = rebuilt(elsewhere, encoder, out=cache)
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)
    assert load_generation(cache).source_root == str(elsewhere)


def test_a_moved_cache_is_whole(data, encoder, tmp_path):
    cache = built(data).plan.cache
    cache.rename(tmp_path / "moved")
    report, encoded = rebuilt(data, encoder, out=tmp_path / "moved")
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)


@pytest.mark.parametrize(
    "change",
    [{"alpha": "#000000"}, {"icc": "ignore"}, {"resample": "lanczos-u8"}, {"storage_dtype": "float32"}],
)
def test_another_recipe_encodes_everything_again_under_keys_of_its_own(data, use_encoder, change):
    first = built(data)
    keys = {key for row in rows_of(first.plan.cache).values() for key in row}
    dtype = change.get("storage_dtype", "float16")
    use_encoder(StubEncoder(storage_dtype=dtype))
    second = built(data, recipe=change)
    assert (second.encoded, second.cached) == (3, 0)
    others = {key for row in rows_of(second.plan.cache).values() for key in row}
    assert {EntryKey.unpack(key).recipe for key in others} == {second.plan.recipe.key_part}
    assert not keys & others
    plain = {"alpha": "#ffffff", "icc": "srgb", "resample": "lanczos-pil", "storage_dtype": "float16"}
    back = built(data, recipe=plain)
    assert (back.encoded, back.cached) == (0, 3)  # the old entries are still there


def test_settings_that_are_not_said_follow_the_cache(data, encoder):
    said = {"resolutions": (128,), "alpha": "#123456", "bucket_step": 16}
    first = built(data, recipe=said)
    unsaid = {"model": None, "resolutions": (), "bucket_step": None}
    report, encoded = rebuilt(data, encoder, recipe=unsaid)
    assert report.plan.recipe == first.plan.recipe
    assert (report.encoded, encoded) == (0, 0)


def test_a_removed_picture_leaves_the_generation_and_its_entry_stays(data, encoder):
    cache = built(data).plan.cache
    saved = (data / "a.png").read_bytes()
    (data / "a.png").unlink()
    report, _ = rebuilt(data, encoder)
    assert set(rows_of(cache)) == {"b.jpg", "sub/c.webp"}
    assert report.samples == 2
    (data / "a.png").write_bytes(saved)
    report, encoded = rebuilt(data, encoder)
    assert (report.encoded, report.cached, encoded) == (0, 3, 0)


def test_bad_pictures_are_quarantined_and_mended_ones_come_back(data, encoder):
    whole = draw(data / "d.jpg", 4).read_bytes()
    (data / "d.jpg").write_bytes(whole[:-200])
    (data / "e.png").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    report = built(data)
    assert causes(report) == {"d.jpg": "truncated", "e.png": "git-lfs"}
    assert (report.encoded, report.samples) == (3, 5)
    assert all(item.hint for item in report.refused)
    (data / "d.jpg").write_bytes(whole)
    report, encoded = rebuilt(data, encoder)
    assert (causes(report), report.encoded, encoded) == ({"e.png": "git-lfs"}, 1, 1)


def test_events_name_every_encoded_key_once(data, encoder, tmp_path):
    cache = built(data, events=tmp_path / "events", commit_every=1).plan.cache
    lines = [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["commit"] * 3
    assert {line["keys"][0] for line in lines} == {key.hex() for row in rows_of(cache).values() for key in row}
    built(data, events=tmp_path / "events")
    assert len((tmp_path / "events").read_text().splitlines()) == 3


@pytest.mark.parametrize("num_threads", [1, 4])
def test_threads_change_nothing_in_the_result(data, tmp_path, num_threads):
    folder_of(data, 20)
    one = built(data, out=tmp_path / "one", decode_threads=1, batch_size=1)
    other = built(data, out=tmp_path / "other", decode_threads=num_threads, batch_size=7)
    checks = [
        {item.key: item.header.payload_checksum for item in stored_entries(report.plan.cache, payloads=True)}
        for report in (one, other)
    ]
    assert checks[0] == checks[1]
    assert rows_of(one.plan.cache) == rows_of(other.plan.cache)


def test_a_damaged_shard_is_said_and_saved_as_far_as_it_is_whole(data, encoder):
    cache = built(data).plan.cache
    (shard,) = CacheLayout(cache).sealed_shards()
    (shard / "index.npy").write_bytes(b"junk")
    talk = Talk()
    before = encoder.num_pictures
    report = built(data, talk)
    assert (report.encoded, report.cached, encoder.num_pictures - before) == (0, 3, 0)
    saved = "3 whole entries of it were saved, what else is needed is made again"
    assert talk.warnings == [f"shard {shard.name} was damaged: {saved}"]


def test_what_a_dead_build_left_unreadable_is_put_aside_and_said(data, encoder):
    cache = built(data).plan.cache
    left = CacheLayout(cache).shards / "0123.open"
    left.mkdir()
    (left / "data.mdb").write_bytes(b"\xde\xad" * 5000)
    talk = Talk()
    report = built(data, talk)
    assert (report.encoded, report.cached) == (0, 3)
    assert "0123.open was damaged" in talk.warnings[0]
    assert len(list((cache / "quarantine").iterdir())) == 1


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda data: None, SourceNotFoundError),
        (lambda data: data.mkdir(), EmptySourceError),
        (lambda data: data.write_text("x"), UsageError),
    ],
)
def test_data_that_cannot_be_used_leaves_nothing_behind(tmp_path, make, error):
    make(tmp_path / "data")
    there = sorted(tmp_path.rglob("*"))
    with pytest.raises(error):
        build_cache(settings(tmp_path / "data"))
    assert sorted(tmp_path.rglob("*")) == there


def test_data_that_are_nowhere_make_no_folders_on_the_way(tmp_path):
    with pytest.raises(SourceNotFoundError):
        build_cache(settings(tmp_path / "not" / "here" / "data"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_cannot_be_used_leaves_nothing_behind(data, tmp_path):
    with pytest.raises(EncoderError):
        build_cache(settings(data, recipe={"model": str(tmp_path / "no-model")}))
    assert not (tmp_path / "data.latentcache").exists()


def test_a_refused_build_leaves_an_old_cache_as_it_was(data, encoder, tmp_path):
    cache = built(data).plan.cache
    there = {path: path.stat().st_mtime_ns for path in cache.rglob("*") if path.name != "builder.lock"}
    with pytest.raises(EncoderError):
        build_cache(settings(data, recipe={"model": str(tmp_path / "no-model")}))
    assert {path: path.stat().st_mtime_ns for path in there} == there


def test_an_event_file_that_cannot_be_is_said_before_anything_is_encoded(data, encoder, tmp_path):
    with pytest.raises(UsageError, match="event file"):
        built(data, events=tmp_path / "no" / "events")
    assert encoder.calls == []


def test_a_cache_that_another_build_holds_is_refused(data, encoder, tmp_path):
    cache = built(data).plan.cache
    with builder_lock(cache / "builder.lock"), pytest.raises(CacheLockedError) as caught:
        built(data)
    assert caught.value.holder["pid"]


def test_a_cache_is_held_before_the_data_are_looked_at(data, encoder, tmp_path, monkeypatch):
    seen = []

    def scan(folder):
        seen.append((tmp_path / "data.latentcache" / "builder.lock").exists())
        raise EmptySourceError("no pictures")

    monkeypatch.setattr("latentcache.pipeline.build.scan", scan)
    with pytest.raises(EmptySourceError):
        built(data)
    assert seen == [True]
    assert not (tmp_path / "data.latentcache").exists()


def test_the_plan_comes_before_any_progress(data, encoder):
    talk = Talk()
    report = built(data, talk)
    assert talk.plans == [report.plan]
    assert report.written_bytes > 0
    assert report.plan == replace(report.plan, cache=data.with_name("data.latentcache"))


MEMORY = """
import sys
from pathlib import Path
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
def peak():  # ru_maxrss begins with what the process that started this one had
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])
before = peak()
report = build_cache(BuildSettings(
    data=Path(sys.argv[1]), device="cpu", decode_threads=4, host_memory=200_000_000,
    recipe=RecipeSettings(model="stub", resolutions=(512,))))
after = peak()
print(report.encoded, "torch" in sys.modules, (after - before) // 1024)
"""


def test_memory_is_bounded_by_the_budget_and_not_by_the_number_of_threads(tmp_path):
    data = tmp_path / "data"
    for number in range(6):
        draw(data / f"{number}.jpg", number, height=64, width=64)
        enlarged(data / f"{number}.jpg", 4000, 5000)
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, str(data)], capture_output=True, text=True, timeout=100, check=True
    )
    encoded, torch_is_there, megabytes = result.stdout.split()
    assert (encoded, torch_is_there) == ("6", "False")
    assert int(megabytes) < 330  # four at once would take more


def enlarged(path, height, width):
    """A large picture that compresses well."""
    with Image.open(path) as picture:
        large = picture.resize((width, height), Image.Resampling.NEAREST)
    large.save(path, quality=50)


def test_a_draw_is_the_same_whether_it_was_made_or_taken_over(tmp_path):
    """A file with other bytes and the same pixels takes over a draw; a cache made afresh of it holds the same one."""
    data = folder_of(tmp_path / "data", 2)
    cache = tmp_path / "cache"
    assert build_cache(settings(data, out=cache, recipe={"latents": "sample"})).encoded == 2
    (data / "001.png").write_bytes(png_with_text((data / "001.png").read_bytes(), "another comment"))
    again = build_cache(settings(data, out=cache))
    assert (again.encoded, again.cached) == (0, 2)
    build_cache(settings(data, out=tmp_path / "fresh", batch_size=1, recipe={"latents": "sample"}))
    made, taken = (
        {
            entry.key: (entry.header.payload_checksum, entry.header.shape)
            for entry in stored_entries(root, payloads=False)
        }
        for root in (tmp_path / "fresh", cache)
    )
    assert made.items() <= taken.items()


def test_moments_are_kept_by_builds_that_do_not_name_them(tmp_path):
    data = folder_of(tmp_path / "data", 2)
    cache = tmp_path / "cache"
    report = build_cache(settings(data, out=cache, recipe={"latents": "moments"}))
    assert [entry.header.shape for entry in stored_entries(cache, payloads=True)] == [(8, 8, 8)] * 2
    assert report.plan.bytes_to_write >= sum(
        entry.header.payload_bytes for entry in stored_entries(cache, payloads=True)
    )
    assert build_cache(settings(data, out=cache)).encoded == 0
    assert build_cache(settings(data, out=cache, recipe={"latents": "mode"})).encoded == 2


def test_mirror_images_are_encoded_from_mirrored_pixels(tmp_path):
    data, cache = folder_of(tmp_path / "data", 2, height=64, width=96), tmp_path / "cache"
    report = build_cache(settings(data, out=cache, recipe={"flip": True}))
    assert (report.encoded, report.plan.entries_to_make, sum(report.buckets.values())) == (4, 4, 4)
    generation = load_generation(cache)
    assert len({hashed.tobytes() for hashed in generation.rows.pixel_hash}) == 4
    for row, sample in enumerate(generation.rows.sample.tolist()):
        placement = load_catalog(CacheLayout(cache)).locate(generation.rows.key[row].tobytes()).facts.placement
        picture = decode((data / generation.samples.names[sample]).read_bytes(), generation.recipe.pixels)
        picture = np.ascontiguousarray(picture[:, ::-1]) if row >= 2 else picture
        cut = resize_crop(picture, placement, generation.recipe.pixels.resample)
        assert pixel_hash(cut) == generation.rows.pixel_hash[row].tobytes()


def test_asking_for_flips_later_encodes_only_the_mirror_images(tmp_path):
    data, cache = folder_of(tmp_path / "data", 3), tmp_path / "cache"
    build_cache(settings(data, out=cache))
    before = {entry.key for entry in stored_entries(cache, payloads=False)}
    talk = Talk()
    report = build_cache(settings(data, out=cache, recipe={"flip": True}), observer=talk)
    assert (report.encoded, report.cached) == (3, 3)
    assert (talk.plans[0].entries_to_make, talk.plans[0].entries_cached, talk.plans[0].samples) == (3, 3, 3)
    after = {entry.key for entry in stored_entries(cache, payloads=False)}
    assert before < after
    assert {key[1] for key in after - before} == {1}
    again = build_cache(settings(data, out=cache))
    assert (again.encoded, again.cached, again.published) == (0, 6, False)
    folder_of(data, 4)
    assert build_cache(settings(data, out=cache)).encoded == 2
    without = build_cache(settings(data, out=cache, recipe={"flip": False}))
    assert (without.encoded, without.cached, without.published) == (0, 4, True)


def test_a_metadata_edit_takes_both_variants_over(tmp_path):
    data, cache = folder_of(tmp_path / "data", 2), tmp_path / "cache"
    build_cache(settings(data, out=cache, recipe={"flip": True}))
    (data / "001.png").write_bytes(png_with_text((data / "001.png").read_bytes(), "another comment"))
    report = build_cache(settings(data, out=cache))
    assert (report.encoded, report.cached) == (0, 4)


def test_a_picture_whose_mirror_image_cannot_be_encoded_is_refused_whole(tmp_path, use_encoder):
    data, cache = folder_of(tmp_path / "data", 2), tmp_path / "cache"
    with Image.open(data / "001.png") as picture:
        mirrored = np.asarray(picture)[:, ::-1]
    use_encoder(FakeEncoder(broken=[mirrored]))
    report = build_cache(settings(data, out=cache, recipe={"flip": True}))
    assert causes(report) == {"001.png": "non-finite"}
    assert len(load_generation(cache).rows.shard) == 2


def test_an_event_file_that_cannot_be_is_said_also_where_nothing_is_to_do(data, encoder, tmp_path):
    built(data)
    with pytest.raises(UsageError, match="event file"):
        built(data, events=tmp_path / "no" / "events")


def test_refused_files_are_judged_once_by_each_version_of_the_decoders(data, encoder, monkeypatch):
    (data / "bad.png").write_bytes(b"no picture")
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    assert built(data).published
    assert not built(data).published
    monkeypatch.setattr("latentcache.pipeline.preflight.installed_version", lambda name: "99")
    assert built(data).published
    assert not built(data).published


def test_a_cache_without_current_goes_on_with_its_newest_generation(data, encoder):
    cache = built(data).plan.cache
    (cache / "CURRENT").unlink()
    report = within(30, lambda: build_cache(BuildSettings(data=data)))
    assert (report.encoded, report.plan.recipe) == (0, load_generation(cache).recipe)
    assert (cache / "CURRENT").exists()
