import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from small_tokens import build, opened, tamper, texts, write_texts

from latentcache.encoders.stub_tokeniser import StubTokeniser, stub_description
from latentcache.errors import CacheFormatError
from latentcache.sources.corpus import scan_records
from latentcache.store.index import load_index
from latentcache.store.layout import CacheLayout
from latentcache.token_recipe import TokenRecipe, short
from latentcache.verify.selection import Depth, Selection
from latentcache.verify.token_repair import repair_tokens
from latentcache.verify.token_run import AskedTokens, asked_differences, recipe_sides, verify_tokens


def opened_records(data, options):
    return scan_records(data)


def looked(cache, **more):
    return verify_tokens(cache, open_records=opened_records, **more)


def again(records):
    return [(one.ids, one.runs) for one in StubTokeniser(stub_description()).tokenise(records)]


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "both").mkdir()
    build(write_texts(tmp_path / "both" / "a.jsonl", ["one", "two"]), tmp_path / "both" / "cache")
    return tmp_path / "both" / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two files of 200 documents, in nine blocks."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "data").mkdir()
    for seed, name in enumerate(("a.jsonl", "b.jsonl")):
        write_texts(folder / "data" / name, [f"{name} {one}" for one in texts(200, longest=4000, seed=seed)])
    for path in (folder / "data").iterdir():
        os.utime(path, (1, 1))
    build(folder / "data", folder / "cache")
    assert len(opened(folder / "cache")[0].blocks) == 9
    return folder


@pytest.fixture
def many_blocks(made, tmp_path):
    shutil.copytree(made / "cache", tmp_path / "cache")
    return tmp_path / "cache"


def test_what_is_read_is_counted(cache):
    fast, full = looked(cache), looked(cache, full=True)
    assert (fast.checked["payloads"], full.checked["payloads"], full.checked["records"]) == (0, 1, 2)
    assert full.exit_code() == 0


def test_a_recipe_that_differs(cache):
    recipe = opened(cache)[0].recipe
    other = TokenRecipe.from_json(recipe.as_json() | {"chat_template": "9b17" * 8, "loss": "assistant"})
    report = looked(cache, requested=other)
    assert report.counts["stale"] == 2
    found = report.findings[0]
    assert (found.reason, found.expected) == ("recipe:chat_template", "chat_template 9b179b17, loss assistant")
    assert found.found == "chat_template none, loss all"
    assert [name for name, *_ in report.recipe_diff] == ["chat_template", "loss"]
    assert looked(cache, requested=lambda generation: other).counts["stale"] == 2
    assert recipe_sides([]) == asked_differences(opened(cache)[0], None) == []
    assert recipe_sides([("loss", "all", "assistant")]) == [
        ("recipe:loss", {"expected": "assistant", "found": "all"})
    ]
    assert (short("a"), short(True), short(""), short("ab" * 16)) == ("a", "True", "none", "abababab")


@pytest.mark.parametrize("made", [None, {}, {"parts": None}, {"parts": {}}, {"parts": ["x"]}])
def test_a_manifest_without_parts_names_the_tokenizer(cache, made):
    generation = opened(cache)[0]
    generation = replace(generation, manifest={**generation.manifest, "provenance": made})
    asked = AskedTokens(recipe=replace(generation.recipe, tokenizer="9b17" * 8), parts={"vocab": "9b17" * 8})
    assert [name for name, *_ in asked_differences(generation, asked)] == ["tokenizer"]


def test_a_cache_of_pictures_is_none_of_tokens(tmp_path):
    vectors = Path(__file__).parents[2] / "docs" / "format" / "vectors" / "cache"
    shutil.copytree(vectors, tmp_path / "cache")
    with pytest.raises(CacheFormatError, match="pictures"):
        looked(tmp_path / "cache")


# Parts


def test_a_number_of_documents_is_drawn_and_says_what_follows(made):
    report = looked(made / "cache", depth=Depth(selection=Selection(number=20, seed=1)))
    assert (report.mode, report.counts["ok"], report.not_looked_at, report.exit_code()) == ("sample", 20, 380, 0)
    assert report.confidence == "20 clean: 95 % sure that less than 14 % are wrong"
    assert report.checked["samples"] == 20
    share = looked(made / "cache", depth=Depth(selection=Selection(share=0.1, seed=1)))
    assert (share.counts["ok"], share.not_looked_at) == (40, 360)


