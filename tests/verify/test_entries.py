import random
import shutil

import numpy as np
import pytest
from small_cache import build, damage_payload

from latentcache.errors import LatentcacheError
from latentcache.geometry.sizes import latent_size
from latentcache.store.entry import HEADER_BYTES, numpy_dtype, pack_header, unpack_header
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.verify.entries import check_entries
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth


def found(cache, *, full=False):
    """path or file -> (category, reason)."""
    report = verify_cache(cache, full=full)
    return {item.path or item.file or item.key: (item.category, item.reason) for item in report.findings}


def shard_of(cache):
    (folder,) = CacheLayout(cache).sealed_shards()
    return folder


def edit(path, change):
    """Rewrite a file by a function of its bytes."""
    path.chmod(0o644)
    path.write_bytes(bytes(change(bytearray(path.read_bytes()))))


def flip(offset, bit=1):
    def change(raw):
        raw[offset] ^= bit
        return raw

    return change


EVERY = {f"p{number}.png": None for number in range(4)}


def test_an_untouched_cache_is_clean(shared):
    assert found(shared[1]) == {}
    assert found(shared[1], full=True) == {}


def test_a_bit_in_a_payload_is_found_by_full_alone(cache):
    name = damage_payload(cache, row=2)
    assert found(cache) == {}
    assert found(cache, full=True) == {name: ("corrupt", "payload")}


def test_the_finding_names_key_field_and_file(cache):
    name = damage_payload(cache)
    (finding,) = verify_cache(cache, full=True).findings
    rows = load_generation(cache).rows
    assert (finding.path, finding.field) == (name, "latents")
    assert finding.key == rows.key[0].tobytes().hex()
    assert finding.file == f"shards/{shard_of(cache).name}"
    assert finding.found.startswith("payload checksum: expected ")


def test_a_bit_in_a_header_is_found_by_full_alone(cache):
    generation = load_generation(cache)
    edit(shard_of(cache) / "data.mdb", flip(int(generation.rows.offset[1]) + 20))
    name = generation.samples.names[int(generation.rows.sample[1])]
    assert found(cache, full=True)[name] == ("corrupt", "payload")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("data.mdb", lambda raw: raw[: len(raw) // 2]),
        ("data.mdb", lambda raw: raw[:100]),
        ("data.mdb", lambda raw: b""),
        ("data.mdb", lambda raw: bytes(len(raw))),
        ("index.npy", lambda raw: raw[:-1]),
        ("index.npy", lambda raw: b""),
        ("index.npy", flip(200)),
        ("index.npy", lambda raw: b"PK\3\4" + bytes(raw[4:])),
        ("shard.json", lambda raw: b"{"),
        ("shard.json", lambda raw: b"[]"),
        ("shard.json", lambda raw: raw.replace(b'"data_bytes": ', b'"data_bytes": 1')),
    ],
)
def test_a_damaged_shard_makes_all_its_samples_corrupt(cache, file, change, full):
    edit(shard_of(cache) / file, change)
    assert found(cache, full=full) == dict.fromkeys(EVERY, ("corrupt", "shard"))
    assert verify_cache(cache, full=full).counts["corrupt"] == 4


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("file", ["", "data.mdb"])
def test_a_shard_that_is_gone_makes_all_its_samples_missing(cache, file, full):
    place = shard_of(cache) / file
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert found(cache, full=full) == dict.fromkeys(EVERY, ("missing", "entry-lost"))
    assert verify_cache(cache).counts["missing"] == 4


def test_a_build_mends_a_damaged_index_and_a_lost_shard(cache, data):
    edit(shard_of(cache) / "index.npy", flip(200))
    assert build(data, cache).encoded == 0  # the shard itself is whole: all of it is saved
    assert found(cache, full=True) == {}
    for folder in CacheLayout(cache).sealed_shards():
        shutil.rmtree(folder)
    assert build(data, cache).encoded == 4
    assert found(cache, full=True) == {}


def test_pages_that_disagree_with_the_index_are_found_by_full(cache):
    """A key in a leaf page: the reader goes by the index and is right, the shard is damaged all the same."""
    data = shard_of(cache) / "data.mdb"
    key = load_generation(cache).rows.key[0].tobytes()
    edit(data, lambda raw: raw.replace(key, key[:-1] + bytes([key[-1] ^ 1]), 1))
    assert found(cache) == {}
    (finding,) = verify_cache(cache, full=True).findings
    assert (finding.category, finding.reason) == ("corrupt", "pages")
    assert finding.file == f"shards/{data.parent.name}/data.mdb"
    assert verify_cache(cache, full=True).exit_code() == 1


def rewrite_entry(cache, row, change):
    """Replace header and payload of a row by what ``change`` makes of them, with checksums that hold."""
    generation = load_generation(cache)
    key, offset = generation.rows.key[row].tobytes(), int(generation.rows.offset[row])

    def written(raw):
        header = unpack_header(bytes(raw[offset : offset + HEADER_BYTES]), key)
        end = offset + HEADER_BYTES + header.payload_bytes
        header, payload = change(header, bytes(raw[offset + HEADER_BYTES : end]))
        raw[offset:end] = pack_header(header, key) + payload
        return raw

    edit(shard_of(cache) / "data.mdb", written)
    return generation.samples.names[int(generation.rows.sample[row])]


