import os
import subprocess
import sys
import warnings
from collections import Counter
from dataclasses import replace

import pytest
import torch
from damaged import damage_payload
from made_caches import chats, documents, images, opened, recipe, texts

from latentcache import Cache, combine, open_cache
from latentcache.errors import CacheIncompleteError, CacheNotFoundError, CorruptEntryError, UsageError
from latentcache.store.snapshot import open_leased

FOUR = [(64, 96), (96, 64), (64, 96), (64, 96)]


@pytest.fixture
def four(tmp_path):
    return images(tmp_path / "four.latentcache", FOUR, names=["3_cats/a.png", "b.png", "3_cats/c.png", "d.png"])


def names(loader):
    return [name for batch in loader for name in batch["names"]]


def test_cache_attributes(four, tmp_path):
    cache = open_cache(four)
    assert len(cache) == 4
    assert cache.fields == ("latents",)
    assert (cache.buckets, cache.tokens) == ({"64x96": 3, "96x64": 1}, 0)
    assert cache.recipe() == cache.recipe("latents") == recipe()
    assert repr(cache).splitlines() == [
        "Cache(4 samples of four (snapshot 1)", "  fields: latents", "  64x96: 3, 96x64: 1)"
    ]  # fmt: skip
    many = open_cache(images(tmp_path / "wide", [(64 + 8 * n, 64) for n in range(20)]))
    for public in (many, many.loader(batch_size=1), many.plan(batch_size=3), many.loader(batch_size=1).sampler,
                   combine([cache] * 6), cache.loader(batch_size=1).dataset):  # fmt: skip
        assert len(repr(public).splitlines()) <= 5
        assert max(map(len, repr(public).splitlines())) < 200
        assert " at 0x" not in repr(public)
    assert (cache == open_cache(four), len({cache, cache})) == (False, 1)


