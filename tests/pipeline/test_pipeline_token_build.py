import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from small_tokens import build, flip, opened, spoken, tamper, texts, write_texts
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from latentcache.errors import (
    CacheFormatError,
    CacheLockedError,
    DiskFullError,
    EmptySourceError,
    SourceNotFoundError,
    UsageError,
)
from latentcache.pipeline import token_checks
from latentcache.pipeline.token_making import make_documents
from latentcache.store.layout import CacheLayout
from latentcache.store.lock import builder_lock
from latentcache.store.token_generation import Blocks

LINES = texts(300, longest=4000)


@pytest.fixture
def old_files(monkeypatch):
    """Files count as written a while ago: their stats are believed."""
    monkeypatch.setattr("latentcache.sources.record_listing.RACY_NS", -(1 << 62))


def columns(cache):
    """What does not depend on who built it."""
    generation, _ = opened(cache)
    names = [name for name in Blocks.__dataclass_fields__ if name not in ("shard", "offset")]
    documents = {
        name: getattr(generation.documents, name).tolist()
        for name in ("content", "block", "start", "length", "spans")
    }
    return {name: getattr(generation.blocks, name).tolist() for name in names} | documents


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "a.jsonl", LINES)


@pytest.fixture(scope="module")
def reference(data):
    build(data, data.parent / "reference")
    return data.parent / "reference"


def test_every_record_is_a_document_in_its_order(reference):
    generation, reader = opened(reference)
    assert spoken(reader) == LINES
    assert len(generation.blocks) >= 3
    assert generation.complete
    assert generation.manifest["tokens"]["documents"] == 300
    assert generation.documents.where(299) == "a.jsonl:300"


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_and_order_do_not_depend_on_the_workers(data, reference, tmp_path, workers):
    report = build(data, tmp_path / "cache", workers=workers)
    assert report.encoded == 300
    assert columns(tmp_path / "cache") == columns(reference)


def test_a_second_build_does_nothing_and_a_touched_file_encodes_nothing(tmp_path, old_files):
    data = write_texts(tmp_path / "a.jsonl", LINES[:20])
    assert build(data, tmp_path / "cache").published
    report = build(data, tmp_path / "cache")
    assert (report.encoded, report.cached, report.published, report.generation) == (0, 20, False, 1)
    os.utime(data)
    report = build(data, tmp_path / "cache")
    assert (report.encoded, report.cached) == (0, 20)


def test_a_build_that_stands_still_reads_no_record(tmp_path, monkeypatch, old_files):
    data = write_texts(tmp_path / "a.jsonl", LINES[:20])
    build(data, tmp_path / "cache")
    monkeypatch.setattr("latentcache.pipeline.token_build.open_records", lambda settings: pytest.fail("it was read"))
    assert build(data, tmp_path / "cache").cached == 20


def test_only_what_is_new_is_tokenised_and_old_blocks_stay(data, reference, tmp_path):
    cache = shutil.copytree(reference, tmp_path / "cache")
    changed = [*LINES[:150], "something new", *LINES[151:], "and this"]
    own = write_texts(tmp_path / "a.jsonl", changed)
    before = opened(cache)[0].blocks.key.tolist()
    report = build(own, cache)
    generation, reader = opened(cache)
    assert (report.encoded, report.cached) == (2, 299)
    assert spoken(reader) == changed
    assert [key for key in generation.blocks.key.tolist() if key in before] == before
    assert len(generation.blocks) == len(before) + 1
    # Back again: nothing is lost that was ever made.
    report = build(write_texts(tmp_path / "a.jsonl", LINES), cache)
    assert (report.encoded, spoken(opened(cache)[1])) == (0, LINES)


def test_a_record_that_stands_twice_is_tokenised_once(tmp_path):
    report = build(write_texts(tmp_path / "a.jsonl", ["one", "two", "one"]), tmp_path / "cache")
    assert (report.encoded, report.plan.samples) == (2, 3)
    generation, reader = opened(tmp_path / "cache")
    assert spoken(reader) == ["one", "two", "one"]
    assert generation.blocks.tokens.tolist() == [8]


def test_bad_lines_are_named_and_the_rest_is_built(tmp_path):
    lines = ["one", ("{broken",), ('{"text": 5}',), "two"]
    report = build(write_texts(tmp_path / "a.jsonl", lines), tmp_path / "cache")
    assert (report.encoded, report.plan.samples) == (2, 4)
    assert [(one.name, one.line) for one in report.refused] == [("a.jsonl", 2), ("a.jsonl", 3)]
    assert opened(tmp_path / "cache")[0].documents.line.tolist() == [1, 4]