def test_slices_read_each_block_once_and_together_find_everything(many_blocks, made):
    tamper(many_blocks, block=2)
    inside = int((opened(many_blocks)[0].documents.block == 2).sum())
    slices = [Depth(selection=Selection(slice_number=n, slices=3), isolate=n == 1) for n in (1, 2, 3)]
    reports = [looked(many_blocks, depth=depth) for depth in slices]
    assert sum(report.checked["payloads"] for report in reports) == 9
    assert sum(report.counts["corrupt"] for report in reports) == inside
    assert sum(report.counts["ok"] for report in reports) == 400 - inside
    assert sum(report.not_looked_at for report in reports) == 2 * 400
    assert all(
        bool(report.confidence) == (report.exit_code() == 0) for report in reports if report.checked["samples"]
    )
    clean = [report.confidence for report in reports if report.confidence]
    assert clean
    assert all(one.endswith("% of the blocks are wrong") for one in clean)


def test_a_slice_opens_the_files_of_its_documents_alone(made, monkeypatch):
    """Where the file system proves that no other file can hold a record that moved."""
    generation = opened(made / "cache")[0]
    monkeypatch.setattr("latentcache.identity.stat.RACY_NS", 0)  # every file can be trusted at once
    seen = []
    for number in range(1, 10):
        depth = Depth(selection=Selection(slice_number=number, slices=9), isolate=False)
        report = looked(made / "cache", depth=depth)
        chosen = report.checked["samples"]
        seen.append(report.checked["records"])
        assert report.counts["ok"] == chosen
        assert report.checked["records"] in (0, 200, 400)
    assert 200 in seen
    assert len(generation.documents.sources) == 2


def test_what_changed_outside_the_sample_is_no_finding(tmp_path):
    lines = [f"{number} {'x' * 300}" for number in range(60)]
    data = write_texts(tmp_path / "a.jsonl", lines)
    build(data, tmp_path / "cache")
    write_texts(data, ["changed", *lines[1:], "new"])
    depths = [Depth(selection=Selection(number=59, seed=seed)) for seed in range(200)]
    with_it = next(depth for depth in depths if depth.selection.choose((), 60)[0])
    without = next(depth for depth in depths if not depth.selection.choose((), 60)[0])
    found = [looked(tmp_path / "cache", depth=depth).counts for depth in (with_it, without)]
    assert [(one["stale"], one["missing"], one["touched"] + one["ok"]) for one in found] == [(1, 1, 58), (0, 1, 59)]


# Time


@pytest.mark.parametrize("full", [False, True])
def test_time_that_was_over_looked_at_nothing(many_blocks, made, full):
    for path in (made / "data").iterdir():
        os.utime(path, (2, 2))  # so that the fast form has to read records
    report = looked(many_blocks, depth=Depth(full=full, max_duration_s=0.0))
    assert (report.counts["ok"], report.not_looked_at, report.exit_code()) == (0, 400, 0)
    assert (report.checked["payloads"], report.checked["records"], report.confidence) == (0, 0, "")


def test_time_that_suffices_says_so(made):
    report = looked(made / "cache", depth=Depth(full=True, max_duration_s=600.0))
    assert (report.not_looked_at, report.confidence) == (0, "400 clean: that is all of them")


def test_time_that_is_over_on_the_way_says_what_was_looked_at(made, monkeypatch):
    """After 30 questions of the clock: some records were met, and no more is claimed than that."""
    asked = iter(range(30))
    monkeypatch.setattr(
        "latentcache.verify.selection.Deadline.over", property(lambda deadline: next(asked, None) is None)
    )
    report = looked(made / "cache", depth=Depth(full=True, max_duration_s=600.0, isolate=False))
    looked_at = report.checked["samples"]
    assert 0 < report.checked["records"] < 400
    assert report.counts["ok"] + report.counts["touched"] == looked_at < 400
    assert (report.not_looked_at, report.exit_code(), report.confidence) == (400 - looked_at, 0, "")