def test_reading_needs_no_model_library(four):
    code = (
        "import sys; from latentcache import open_cache\n"
        f"print(len(list(open_cache({str(four)!r}).loader(batch_size=1))))\n"
        "print([m for m in ('diffusers', 'transformers', 'latentcache.encoders', 'latentcache.pipeline', 'PIL')"
        " if m in sys.modules])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "LATENTCACHE_FIELDS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "4\n[]\n"


def test_split_by_content(many):
    training, held = many.split(0.4)
    served = [set(names(part.loader(batch_size=1))) for part in (training, held)]
    assert served[0] | served[1] == set(names(many.loader(batch_size=1)))
    assert not served[0] & served[1]
    assert (len(training), len(held)) == (len(served[0]), len(served[1]))
    with pytest.raises(UsageError, match="validation=2"):
        many.split(2)


def test_repeated_by_a_number(four):
    cache = open_cache(four)
    assert len(cache.repeated(5)) == 20
    once = names(cache.loader(batch_size=1))
    assert Counter(names(cache.repeated(2).repeated(3).loader(batch_size=1))) == dict.fromkeys(once, 6)
    for times in (0, 1.5, 2**40):
        with pytest.raises(UsageError, match="times="):
            cache.repeated(times)


def test_a_sample_without_a_requested_field_is_excluded_and_counted(tmp_path):
    root = images(tmp_path / "c", FOUR, edges=[5, None, 2, 9])
    cache = open_cache(root)
    assert (len(cache), cache.excluded, len(cache.fields)) == (3, 1, 2)
    with pytest.warns(UserWarning, match="c: 1 sample is not served, for lack of edge_map;"):
        loader = cache.loader(batch_size=1)
    assert loader.excluded == 1
    assert "1 excluded" in repr(loader)
    assert sorted(names(loader)) == ["00.png", "02.png", "03.png"]
    assert sorted(names(cache.loader(batch_size=1, fields=["latents"]))) == ["00.png", "01.png", "02.png", "03.png"]
    both = combine([cache, opened(images(tmp_path / "d", FOUR, edges=[1] * 4, seed=9))], weights=[1, 1])
    with pytest.warns(UserWarning, match="for lack of edge_map"):
        assert len(both.loader(batch_size=1)) >= 7


def test_weights_count_the_samples_that_have_the_requested_fields(tmp_path):
    lacking = open_cache(images(tmp_path / "c", FOUR, edges=[5, None, 2, 9]))
    second, third = (
        opened(images(tmp_path / name, FOUR, edges=[1] * 4, names=[f"{name}{n}" for n in range(4)])) for name in "xy"
    )
    both = combine([combine([second, lacking]), third], weights=[1, 1], samples=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some lack a field
        for fields, held in ((["latents"], 8), (None, 7)):
            counts = Counter(names(both.loader(batch_size=1, fields=fields)))
            of_both = {name: count for name, count in counts.items() if name[0] != "y"}
            assert (sum(of_both.values()), len(of_both)) == (8, held)


def test_combined_without_weights_serves_every_sample_once(four, many):
    both = combine([many, open_cache(four)])
    assert len(both) == 21
    assert sorted(names(both.loader(batch_size=1))) == sorted(
        names(many.loader(batch_size=1)) + names(open_cache(four).loader(batch_size=1))
    )
    (stored,) = (batch for batch in open_cache(four).loader(batch_size=1) if batch["names"] == ["b.png"])
    (combined,) = (batch for batch in both.loader(batch_size=1) if batch["names"] == ["b.png"])
    assert torch.equal(combined["latents"], stored["latents"])
    assert combined["captions"] == ["caption of b.png"]


def test_weights_are_exact_and_sources_are_known_by_name(tmp_path):
    caches = []
    for name, count in (("many", 17), ("few.latentcache", 4)):
        image_names = [f"{name}{number}" for number in range(count)]
        caches.append(open_cache(images(tmp_path / name, [(64, 64)] * count, seed=count, names=image_names)))
    many, few = caches
    mixed = combine([many, few], weights=[2, 1], samples=30)
    assert [(part.name, part.samples) for part in mixed.plan(batch_size=1).sources] == [("many", 20), ("few", 10)]
    loader = mixed.loader(batch_size=3)
    for epoch in range(2):
        loader.set_epoch(epoch)
        assert sum(name.startswith("few") for name in names(loader)) == 10
    for call in (lambda: mixed.split(0.5), lambda: mixed.repeated(2), lambda: combine([mixed, many])):
        with pytest.raises(UsageError, match="weights"):
            call()


def test_mismatched_caches_are_named(four, tmp_path):
    cache = open_cache(four)
    with pytest.raises(UsageError, match="were made differently") as caught:
        combine([cache, open_cache(images(tmp_path / "other", FOUR, dtype="float32"))])
    assert "float32" in caught.value.why
    with pytest.raises(UsageError, match="were made differently") as caught:
        combine([cache, open_cache(images(tmp_path / "scaled", FOUR, kind="scale-shift", scale=0.5))])
    assert "encoder.normalization.scale: 1.0 and 0.5" in caught.value.why
    with pytest.raises(UsageError, match="has the fields latents, edge_map"):
        combine([cache, open_cache(images(tmp_path / "edges", FOUR, edges=[1] * 4))])
    with pytest.raises(UsageError, match="read"):
        combine([cache, cache.read(scaled=False)])
    for bad in ([], [cache, 3], 5, [cache, open_cache(documents(tmp_path / "t", texts(3))).rows(pad=64)]):
        with pytest.raises(UsageError):
            combine(bad)
    with pytest.raises(UsageError, match="samples=3: only allowed with weights"):
        combine([cache, cache], samples=3)


def test_several_resolutions_are_several_samples(tmp_path):
    cache = open_cache(images(tmp_path / "c", [(64, 64), (64, 96)], resolutions=2))
    assert len(cache) == 4
    assert cache.buckets == {"128x192": 1, "128x128": 1, "64x96": 1, "64x64": 1}
    for batch in cache.loader(batch_size=1):
        assert [8 * side for side in batch["latents"].shape[2:]] == batch["target_size"][0].tolist()


def test_each_size_that_lacks_a_field_is_counted(tmp_path):
    cache = open_cache(images(tmp_path / "c", [(64, 64), (64, 96)], resolutions=2, edges=[3, None]))
    assert (len(cache), cache.excluded, len(cache.loader(batch_size=1, fields=["latents"]))) == (2, 2, 4)


def test_missing_and_incomplete_caches(four, tmp_path, monkeypatch):
    with pytest.raises(CacheNotFoundError):
        open_cache(tmp_path / "nothing")
    with pytest.raises(UsageError, match="checksum='never'"):
        open_cache(four, checksum="never")
    monkeypatch.setattr(
        "latentcache.loader.cache.open_leased", lambda *arguments: replace(open_leased(*arguments), complete=False)
    )
    with pytest.raises(CacheIncompleteError, match="entries are missing") as caught:
        open_cache(four)
    assert "latentcache build" in caught.value.fix
    assert len(open_cache(four, allow_partial=True)) == 4


def test_demo_caches_and_parts_are_reported(four, tmp_path, monkeypatch):
    def of_a_part(*arguments):
        snapshot = open_leased(*arguments)
        return replace(snapshot, demo=True, source={**snapshot.source, "part": "1/4"})

    monkeypatch.setattr("latentcache.loader.cache.open_leased", of_a_part)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        open_cache(four)
    assert ["demo encoder" in str(warning.message) for warning in caught] == [True, False]
    assert "part 1/4" in str(caught[1].message)


@pytest.mark.parametrize("checksum", ["first", "always"])
def test_checksums_are_checked_first_or_always(four, checksum):
    cache = open_cache(four, checksum=checksum)
    loader = cache.loader(batch_size=1, prefetch=0)
    list(loader)
    name = damage_payload(four)
    if checksum == "first":
        list(loader)
        loader = open_cache(four).loader(batch_size=1, prefetch=0)
    with pytest.raises(CorruptEntryError) as caught:
        list(loader)
    assert caught.value.sample == name
    assert "payload checksum" in caught.value.why
    assert "data.mdb" in caught.value.where
    assert caught.value.fix


def test_fields_are_checked_by_name(four, tmp_path):
    cache = open_cache(four)
    assert set(next(iter(cache.loader(batch_size=1, fields=["latents"])))) == {"latents", "names"}
    assert set(next(iter(cache.loader(batch_size=1, fields=("captions", "keys", "latents", "meta"))))) == {
        "latents", "names", "captions", "keys", "meta"
    }  # fmt: skip
    with pytest.raises(UsageError, match="fields: 'latent' is unknown") as caught:
        cache.loader(batch_size=1, fields=["latent"])
    assert "latents" in caught.value.fix
    for bad in ({"fields": ["input_ids"]}, {}):
        with pytest.raises(UsageError, match="documents") as caught:
            open_cache(documents(tmp_path / "t", texts(3))).loader(batch_size=1, **bad)
        assert "rows(pack=" in caught.value.fix
        (tmp_path / "t").rename(tmp_path / f"t{len(bad)}")


def test_documents_for_exports(tmp_path):
    ids, spans = chats(20)
    cache = open_cache(documents(tmp_path / "t", ids, spans))
    stored, held = cache.documents(), cache.split(0.5)[1].documents()
    assert (cache.tokens, cache.buckets) == (sum(map(len, ids)), {})
    assert [stored.read(number).tolist() for number in range(20)] == ids
    assert (len(stored), stored.tokens, stored.where(3)) == (20, sum(map(len, ids)), "data.jsonl:4")
    assert [stored.lengths[int(held.where(row)[11:]) - 1] for row in range(len(held))] == held.lengths.tolist()
    with pytest.raises(UsageError, match="no field holds documents"):
        open_cache(images(tmp_path / "i", FOUR)).documents()
    assert isinstance(cache, Cache)