def test_what_the_tokenizer_makes_nothing_of_is_refused_once(tmp_path):
    chats = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]]
    data = tmp_path / "a.jsonl"
    data.write_text("".join(json.dumps({"messages": one}) + "\n" for one in chats))
    report = build(data, tmp_path / "chat")
    assert (report.encoded, report.accounts["trainable"]) == (1, 2)
    assert opened(tmp_path / "chat")[0].recipe.loss == "assistant"


def test_what_was_not_said_follows_the_cache(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    build(data, tmp_path / "cache", add_eos=False, add_bos=True)
    report = build(data, tmp_path / "cache", tokenizer=None)
    assert (report.encoded, report.plan.recipe.add_bos, report.plan.recipe.add_eos) == (0, True, False)
    assert build(data, tmp_path / "cache", add_eos=True).encoded == 1
    with pytest.raises(UsageError, match="no tokenizer"):
        build(data, tmp_path / "other", tokenizer=None)
    assert not (tmp_path / "other").exists()


def test_refusals_before_any_work(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    with pytest.raises(SourceNotFoundError):
        build(tmp_path / "none.jsonl", tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptySourceError):
        build(tmp_path / "empty", tmp_path / "cache")
    with pytest.raises(UsageError):
        build(tmp_path, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    (tmp_path / "cache").mkdir()
    with builder_lock(CacheLayout(tmp_path / "cache").lock), pytest.raises(CacheLockedError):
        build(data, tmp_path / "cache")


def test_no_room(tmp_path, monkeypatch):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    monkeypatch.setattr(token_checks, "RESERVE_BYTES", 1 << 60)
    with pytest.raises(DiskFullError):
        build(data, tmp_path / "cache")


def test_a_dry_run_writes_nothing(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one", "two"])
    report = build(data, tmp_path / "cache", dry_run=True)
    assert (report.plan.todo, report.encoded) == (2, 0)
    assert not (tmp_path / "cache").exists()


def test_a_cache_of_pictures_is_left_alone(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    pictures = Path(__file__).parents[2] / "docs" / "format" / "vectors" / "cache"
    shutil.copytree(pictures, tmp_path / "cache")
    with pytest.raises(CacheFormatError, match="pictures"):
        build(data, tmp_path / "cache")


KILLED = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from latentcache.pipeline import token_pool
from small_tokens import build
token_pool.UNIT_RECORDS = 10
build(Path(sys.argv[3]), Path(sys.argv[4]), commit_every=1, events=Path(sys.argv[5]), tokenizer="stub:delay_ms=5")
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_build_that_is_ended_goes_on_and_makes_the_same_blocks(data, reference, tmp_path, number):
    tests, events, cache = Path(__file__).parents[1], tmp_path / "events", tmp_path / "cache"
    words = [sys.executable, "-c", KILLED, str(tests), str(tests.parent), str(data), str(cache), str(events)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as child:
        while not events.exists() or not events.read_bytes():
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(number)
    acknowledged = [key for line in events.read_text().splitlines() for key in json.loads(line)["keys"]]
    assert acknowledged
    report = build(data, cache, events=events)
    assert 0 < report.encoded < 300
    assert columns(cache) == columns(reference)
    keys = [key for line in events.read_text().splitlines() for key in json.loads(line)["keys"]]
    assert len(keys) == len(set(keys))
    assert set(acknowledged) <= {key.tobytes().hex() for key in opened(cache)[0].blocks.key}


def test_damage_to_a_shard_or_a_manifest_is_made_good(reference, data, tmp_path):
    cache = shutil.copytree(reference, tmp_path / "cache")
    generation, _ = opened(cache)
    shard = cache / "shards" / generation.shards[0]
    flip(shard / "index.npy", -1)
    assert build(data, cache).encoded == 0  # every block was whole, and was saved
    assert columns(cache) == columns(reference)
    flip(cache / "generations" / "000001" / "manifest.json", 300)
    for path in (cache / "generations").glob("*/manifest.json"):
        path.write_bytes(b"x")
    assert build(data, cache).encoded == 0
    tamper(cache, block=0)
    for path in (cache / "generations").glob("*/manifest.json"):
        path.write_bytes(b"x")
    report = build(data, cache)
    assert 0 < report.encoded < 300
    assert columns(cache)["content"] == columns(reference)["content"]


def test_a_real_tokenizer_from_end_to_end(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES[:5], trainer)
    (tmp_path / "tok").mkdir()
    tokenizer.save(str(tmp_path / "tok" / "tokenizer.json"))
    (tmp_path / "tok" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    lines = [*LINES[:20], "a literal <|endoftext|> here"]
    data = write_texts(tmp_path / "a.jsonl", lines)
    one, two = (build(data, tmp_path / f"c{n}", tokenizer=str(tmp_path / "tok"), workers=n) for n in (0, 2))
    assert (one.encoded, two.encoded, one.accounts["control_strings"]) == (21, 21, 1)
    assert columns(tmp_path / "c0") == columns(tmp_path / "c2")
    generation, reader = opened(tmp_path / "c0")
    end = tokenizer.token_to_id("<|endoftext|>")
    for number in range(20):
        ids = reader.ids(number).tolist()
        assert ids == [*tokenizer.encode(lines[number]).ids, end]
    assert np.count_nonzero(reader.ids(20) == end) == 1
    assert generation.manifest["provenance"]["parts"]["vocab"]


def test_a_token_costs_little_more_than_its_two_bytes(tmp_path):
    """Documents of about 1050 tokens; all files as long as they are, without the ends of file system blocks."""
    draw = random.Random(0)
    lines = [f"{number}: {'x' * draw.randint(900, 1200)}" for number in range(600)]
    build(write_texts(tmp_path / "a.jsonl", lines), tmp_path / "cache")
    tokens = opened(tmp_path / "cache")[0].manifest["tokens"]["tokens"]
    assert tokens > 600_000
    size = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert size / tokens < 2.2


def test_a_file_that_changes_after_the_survey_is_built_as_it_was_and_seen_by_the_next_build(tmp_path, monkeypatch):
    """Its records are kept, so nothing reads it again; its stat is of what was read, so the change is not missed."""
    data = write_texts(tmp_path / "a.jsonl", ["one", "two"])

    def make(doing, plan, run):
        assert list(doing.survey.kept) == ["a.jsonl"]
        write_texts(data, ["one", "other", "new"])
        return make_documents(doing, plan, run)

    with monkeypatch.context() as patch:
        patch.setattr("latentcache.pipeline.token_build.make_documents", make)
        build(data, tmp_path / "cache")
    assert spoken(opened(tmp_path / "cache")[1]) == ["one", "two"]
    report = build(data, tmp_path / "cache")
    assert (report.encoded, report.cached) == (2, 1)
    assert spoken(opened(tmp_path / "cache")[1]) == ["one", "other", "new"]


def test_a_file_of_two_data_sets_is_two_sources(tmp_path):
    """The second has a record more that is new; reading it again meets the records of the first as well."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = [{"text": "one", "other": "eins"}, {"text": "two", "other": "zwei"}, {"text": "three", "other": "drei"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = ({"prompt": name} for name in ("text", "other"))
    entries = {f"d{n}": {"file_name": "a.jsonl", "columns": one} for n, one in enumerate(columns)}
    (folder / "dataset_info.json").write_text(json.dumps(entries))
    build(folder, tmp_path / "first", datasets=("d0",))
    build(folder, tmp_path / "cache")
    generation, reader = opened(tmp_path / "cache")
    assert spoken(reader) == ["one", "two", "three", "eins", "zwei", "drei"]
    assert generation.documents.source.tolist() == [0, 0, 0, 1, 1, 1]
    assert generation.documents.sources == ("a.jsonl", "a.jsonl")
    assert generation.documents.line.tolist() == [1, 2, 3, 1, 2, 3]
    assert generation.manifest["tokens"]["tokens_by_source"] == [4 + 4 + 6, 5 + 5 + 5]
    report = build(folder, tmp_path / "taken", take_from=(tmp_path / "first",))
    assert (report.taken, report.encoded) == (3, 3)
    assert columns_of_sources(tmp_path / "taken") == columns_of_sources(tmp_path / "cache")
    (folder / "a.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines[:2], {**lines[2], "other": "x"}])
    )
    report = build(folder, tmp_path / "cache")
    assert report.encoded == 1
    assert spoken(opened(tmp_path / "cache")[1])[-1] == "x"


def columns_of_sources(cache):
    documents = opened(cache)[0].documents
    return documents.source.tolist(), documents.line.tolist(), documents.sources
