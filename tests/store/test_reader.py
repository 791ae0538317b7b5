import multiprocessing
import os
import pickle
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from made_entries import flat_entry, flip, make_cache, make_shard, new_entry, publish_entries
from reader_children import digest_of, read_all

from latentcache.errors import CacheDamagedError, CacheFormatError, CorruptEntryError, MissingEntryError
from latentcache.identity.content import checksum
from latentcache.store.entry import HEADER_BYTES, pack_header, unpack_header
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader


@pytest.fixture
def layout(tmp_path):
    return make_cache(tmp_path / "cache", count=8)


@pytest.fixture
def reader(layout):
    made = EntryReader(layout, load_generation(layout.root))
    yield made
    made.close()


def data_of(reader, row=0):
    return reader.layout.shards / reader.generation.shards[0] / "data.mdb"


def offset_of(reader, row):
    return int(reader.generation.rows.offset[row])


def test_what_was_written_is_read(reader):
    for row in range(8):
        header, payload = reader.read(row)
        made = new_entry(row)
        assert header == unpack_header(made.value, made.key) == reader.header(row)
        assert (payload.dtype, payload.shape) == (np.float16, (4, 8, 8))
        assert payload.tobytes() == made.value[HEADER_BYTES:]
        assert payload.flags.owndata
        assert payload.flags.writeable


def test_reading_into_memory_of_the_caller(reader):
    batch = np.zeros((8, 4, 8, 8), np.float16)
    for row in range(8):
        assert reader.read_into(row, batch[row]).shape == (4, 8, 8)
    assert batch.tobytes() == b"".join(new_entry(row).value[HEADER_BYTES:] for row in range(8))


WRONG = [((4, 8, 8), "u2"), ((4, 8, 4), "f2"), ((2, 8, 16), "f2"), ((4, 8, 9), "f2"), ((256,), "f2")]


@pytest.mark.parametrize("out", [np.zeros(shape, dtype) for shape, dtype in WRONG])
def test_memory_of_another_shape_or_type_is_refused(reader, out):
    with pytest.raises(CorruptEntryError):
        reader.read_into(0, out)


def test_a_flipped_bit_in_a_header_names_the_sample(reader):
    for position in range(0, HEADER_BYTES, 5):
        flip(data_of(reader), offset_of(reader, 3) + position)
        for read in (reader.header, reader.read):
            with pytest.raises(CorruptEntryError) as caught:
                read(3)
            check_names_sample(caught.value, reader, 3)
        reader.read(2)
        flip(data_of(reader), offset_of(reader, 3) + position)
    reader.read(3)


def test_a_flipped_bit_in_a_payload_names_the_sample(reader):
    for position in (0, 1, 255, 511):
        flip(data_of(reader), offset_of(reader, 5) + HEADER_BYTES + position, mask=1)
        reader.header(5)
        with pytest.raises(CorruptEntryError, match="payload checksum") as caught:
            reader.read(5)
        check_names_sample(caught.value, reader, 5)
        reader.read(4)
        flip(data_of(reader), offset_of(reader, 5) + HEADER_BYTES + position, mask=1)


def check_names_sample(error, reader, row):
    name = f"picture_{row:04d}.png"
    assert (error.sample, error.what) == (name, f"the entry of {name} is damaged")
    assert error.key == reader.generation.rows.key[row].tobytes().hex()
    assert error.where == f"{data_of(reader)}:{offset_of(reader, row)}"
    assert "latentcache verify --full" in error.fix


def test_swapped_values_are_refused(reader):
    path, size = data_of(reader), HEADER_BYTES + 512
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    first, second = offset_of(reader, 0), offset_of(reader, 1)
    data[first : first + size], data[second : second + size] = (
        data[second : second + size],
        data[first : first + size],
    )
    path.write_bytes(data)
    for row in (0, 1):
        with pytest.raises(CorruptEntryError, match="header checksum"):
            reader.read(row)


def test_another_entry_of_the_same_shape_is_refused(reader):
    """The generation points at a place where some other key lies."""
    offset = reader.generation.rows.offset.copy()
    offset[0] = offset[1]
    object.__setattr__(reader.generation.rows, "offset", offset)
    with pytest.raises(CorruptEntryError, match="header checksum"):
        reader.read(0)


