"""The gather is checked where a trainer meets it: through the loader, read and mapped, ahead and not."""

import pickle
import threading

import numpy as np
import pytest
import torch
from small_cache import build, damage_payload, draw

from latentcache.errors import CorruptEntryError, LatentcacheError, MissingEntryError
from latentcache.loader.cache import open_cache
from latentcache.loader.gather import BatchGather
from latentcache.store.entry import HEADER_BYTES
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader

SHAPE = 4, 8, 8
WAYS = pytest.mark.parametrize("mapped", [False, True], ids=["read", "mapped"])


@pytest.fixture
def square(tmp_path):
    """A cache of six square pictures in one bucket."""
    for number in range(6):
        draw(tmp_path / "data" / f"p{number}.png", (80, 80), seed=number)
    build(tmp_path / "data", tmp_path / "cache")
    return tmp_path / "cache"


def reader_of(cache):
    return EntryReader(CacheLayout(cache), load_generation(cache))


def data_of(cache):
    (data,) = (cache / "shards").glob("*/data.mdb")
    data.chmod(0o644)
    return data


@WAYS
def test_it_gives_what_the_reader_of_single_entries_gives(square, mapped):
    reader = reader_of(square)
    batch = BatchGather(reader, mapped=mapped).gather([3, 0, 3, 5], SHAPE, "float16")
    assert (batch.shape, batch.dtype, batch.flags.writeable) == ((4, *SHAPE), np.float16, True)
    assert all(np.array_equal(batch[i], reader.read(row)[1]) for i, row in enumerate([3, 0, 3, 5]))


@WAYS
def test_every_byte_of_header_and_payload_is_checked(square, mapped):
    gather, reader, data = BatchGather(reader_of(square), mapped=mapped), reader_of(square), data_of(square)
    offset = int(reader.generation.rows.offset[2])
    whole = data.read_bytes()
    for place in [*range(0, HEADER_BYTES, 3), HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + 511]:
        with data.open("r+b") as file:
            file.seek(offset + place)
            file.write(bytes([whole[offset + place] ^ 4]))
        with pytest.raises(CorruptEntryError) as caught:
            gather.gather([0, 2, 1], SHAPE, "float16")
        assert caught.value.sample == "p2.png"
        gather.gather([0, 1], SHAPE, "float16")
        with data.open("r+b") as file:
            file.seek(offset)
            file.write(whole[offset : offset + HEADER_BYTES + 512])
    gather.gather([0, 2, 1], SHAPE, "float16")


@WAYS
@pytest.mark.parametrize(("shape", "dtype"), [((4, 8, 4), "float16"), ((8, 8, 4), "float16"), (SHAPE, "bfloat16")])
def test_another_shape_or_type_is_refused(square, mapped, shape, dtype):
    with pytest.raises(CorruptEntryError, match="shape"):
        BatchGather(reader_of(square), mapped=mapped).gather([0, 1], shape, dtype)


@WAYS
def test_an_entry_under_another_key_is_refused(square, mapped):
    reader = reader_of(square)
    offset = reader.generation.rows.offset.copy()
    offset[1] = offset[0]
    object.__setattr__(reader.generation.rows, "offset", offset)
    with pytest.raises(CorruptEntryError, match=r"p1\.png"):
        BatchGather(reader, mapped=mapped).gather([0, 1], SHAPE, "float16")


@WAYS
@pytest.mark.parametrize("opened_before", [False, True])
@pytest.mark.parametrize("keep", [0, 100, 4096, -3000])
def test_a_shard_that_is_cut_is_an_error_and_no_signal(square, mapped, opened_before, keep):
    gather, data = BatchGather(reader_of(square), mapped=mapped), data_of(square)
    rows = list(range(6))
    if opened_before:
        gather.gather(rows, SHAPE, "float16")
    last = int(reader_of(square).generation.rows.offset.max()) + HEADER_BYTES + 512
    with data.open("r+b") as file:
        file.truncate(keep if keep >= 0 else last - 100)
    with pytest.raises(CorruptEntryError, match="ends early"):
        gather.gather(rows, SHAPE, "float16")


