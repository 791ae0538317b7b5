"""A cache on disk: built with the stub tokenizer, opened, planned once, damaged, and read by many."""

import json
import os
import pickle
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader

from latentcache import build_cache, open_cache, open_tokens
from latentcache.errors import CacheFormatError, CacheNotFoundError, CorruptEntryError, StaleCacheError
from latentcache.loader.token_formats import TokenCollator
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
from latentcache.pipeline.token_build import build_tokens
from latentcache.pipeline.token_settings import TokenSettings

TEXTS = [f"text {number} " + "word " * (number % 37) for number in range(300)]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokens")
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (folder / "one.jsonl").write_text("\n".join(lines[:200]) + "\n")
    data = folder / "data"
    data.mkdir()
    (folder / "one.jsonl").rename(data / "one.jsonl")
    (data / "two.jsonl").write_text("\n".join(lines[200:]) + "\n")
    build_tokens(TokenSettings(data=data, out=folder / "cache", tokenizer="stub", workers=0))
    return folder / "cache"


def decoded(ids):
    return bytes(number for number in ids if number < 256).decode()


def test_what_was_built_comes_back(built):
    cache = open_tokens(built)
    assert len(cache) == len(TEXTS)
    assert cache.sources == {"one.jsonl": 200, "two.jsonl": 100}
    view = cache.padded(256)
    rows = view.batch(range(len(view)))["input_ids"].tolist()
    assert [decoded(row) for row in rows] == TEXTS


def test_packed_rows_hold_every_document_and_are_planned_once(built):
    cache = open_tokens(built)
    shutil.rmtree(cache.plans.folder, ignore_errors=True)
    views = {length: cache.packed(length) for length in (128, 256)}
    assert len(list(cache.plans.folder.glob("*.npy"))) == 2
    stamps = {path: path.stat().st_mtime_ns for path in cache.plans.folder.iterdir()}
    for length, view in views.items():
        again = open_tokens(built).packed(length)
        assert (len(again), again.tokens, again.identity) == (len(view), view.tokens, view.identity)
        assert torch.equal(again.batch([0, 1])["labels"], view.batch([0, 1])["labels"])
    assert {path: path.stat().st_mtime_ns for path in cache.plans.folder.iterdir()} == stamps
    served = sorted(
        decoded(row[segment == number].tolist())
        for batch in views[256].loader(batch_size=4, small_buckets="partial")
        for row, segment in zip(batch["input_ids"], batch["seq_idx"], strict=True)
        for number in range(1, int(segment.max()) + 1)
    )
    assert served == sorted(TEXTS)


def test_a_damaged_plan_is_said_and_made_again(built):
    cache = open_tokens(built)
    shutil.rmtree(cache.plans.folder, ignore_errors=True)
    view = cache.packed(200)
    for path in cache.plans.folder.glob("*.npy"):
        path.write_bytes(path.read_bytes()[:-9])
    with pytest.warns(UserWarning, match="made again"):
        assert len(cache.packed(200)) == len(view)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(cache.packed(200)) == len(view)


def test_a_cache_that_may_only_be_read_is_planned_every_time(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache", ignore=shutil.ignore_patterns("plans"))
    (tmp_path / "cache" / "plans").write_text("in the way, for everybody: root may write anywhere")
    assert len(open_tokens(tmp_path / "cache").packed(200)) == len(open_tokens(built).packed(200))


def test_another_tokenizer_is_refused_by_name(built):
    recipe = open_tokens(built).recipe
    assert len(open_tokens(built, recipe)) == len(open_tokens(built, recipe.tokenizer)) == len(TEXTS)
    with pytest.raises(StaleCacheError, match="add_eos") as caught:
        open_tokens(built, replace(recipe, add_eos=not recipe.add_eos))
    assert [name for name, _, _ in caught.value.differences] == ["add_eos"]
    with pytest.raises(StaleCacheError, match=f"tokenizer: {recipe.tokenizer[:8]} -> 00ff00ff"):
        open_tokens(built, "00ff" * 8)
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), StaleCacheError)


def test_caches_of_the_other_kind_say_how_they_are_opened(built, tmp_path):
    with pytest.raises(CacheNotFoundError):
        open_tokens(tmp_path)
    with pytest.raises(CacheFormatError, match="tokens"):
        open_cache(built)


def damaged(built, folder):
    """A copy of the cache with one bit of the first document's ids turned."""
    shutil.copytree(built, folder)
    store = open_tokens(folder).store
    block = int(store.documents.block[0])
    path = folder / "shards" / store.generation.shards[int(store.generation.blocks.shard[block])] / "data.mdb"
    place = int(store.generation.blocks.offset[block]) + 112 + int(store.documents.start[0]) * 2
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    return folder


@pytest.mark.parametrize("prefetch", [0, 2])
def test_damage_names_file_and_line(built, tmp_path, prefetch):
    view = open_tokens(damaged(built, tmp_path / "cache")).padded(256)
    with pytest.raises(CorruptEntryError, match=r"(one|two).jsonl:\d+") as caught:
        list(view.loader(batch_size=4, prefetch=prefetch))
    assert caught.value.sample.split(":")[0] in ("one.jsonl", "two.jsonl")
    assert "verify" in caught.value.fix


def test_parts_by_source_and_by_content(built):
    cache = open_tokens(built)
    two = cache.of_source("two.jsonl").padded(256)
    assert [decoded(row) for row in two.batch(range(len(two)))["input_ids"].tolist()] == TEXTS[200:]
    train, held = cache.split(0.25)
    assert len(train) + len(held) == len(TEXTS)
    assert 40 < len(held) < 110
    assert set(held._corpus.documents.tolist()).isdisjoint(train._corpus.documents.tolist())


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_read_what_the_parent_reads(built, context):
    view = open_tokens(built).packed(256)
    loader = DataLoader(
        view, batch_size=4, num_workers=2, collate_fn=TokenCollator(), multiprocessing_context=context
    )
    expected = view.batch(range(len(view)))["labels"]
    assert torch.equal(torch.cat([batch["labels"] for batch in loader]), expected)


def test_a_forked_child_goes_on(built):
    loader = open_tokens(built).packed(256).loader(batch_size=2)
    expected = [batch["labels"].clone() for batch in loader]
    passing = iter(loader)
    next(passing)
    if not (child := os.fork()):
        same = all(torch.equal(b["labels"], e) for b, e in zip(passing, expected[1:], strict=True))
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert all(torch.equal(b["labels"], e) for b, e in zip(passing, expected[1:], strict=True))


def test_a_cache_of_pictures_is_refused(tmp_path):
    from make_pictures import make_pictures

    make_pictures(tmp_path / "pictures", count=2, side=64)
    settings = BuildSettings(data=tmp_path / "pictures", recipe=RecipeSettings(model="stub", resolutions=(64,)))
    with pytest.raises(CacheFormatError, match="pictures"):
        open_tokens(build_cache(settings).plan.cache)


def test_one_share_of_the_data_is_served_with_a_warning(built, tmp_path):
    build_tokens(
        TokenSettings(data=built.parent / "data", out=tmp_path / "part", tokenizer="stub", workers=0, share="1/2")
    )
    with pytest.warns(UserWarning, match="share 1/2 of its data") as caught:
        cache = open_tokens(tmp_path / "part")
    assert caught[0].filename == __file__
    assert (cache.share, 0 < len(cache) < 300) == ("1/2", True)
    assert cache.split(0.5)[0].share == "1/2"
    assert open_tokens(built).share == ""