def test_a_shard_that_is_cut_short_is_an_error_and_never_a_signal(reader):
    path = data_of(reader)
    path.chmod(0o644)
    whole = path.read_bytes()
    reader.read(0)
    for length in (0, 100, 4096, len(whole) // 2, offset_of(reader, 7) + HEADER_BYTES + 5):
        os.truncate(path, length)
        for row in range(8):
            if offset_of(reader, row) + HEADER_BYTES + 512 > length:
                with pytest.raises(CorruptEntryError, match="ends early"):
                    reader.read(row)
        path.write_bytes(whole)
    reader.read(0)


def test_a_header_that_promises_more_than_the_file_holds_is_refused_before_memory_is_taken(reader):
    row, made = 2, new_entry(2)
    header = unpack_header(made.value, made.key)
    huge = type(header)(**{name: getattr(header, name) for name in header.__slots__} | {"shape": (2**31, 2**31)})
    path = data_of(reader)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset_of(reader, row))
        file.write(pack_header(huge, made.key))
    with pytest.raises(CorruptEntryError, match="ends early"):
        reader.read(row)


def test_a_newer_entry_is_told_from_damage(reader):
    made = new_entry(2)
    packed = bytearray(made.value[: HEADER_BYTES - 8])
    packed[4] = 9
    path = data_of(reader)
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(offset_of(reader, 2))
        file.write(bytes(packed) + checksum(made.key + bytes(packed)).to_bytes(8, "little"))
    with pytest.raises(CacheFormatError, match="entry format 9"):
        reader.read(2)


def test_a_shard_that_is_gone_is_an_error_of_ours(reader):
    shutil.rmtree(data_of(reader).parent)
    with pytest.raises(MissingEntryError, match="a shard of this cache is gone") as caught:
        reader.read(0)
    assert isinstance(caught.value, LookupError)
    assert "latentcache build" in caught.value.fix


def test_a_shard_that_cannot_be_opened_is_an_error_of_ours(reader):
    path = data_of(reader)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        reader.read(0)


def test_a_pinned_reader_keeps_its_generation(layout, reader):
    before = [digest_of(reader, row) for row in range(8)]
    make_shard(layout.shards / "two", [new_entry(number) for number in range(20, 30)])
    publish_entries(layout, range(20, 30))
    assert [digest_of(reader, row) for row in range(8)] == before
    assert EntryReader(layout, load_generation(layout.root)).sample_name(0) == "picture_0020.png"


def test_a_reader_survives_the_removal_of_a_shard_it_has_open(reader):
    before = [digest_of(reader, row) for row in range(8)]
    shutil.rmtree(data_of(reader).parent)
    assert [digest_of(reader, row) for row in range(8)] == before


def test_pickled_readers_open_their_own_files(reader):
    before = [digest_of(reader, row) for row in range(8)]
    copy = pickle.loads(pickle.dumps(reader))
    assert [digest_of(copy, row) for row in range(8)] == before
    copy.close()
    assert digest_of(reader, 0) == before[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_read_while_their_parent_does(reader, method):
    expected = [digest_of(reader, row) for row in range(8)]
    context = multiprocessing.get_context(method)
    results = context.Queue()
    children = [context.Process(target=read_all, args=(reader, list(range(8)) * 20, results)) for _ in range(2)]
    for child in children:
        child.start()
    for _ in range(50):
        assert [digest_of(reader, row) for row in range(8)] == expected
    found = [results.get(timeout=30) for _ in children]
    for child in children:
        child.join(30)
    assert found == [expected * 20] * 2
    assert [digest_of(reader, row) for row in range(8)] == expected


def num_open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_threads_share_a_reader(layout):
    reader = EntryReader(layout, load_generation(layout.root))
    expected = [digest_of(reader, row) for row in range(8)]
    reader.close()
    found, start = [], threading.Barrier(8)

    def read():
        start.wait()
        found.append([digest_of(reader, row) for row in range(8)])

    threads = [threading.Thread(target=read) for _ in range(8)]
    descriptors = num_open_files()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8
    assert num_open_files() <= descriptors + 1
    reader.close()
    assert num_open_files() <= descriptors


def test_a_closed_reader_opens_again(reader):
    first = digest_of(reader, 1)
    reader.close()
    reader.close()
    assert digest_of(reader, 1) == first


def test_reading_makes_nothing_in_a_shard(reader):
    before = sorted(path.name for path in data_of(reader).parent.iterdir())
    for row in range(8):
        reader.read(row)
    assert sorted(path.name for path in data_of(reader).parent.iterdir()) == before


def test_rows_of_several_shards(tmp_path):
    layout = CacheLayout(tmp_path)
    for number in range(3):
        entries = [new_entry(number), flat_entry(100 + number, 5000)]
        make_shard(layout.shards / f"shard-{number}", entries)
    publish_entries(layout, range(3))
    reader = EntryReader(layout, load_generation(layout.root))
    assert [reader.read(row)[1].tobytes() for row in range(3)] == [
        new_entry(n).value[HEADER_BYTES:] for n in range(3)
    ]
    reader.close()
