from dataclasses import replace

import numpy as np
import pytest
from small_builds import draw, folder_of, recipe_of, settings

from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.stat import StatMemo
from latentcache.pipeline import assemble as assemble_module
from latentcache.pipeline.assemble import assemble, refusal_json, unchanged
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.survey import Memory, survey
from latentcache.pipeline.work import Failed, Looked, RunResult, refuse
from latentcache.sources.resolve import scan
from latentcache.store.catalog import load_catalog
from latentcache.store.columns import StringColumn
from latentcache.store.generation import load_generation, unpack_memo
from latentcache.store.layout import CacheLayout

RECIPE = recipe_of()


class Bench:
    """A finished build, and everything that a second one would assemble from."""

    def __init__(self, data, monkeypatch):
        # Every file can be trusted at once.
        monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)
        self.data = data
        self.cache = build_cache(settings(data)).plan.cache
        self.generation = load_generation(self.cache)
        self.catalog = load_catalog(CacheLayout(self.cache))
        self.scan = scan(data)
        self.plan = survey(self.scan, RECIPE, self.catalog, Memory.of(self.generation, RECIPE), max_pixels=10**8)

    def draft(self, run=None, **changes):
        facts = {"scan": self.scan, "plan": self.plan, "catalog": self.catalog} | changes
        return assemble(facts["scan"], facts["plan"], run or RunResult(), RECIPE, facts["catalog"])

    def unchanged(self, draft, recipe=RECIPE, root=None):
        return unchanged(draft, recipe, self.generation, root or str(self.data.resolve()))


@pytest.fixture
def bench(tmp_path, monkeypatch):
    data = tmp_path / "data"
    for number in range(4):
        draw(data / f"{number}.png", number, height=(64, 128)[number % 2], width=64)
        (data / f"{number}.txt").write_text(f"caption {number}")
    (data / "bad.png").write_bytes(b"<html>")
    return Bench(data, monkeypatch)


def test_the_same_data_give_the_same_generation(bench):
    draft = bench.draft()
    assert bench.unchanged(draft)
    assert list(draft.samples.names) == ["0.png", "1.png", "2.png", "3.png"]
    assert list(draft.samples.captions) == [f"caption {number}" for number in range(4)]
    assert draft.samples.original_size.tolist() == [[64, 64], [128, 64]] * 2
    assert [item.cause for item in draft.refused] == ["html"]
    assert draft.keys == {key.tobytes() for key in draft.rows.key}


def test_placements_are_those_of_the_entries_as_they_were_stored(bench):
    draft = bench.draft()
    for row, key in enumerate(draft.rows.key):
        located = bench.catalog.locate(key.tobytes())
        placement = located.facts.placement
        assert draft.buckets[draft.rows.bucket[row]] == placement.bucket
        assert draft.rows.crop[row].tolist() == [placement.crop.top, placement.crop.left]
        assert draft.rows.resize[row].tolist() == [placement.resize.height, placement.resize.width]
        assert draft.rows.offset[row] == located.offset
        assert draft.shards[draft.rows.shard[row]] == located.shard
        assert draft.rows.pixel_hash[row].tobytes() == located.facts.pixel_hash


def test_a_sample_without_its_entry_is_refused_and_not_half_there(bench):
    known = bench.plan.known[0]
    stranger = replace(known, content=b"x" * 16)
    draft = bench.draft(plan=replace(bench.plan, known=(stranger, *bench.plan.known[1:])))
    assert known.sample.name not in list(draft.samples.names)
    assert {item.name: item.cause for item in draft.refused} == {known.sample.name: "entry-lost", "bad.png": "html"}


@pytest.mark.parametrize("how", ["unencodable", "failed"])
def test_every_copy_of_a_content_that_failed_has_its_cause(bench, how):
    content, memo = b"x" * 16, bench.scan.samples[0].stat
    run = RunResult()
    for index in (0, 1):
        run.looked[index] = Looked(index=index, content=content, memo=memo, size=Size(64, 64))
    if how == "unencodable":
        run.unencodable[content] = ("non-finite", "NaN")
    else:
        other = refuse(bench.scan.samples[2], "truncated", "cut", stat=memo, content=content)
        run.failed.append(Failed(index=2, refusal=other))
    draft = bench.draft(run)
    cause = "non-finite" if how == "unencodable" else "truncated"
    assert {item.name: item.cause for item in draft.refused}["0.png"] == cause
    assert {item.name: item.cause for item in draft.refused}["1.png"] == cause
    assert all(item.content == content for item in draft.refused if item.name in ("0.png", "1.png"))