def test_nan_in_a_payload_whose_checksum_holds_is_found(cache):
    from dataclasses import replace

    from latentcache.identity.content import checksum

    def spoil(header, payload):
        payload = np.frombuffer(payload, dtype="<f2").copy()
        payload[7] = np.nan
        return replace(header, payload_checksum=checksum(payload.tobytes())), payload.tobytes()

    name = rewrite_entry(cache, 3, spoil)
    assert found(cache, full=True)[name] == ("corrupt", "non-finite")


def test_a_shape_that_the_loader_would_refuse_is_found(cache):
    """The header is whole and its checksum holds, but the bucket asks for another shape."""
    from dataclasses import replace

    def turn(header, payload):
        channels, height, width = header.shape
        return replace(header, shape=(channels, height * width, 1)), payload

    name = rewrite_entry(cache, 0, turn)
    (finding,) = [f for f in verify_cache(cache, full=True).findings if f.path]
    assert (finding.path, finding.category) == (name, "corrupt")
    assert "shape: expected" in finding.found


def test_entries_that_nothing_needs_are_orphans(cache, data):
    (data / "p0.png").unlink()
    build(data, cache)
    report = verify_cache(cache, full=True)
    assert [(f.category, f.reason, f.path) for f in report.findings] == [("orphan", "unreferenced", "")]
    assert len(bytes.fromhex(report.findings[0].key)) == 32
    assert (report.counts["orphan"], report.exit_code()) == (1, 0)


def test_orphans_are_counted_as_entries(cache, data):
    build(data, cache, resolutions=(128,))
    report = verify_cache(cache)
    assert (report.counts["orphan"], report.counts["ok"], report.exit_code()) == (4, 4, 0)


def test_a_sample_of_two_resolutions_is_one_finding(cache, data):
    build(data, cache, resolutions=(64, 128))
    for row in range(8):
        damage_payload(cache, row=row)
    report = verify_cache(cache, full=True)
    assert report.counts["corrupt"] == 4
    assert len([f for f in report.findings if f.category == "corrupt"]) == 4


def served(cache):
    """Every payload as the loader would read it, by name; raises what the loader would raise."""
    generation = load_generation(cache)
    spec, reader, payloads = generation.recipe.encoder, EntryReader(CacheLayout(cache), generation), {}
    try:
        for row in range(len(generation.rows.shard)):
            size = latent_size(generation.buckets[int(generation.rows.bucket[row])], spec.factor)
            payload = np.empty((spec.channels, size.height, size.width), dtype=numpy_dtype(spec.storage_dtype))
            reader.read_into(row, payload)
            payloads[reader.sample_name(row)] = payload.tobytes()
    finally:
        reader.close()
    return payloads


def test_full_never_says_fine_while_the_reader_fails(shared, tmp_path):
    """Random flips and cuts in every file of a cache: our error or the same bytes; status 0 only for the latter.

    An exception of another kind in either of the two fails this test as well.
    """
    random_numbers = random.Random(7)
    whole = served(shared[1])
    copy = tmp_path / "copy"
    shutil.copytree(shared[1], copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    noticed = 0
    for path in files:
        path.chmod(0o644)
        raw = path.read_bytes()
        for trial in range(24):
            damaged = bytearray(raw)
            if trial % 6 == 5:
                del damaged[random_numbers.randrange(len(raw)) :]
            else:
                for _ in range(1 + trial % 3):
                    damaged[random_numbers.randrange(len(raw))] ^= 1 << random_numbers.randrange(8)
            path.write_bytes(damaged)
            right = reads_right(copy, whole)
            status = status_of(copy, shared[0])
            assert right or status != 0, (path.relative_to(copy), trial)
            noticed += status != 0
        path.write_bytes(raw)
    assert noticed > 50
    assert status_of(copy, shared[0]) == 0


def reads_right(cache, whole):
    try:
        return served(cache) == whole
    except LatentcacheError:
        return False


def status_of(cache, data):
    try:
        return verify_cache(cache, data=data, depth=Depth(full=True, isolate=False)).exit_code()
    except LatentcacheError as error:
        return error.exit_code


def test_check_entries_alone_needs_no_sources(cache, data):
    shutil.rmtree(data)
    checked = check_entries(CacheLayout(cache), load_generation(cache))
    assert (dict(checked.damage), checked.loose, checked.headers) == ({}, [], 4)


def test_a_damaged_mirror_image_is_found_and_named(data, tmp_path):
    build(data, tmp_path / "cache", flip=True)
    assert found(tmp_path / "cache", full=True) == {}
    name = damage_payload(tmp_path / "cache", row=5)
    report = verify_cache(tmp_path / "cache", full=True)
    (finding,) = report.findings
    assert (finding.category, finding.path, finding.key[2:4]) == ("corrupt", name, "01")
    assert report.counts["ok"] == 3