@WAYS
def test_a_payload_is_checked_on_every_read_and_its_header_on_the_first_of_a_process(square, mapped):
    gather, reader, data = BatchGather(reader_of(square), mapped=mapped), reader_of(square), data_of(square)
    offset = int(reader.generation.rows.offset[2])
    expected = gather.gather([0, 2], SHAPE, "float16").copy()
    with data.open("r+b") as file:
        file.seek(offset + 40)
        file.write(b"????")
    assert np.array_equal(gather.gather([2, 0], SHAPE, "float16"), expected[::-1])
    for fresh in (BatchGather(reader_of(square), mapped=mapped), pickle.loads(pickle.dumps(gather))):
        with pytest.raises(CorruptEntryError, match=r"p2\.png"):
            fresh.gather([0, 2], SHAPE, "float16")
    with data.open("r+b") as file:
        file.seek(offset + HEADER_BYTES + 100)
        file.write(b"????")
    with pytest.raises(CorruptEntryError, match=r"p2\.png"):
        gather.gather([0, 2], SHAPE, "float16")


@WAYS
def test_a_shape_that_held_says_nothing_of_another(square, mapped):
    gather = BatchGather(reader_of(square), mapped=mapped)
    gather.gather([0, 1], SHAPE, "float16")
    with pytest.raises(CorruptEntryError, match="shape"):
        gather.gather([0, 1], (8, 8, 4), "float16")
    gather.gather([0, 1], SHAPE, "float16")


@WAYS
def test_a_shard_that_is_gone_is_named_with_its_sample(square, mapped):
    data_of(square).unlink()
    with pytest.raises(MissingEntryError, match=r"the entry of p1\.png is gone"):
        BatchGather(reader_of(square), mapped=mapped).gather([1, 2], SHAPE, "float16")


@WAYS
def test_it_can_be_pickled_and_shared_by_threads(square, mapped):
    gather = BatchGather(reader_of(square), mapped=mapped)
    expected = gather.gather(range(6), SHAPE, "float16").copy()
    copy, wrong = pickle.loads(pickle.dumps(gather)), []

    def work():
        wrong.extend(_ for _ in range(100) if not np.array_equal(copy.gather(range(6), SHAPE, "float16"), expected))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


# through the loader

EVERY_WAY = pytest.mark.parametrize(
    "options", [{"prefetch": p, "mapped": m} for p in (0, 1, 2, 5) for m in (False, True)], ids=str
)


@EVERY_WAY
def test_each_way_serves_the_same_epoch(square, options):
    """Every batch is kept: none is written over."""
    expected = [(b["keys"], b["latents"].clone()) for b in open_cache(square).loader(batch_size=1, prefetch=0)]
    loader = open_cache(square).loader(batch_size=1, **options)
    for _ in range(2):
        kept = list(loader)
        assert [batch["keys"] for batch in kept] == [keys for keys, _ in expected]
        assert all(torch.equal(b["latents"], latents) for b, (_, latents) in zip(kept, expected, strict=True))


@EVERY_WAY
def test_batches_read_ahead_are_not_progress(square, options):
    loader = open_cache(square).loader(batch_size=1, **options)
    whole = [batch["names"] for batch in loader]
    iterator = iter(loader)
    seen = [next(iterator)["names"] for _ in range(2)]
    assert loader.remaining() == 4
    state = loader.state_dict()
    iterator.close()
    other = open_cache(square).loader(batch_size=1, **options)
    other.load_state_dict(state)
    assert seen + [batch["names"] for batch in other] == whole


@EVERY_WAY
def test_an_error_comes_with_the_batch_it_belongs_to(square, options):
    loader = open_cache(square).loader(batch_size=1, **options)
    order = [batch["names"][0] for batch in loader]
    damaged = damage_payload(square, row=int(order[3][1]))
    assert damaged == order[3]
    iterator = iter(loader)
    assert [next(iterator)["names"][0] for _ in range(3)] == order[:3]
    with pytest.raises(CorruptEntryError, match=damaged.replace(".", r"\.")):
        next(iterator)
    assert loader.remaining() == 3


@EVERY_WAY
def test_a_file_cut_in_the_middle_of_an_epoch(square, options):
    if options.get("mapped"):
        options = options | {"prefetch": 0}  # a map that is cut while a thread copies from it is a signal (record 8)
    loader = open_cache(square).loader(batch_size=1, **options)
    iterator = iter(loader)
    next(iterator)
    with data_of(square).open("r+b") as file:
        file.truncate(50)
    try:
        served = len(list(iterator))
    except LatentcacheError:
        return
    assert served == options["prefetch"] == 5  # all of it had been read ahead