def test_what_was_read_wins_over_what_was_remembered(bench):
    known = bench.plan.known[1]
    memo = replace(known.memo, mtime_ns=5)
    run = RunResult(looked={0: Looked(index=0, content=known.content, memo=memo, size=known.size)})
    draft = bench.draft(run)
    assert draft.samples.content[0].tobytes() == known.content
    assert unpack_memo(draft.samples.stat[0].tolist()) == memo


def test_refusals_are_in_the_byte_order_of_their_names(bench):
    names = ["é.png", "z.png", "a.png", "\udcff.png"]
    items = tuple(replace(bench.scan.refused[0], name=name) for name in names) if bench.scan.refused else ()
    items = items or tuple(refuse(replace(bench.scan.samples[0], name=name), "empty") for name in names)
    draft = bench.draft(scan=replace(bench.scan, refused=items))
    encoded = [item.name.encode("utf-8", "surrogateescape") for item in draft.refused]
    assert encoded == sorted(encoded)
    assert len(encoded) == 5


@pytest.mark.parametrize("change", ["recipe", "root", "caption", "refused", "note", "content", "stat"])
def test_whatever_changed_is_a_new_generation(bench, change):
    draft, options = bench.draft(), {}
    item = refuse(bench.scan.samples[0], "empty")
    if change == "recipe":
        options["recipe"] = recipe_of(resolutions=(64, 128))
    elif change == "root":
        options["root"] = "/elsewhere"
    elif change == "caption":
        captions = StringColumn.of(["another", *list(draft.samples.captions)[1:]])
        draft = replace(draft, samples=replace(draft.samples, captions=captions))
    elif change in ("refused", "note"):
        draft = replace(draft, **{{"refused": "refused", "note": "notes"}[change]: (item,)})
    else:
        column = getattr(draft.samples, change).copy()
        column[0, 0] += 1
        draft = replace(draft, samples=replace(draft.samples, **{change: column}))
    assert not bench.unchanged(draft, **options)


def test_hashing_a_file_again_says_nothing_new_unless_it_can_be_trusted_now(bench, monkeypatch):
    draft = bench.draft()
    stat = draft.samples.stat.copy()
    stat[:, 5] += 1000
    later = replace(draft, samples=replace(draft.samples, stat=stat))
    assert bench.unchanged(later)
    youngest = int(stat[:, 5].max() - np.minimum(stat[:, 1], stat[:, 2]).min())
    monkeypatch.setattr(assemble_module, "RACY_NS", youngest + 1)  # none of them can be trusted ...
    assert bench.unchanged(later)
    stat[0, 5] += 2 * youngest  # ... but this one
    assert not bench.unchanged(later)


def test_a_refusal_is_kept_with_everything_that_was_known(bench):
    memo = StatMemo(size=1, mtime_ns=-5, ctime_ns=3, inode=4, device=5, seen_ns=6)
    item = refuse(bench.scan.samples[0], "truncated", "cut short", stat=memo, content=content_hash(b"x"))
    kept = refusal_json(item)
    assert (kept["name"], kept["cause"], kept["detail"], kept["hint"]) == (
        item.name,
        "truncated",
        "cut short",
        item.hint,
    )
    assert unpack_memo(kept["stat"]) == memo
    assert bytes.fromhex(kept["content"]) == item.content
    assert refusal_json(refuse(bench.scan.samples[0], "empty"))["stat"] is None


def test_nothing_usable_is_a_generation_too(tmp_path, monkeypatch):
    data = folder_of(tmp_path / "data", 1)
    bench = Bench(data, monkeypatch)
    plan = replace(bench.plan, known=())
    draft = bench.draft(plan=plan)
    assert (len(draft.samples.names), draft.rows.key.shape, draft.rows.crop.shape) == (0, (0, 32), (0, 2))
