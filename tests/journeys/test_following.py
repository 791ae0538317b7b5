import signal

import pytest
from commands import acknowledged, look, start_followed
from small_cache import SMALL, draw

from latentcache.errors import MissingEntryError
from latentcache.loader.cache import open_cache

COUNT = 24


@pytest.fixture
def data(tmp_path):
    for number in range(COUNT):
        draw(tmp_path / "data" / f"p{number:02}.png", ((96, 64), (64, 96), (80, 80))[number % 3], seed=number)
    return tmp_path / "data"


def start(data, cache):
    return start_followed(cache, data, *SMALL, "--commit-every", 2)


def read_epoch(cache, **more):
    found = {}
    for batch in cache.loader(batch_size=2, seed=3, **more):
        found |= dict(zip(batch["names"], zip(batch["keys"]["latents"], batch["latents"], strict=True), strict=True))
    return found


def test_a_file_that_cannot_be_used_is_named_or_replaced(data, tmp_path):
    whole = (data / "p00.png").read_bytes()
    (data / "p00.png").write_bytes(whole[: len(whole) // 2])  # its header is valid
    process = start(data, tmp_path / "cache")
    pending = open_cache(tmp_path / "cache", follow=True, timeout_s=60)
    assert len(pending.loader(batch_size=2)) == COUNT // 2
    process.send_signal(signal.SIGCONT)
    with pytest.raises(MissingEntryError, match=r"latents of p00\.png cannot be made"):
        read_epoch(pending)
    with pytest.warns(UserWarning, match="served in place of p00"):
        found = read_epoch(pending, on_error="substitute")
    assert len(found) == COUNT - 1
    assert process.wait(60) == 1


def test_content_hashes_are_stored_before_the_end(data, tmp_path):
    """A streaming build hashes inputs first, so the parts of a split are those of the finished cache."""
    process = start(data, tmp_path / "cache")
    pending = open_cache(tmp_path / "cache", follow=True).split(0.5)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 0
    finished = open_cache(tmp_path / "cache", follow=True).split(0.5)
    assert [len(part) for part in pending] == [len(part) for part in finished]


@pytest.mark.parametrize("batch", [1, 4])
def test_images_are_encoded_in_the_order_of_the_loader(data, tmp_path, batch):
    """Several buckets, whose order decides the order of the steps."""
    cache, events = tmp_path / "cache", tmp_path / "events"
    words = ("--stream", "--stream-seed", 3, "--stream-batch", batch, "--events", events, "--json")
    one_by_one = ("--commit-every", 1, "--batch-size", 1, "--decode-threads", 1)
    assert look("build", data, "--out", cache, *SMALL, *words, *one_by_one).status == 0
    loader = open_cache(cache).loader(batch_size=batch, seed=3)
    read_keys = [key.numpy().tobytes().hex() for step in loader for key in step["keys"]["latents"]]
    assert acknowledged(events) == list(dict.fromkeys(read_keys))