def test_changes_that_were_met_in_time_are_findings(tmp_path, monkeypatch):
    lines = [f"{number} {'x' * 300}" for number in range(60)]
    data = write_texts(tmp_path / "a.jsonl", [*lines, ("bad",)])
    build(data, tmp_path / "cache")
    write_texts(data, ["changed", *lines[1:], ("bad",)])
    asked = iter(range(20))
    monkeypatch.setattr(
        "latentcache.verify.selection.Deadline.over", property(lambda deadline: next(asked, None) is None)
    )
    report = looked(tmp_path / "cache", depth=Depth(max_duration_s=600.0))
    assert (report.counts["stale"], report.counts["ok"], report.counts["missing"]) == (1, 19, 0)
    assert (report.not_looked_at, report.counts["quarantined"]) == (40, 1)


# Tokenising again


def test_tokenising_again_survives_damage_that_it_meets(many_blocks):
    """The fast form reads no payload, so it is the comparison that comes upon it."""
    tamper(many_blocks, block=0)
    inside = int((opened(many_blocks)[0].documents.block == 0).sum())
    report = looked(many_blocks, depth=Depth(reencode=400), retokenise=again)
    assert (report.counts["corrupt"], report.counts["drift"], report.exit_code()) == (inside, 0, 1)
    assert report.checked["reencoded"] == 400 - inside
    report = looked(many_blocks, depth=Depth(full=True, reencode=400, max_duration_s=0.0), retokenise=again)
    assert report.checked["reencoded"] == 0


# Entries that nobody needs


def test_a_damaged_block_that_no_document_needs(tmp_path):
    lines = texts(300, longest=4000)
    data = write_texts(tmp_path / "a.jsonl", lines)
    cache = tmp_path / "cache"
    build(data, cache)
    write_texts(data, lines[-20:])
    build(data, cache)
    (orphan, *others) = [one.key for one in looked(cache, full=True).findings if one.category == "orphan"]
    index = load_index(CacheLayout(cache).sealed_shards()[0])
    row = next(row for row in index.rows if row["key"].tobytes().hex() == orphan)
    with index.data.open("r+b") as file:
        file.seek(int(row["offset"]) + 300)
        file.write(b"oops")
    report = looked(cache, full=True)
    (finding,) = [one for one in report.findings if one.category == "corrupt"]
    assert (finding.reason, finding.key, finding.path, finding.field) == ("unused", orphan, "", "input_ids")
    assert [report.counts[name] for name in ("corrupt", "orphan", "ok")] == [1, len(others), 20]
    assert (report.exit_code(), report.unused_corrupt, looked(cache).exit_code()) == (1, 1, 0)
    done = repair_tokens(cache, confirm=lambda plan: True, open_records=opened_records)
    assert (done.done, done.complete, done.removals) == (True, True, ())
    after = looked(cache, full=True)
    assert (after.exit_code(), after.counts["ok"], after.counts["orphan"]) == (0, 20, len(others))
    write_texts(data, lines)
    build(data, cache)
    assert looked(cache, full=True).counts["ok"] == 300


def test_pages_that_are_damaged_are_one_finding(many_blocks):
    """Index and payloads are whole, so a loader serves every document; the engine would not find its way."""
    (folder,) = CacheLayout(many_blocks).sealed_shards()
    data, index = folder / "data.mdb", load_index(folder)
    raw = bytearray(data.read_bytes())
    place = raw.rindex(np.asarray(index.rows["key"][0]).tobytes())
    raw[place] ^= 1
    data.chmod(0o644)
    data.write_bytes(raw)
    report = looked(many_blocks, full=True)
    found = {(one.category, one.reason) for one in report.findings if one.category != "touched"}
    assert found == {("corrupt", "pages")}
    assert (report.counts["corrupt"], report.exit_code()) == (1, 1)
    assert repair_tokens(many_blocks, confirm=lambda plan: True, open_records=opened_records).complete
    assert looked(many_blocks, full=True).exit_code() == 0
