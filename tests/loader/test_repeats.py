"""Repeats: an epoch contains each sample exactly as often as its repeats."""

import json
from collections import Counter

import pytest
from made_caches import documents, images, opened, texts

from latentcache import combine
from latentcache.cli.app import main
from latentcache.errors import UsageError

SHAPES = [(64, 96), (96, 64), (80, 80)]
TIMES = [3, 1, 1, 10, 2, 1, 1, 1, 5, 1, 4]
NAMED = {f"{number:02}.png": times for number, times in enumerate(TIMES)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sizes = [SHAPES[number % 3] for number in range(len(TIMES))]
    return images(tmp_path_factory.mktemp("repeats") / "cache", sizes, repeats=TIMES)


@pytest.fixture
def cache(folder):
    return opened(folder)


def count_names(*loaders):
    return Counter(name for loader in loaders for batch in loader for name in batch["names"])


def test_an_epoch_serves_each_sample_as_often_as_its_repeats(cache):
    assert len(cache) == sum(TIMES)
    assert cache.repeats == {1: 6, 2: 1, 3: 1, 4: 1, 5: 1, 10: 1}
    assert count_names(cache.loader(batch_size=1)) == NAMED
    assert count_names(cache.loader(batch_size=1, fields=["captions"])) == NAMED
    loader = cache.loader(batch_size=1)
    loader.set_epoch(4)
    assert count_names(loader) == NAMED


def test_repeats_can_be_turned_off(cache):
    once = cache.read(repeats=False)
    assert (len(once), once.repeats) == (len(TIMES), {1: len(TIMES)})
    assert count_names(once.loader(batch_size=1)) == dict.fromkeys(NAMED, 1)
    assert count_names(once.repeated(3).loader(batch_size=1)) == dict.fromkeys(NAMED, 3)
    assert f"{len(TIMES)} without repeats" in repr(cache)
    assert "repeats" not in repr(once)


def test_a_sample_that_lacks_a_field_counts_once_as_excluded(tmp_path):
    cache = opened(images(tmp_path / "c", SHAPES, edges=[5, None, 7], repeats=[2, 4, 3]))
    assert (cache.excluded, len(cache)) == (1, 5)


def test_weights_are_of_occurrences(cache, tmp_path):
    other = opened(images(tmp_path / "other", [(64, 96)] * 4, seed=5, names=["a", "b", "c", "d"]))
    mixed = combine([cache, other], weights=[3, 1], samples=40)
    counts = count_names(mixed.loader(batch_size=1))
    assert sum(counts[name] for name in "abcd") == 10
    assert [source.entries for source in mixed.plan(batch_size=1).sources] == [sum(TIMES), 4]
    most = count_names(combine([cache, other]).loader(batch_size=1))
    assert most == Counter(NAMED) + Counter("abcd")
    with pytest.raises(UsageError, match=r"read\(repeats=\) of a cache with weights"):
        mixed.read(repeats=False)


def test_documents_are_repeated_in_rows_too(tmp_path):
    ids = texts(6)
    cache = opened(documents(tmp_path / "t", ids, repeats=[1, 2, 1, 1, 3, 1]))
    assert len(cache) == 9
    assert cache.tokens == sum(map(len, ids)) + len(ids[1]) + 2 * len(ids[4])
    rows = cache.rows(pad=64)
    lines = Counter(rows.where(row) for row in range(len(rows)))
    assert lines["data.jsonl:2"] == 2
    assert lines["data.jsonl:5"] == 3
    assert len(cache.read(repeats=False).rows(pad=64)) == 6
    chunks = [row["input_ids"] for row in cache.rows(chunk=16)]
    string = [number for row in chunks for number in row.tolist()][: cache.tokens]
    once = [*ids, ids[1], ids[4], ids[4]]  # a copy right after its document would be read off it
    assert string == [number for document in once for number in document]
    assert len(cache.documents()) == 6


def test_each_occurrence_of_a_repeated_sample_is_another_draw(tmp_path):
    cache = opened(images(tmp_path / "c", [(64, 64)] * 2, posterior="moments", repeats=[3, 1]))

    def drawn(epoch, batch_size):
        loader = cache.loader(batch_size=batch_size, seed=1)
        loader.set_epoch(epoch)
        return sorted(latents.numpy().tobytes() for batch in loader for latents in batch["latents"])

    first = drawn(0, 1)
    assert len(set(first)) == 4
    assert drawn(0, 2) == first
    assert not set(drawn(1, 1)) & set(first)


def test_the_command_shows_repeats_and_turns_them_off(folder, capsys):
    def planned(*words):
        capsys.readouterr()
        assert main(["plan", str(folder), "--batch-size", "1", *words]) == 0
        return capsys.readouterr().out

    value = json.loads(planned("--json"))
    assert (value["steps_per_epoch"], value["samples_used"]) == (sum(TIMES), sum(TIMES))
    assert value["repeats"][0] == {"times": 1, "samples": 6}
    assert "repeats: 6 samples 1 times, 1 sample 2 times" in planned()
    value = json.loads(planned("--json", "--no-repeats"))
    assert (value["steps_per_epoch"], value["repeats"]) == (len(TIMES), [{"times": 1, "samples": len(TIMES)}])
    assert "repeats:" not in planned("--no-repeats")
    capsys.readouterr()
    assert main(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["repeats"][-1] == {"times": 10, "samples": 1}
