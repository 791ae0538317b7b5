"""Shares of one data set, made apart and put together: the whole is what one build would have made."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import byte_level, save
from small_tokens import build, opened, spoken, tamper, texts, write_texts

from latentcache.errors import CacheDamagedError, CacheFormatError, CacheNotFoundError, StaleCacheError, UsageError
from latentcache.pipeline.token_taking import in_order
from latentcache.store.layout import CacheLayout
from latentcache.store.pins import holders
from latentcache.store.token_generation import Blocks

LINES = [*texts(300, longest=4000), "twice", "twice", ("{broken",)]
OF = 3


def facts(cache):
    """All that does not depend on which process wrote it where: every block by its bytes, every column but places."""
    generation, reader = opened(cache)
    blocks, documents = generation.blocks, generation.documents
    values = [reader.check(number).ids.tobytes() for number in range(len(blocks))]
    own = {
        name: getattr(blocks, name).tolist()
        for name in Blocks.__dataclass_fields__
        if name not in ("shard", "offset")
    }
    names = ("content", "block", "start", "length", "span_ends", "spans", "source", "line")
    columns = {name: getattr(documents, name).tolist() for name in names}
    told = {name: generation.manifest[name] for name in ("fingerprint", "tokens")}
    return values, own, columns, generation.control.tolist(), generation.refused, documents.sources, told


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("data") / "a.jsonl", LINES)


@pytest.fixture(scope="module")
def reference(data):
    build(data, data.parent / "reference", allow_failed="1")
    return data.parent / "reference"


@pytest.fixture(scope="module")
def parts(data):
    """Three shares, by command lines of their own as three nodes would."""
    made = [data.parent / f"part{number}" for number in range(OF)]
    for number, part in enumerate(made):
        run(data, part, "--shard", f"{number}/{OF}", "--tokenizer", "stub", "--allow-failed", "1")
    return made


def run(*words, talk=False):
    """A build in a process of its own; gives its JSON, and what it said beside it where asked."""
    command = [sys.executable, "-m", "latentcache", "build", str(words[0]), "--out", str(words[1]), "--json"]
    done = subprocess.run([*command, *map(str, words[2:])], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    return (said, done.stderr.decode()) if talk else said


def taken(data, cache, parts, **more):
    return build(data, cache, allow_failed="1", take_from=tuple(parts), **more)


def test_shares_are_disjoint_complete_and_even(parts, reference):
    held = [set(map(bytes, opened(part)[0].documents.content)) for part in parts]
    assert set.union(*held) == set(map(bytes, opened(reference)[0].documents.content))
    assert sum(map(len, held)) == 301  # the two equal records are in one share, and there is no other overlap
    assert all(75 < len(one) < 125 for one in held)


def test_three_shares_make_the_cache_that_one_build_makes(data, parts, reference, tmp_path):
    before = {path: path.read_bytes() for part in parts for path in part.rglob("*") if path.is_file()}
    words = [word for part in parts for word in ("--take-from", part)]
    said = run(data, tmp_path / "whole", *words, "--tokenizer", "stub", "--allow-failed", "1")
    assert said["counts"] == {"samples": 303, "encoded": 0, "cached": 0, "quarantined": 1}
    assert (said["taken"], said["share"]) == (301, "")
    assert said["plan"]["documents_to_take"] == 301
    assert facts(tmp_path / "whole") == facts(reference)
    assert opened(tmp_path / "whole")[0].share == ""
    assert {path: path.read_bytes() for path in before} == before
    again = taken(data, tmp_path / "whole", parts)
    assert (again.encoded, again.taken, again.cached, again.published) == (0, 0, 301, False)


def test_what_no_share_has_is_tokenised(data, parts, reference, tmp_path):
    report = taken(data, tmp_path / "whole", parts[:1] + parts[2:], workers=2)
    missing = len(set(map(bytes, opened(parts[1])[0].documents.content)))
    assert (report.encoded, report.taken) == (missing, 301 - missing)
    assert facts(tmp_path / "whole") == facts(reference)


def test_a_whole_cache_of_other_data_gives_what_it_has(data, reference, tmp_path):
    lines = ["first", *LINES[40:60], "last"]
    own = write_texts(tmp_path / "b.jsonl", lines)
    report = taken(own, tmp_path / "cache", [reference])
    assert (report.encoded, report.taken) == (2, 20)
    assert spoken(opened(tmp_path / "cache")[1]) == lines


def test_a_damaged_block_is_said_and_its_documents_are_tokenised_again(data, parts, reference, tmp_path):
    part = shutil.copytree(parts[1], tmp_path / "part")
    tamper(part)
    damaged = int((opened(part)[0].documents.block == 0).sum())

    words = [word for one in (parts[0], part, parts[2]) for word in ("--take-from", one)]
    said, talk = run(data, tmp_path / "whole", *words, "--tokenizer", "stub", "--allow-failed", "1", talk=True)
    assert (said["counts"]["encoded"], said["taken"]) == (damaged, 301 - damaged)
    assert f"{part}: 1 block damaged" in talk
    assert facts(tmp_path / "whole") == facts(reference)


def test_a_block_that_goes_bad_after_its_check_ends_the_build_and_the_next_one_tokenises_it(
    data, parts, reference, tmp_path, monkeypatch
):
    part = shutil.copytree(parts[1], tmp_path / "part")
    others = [parts[0], part, parts[2]]

    def make(doing, plan, running):
        tamper(part)
        return make_documents(doing, plan, running)

    from latentcache.pipeline.token_making import make_documents

    with monkeypatch.context() as patch:
        patch.setattr("latentcache.pipeline.token_build.make_documents", make)
        with pytest.raises(CacheDamagedError, match="cannot be read any more"):
            taken(data, tmp_path / "whole", others)
    assert taken(data, tmp_path / "whole", others).encoded > 0
    assert facts(tmp_path / "whole") == facts(reference)


def test_another_recipe_is_refused_with_its_fields(data, parts, tmp_path):
    with pytest.raises(StaleCacheError, match="another recipe") as caught:
        taken(data, tmp_path / "whole", parts, add_eos=False)
    assert [name for name, _, _ in caught.value.differences] == ["add_eos"]
    assert "add_eos" in caught.value.why
    assert not (tmp_path / "whole" / "CURRENT").exists()


def test_what_cannot_be_taken_from_is_refused_in_words(data, parts, tmp_path):
    with pytest.raises(CacheNotFoundError, match="nothing to take"):
        taken(data, tmp_path / "whole", [tmp_path / "nowhere"])
    with pytest.raises(UsageError, match="is the cache that is built"):
        taken(data, tmp_path / "whole", [tmp_path / "whole"])
    pictures = Path(__file__).parents[2] / "docs" / "format" / "vectors" / "cache"
    with pytest.raises(CacheFormatError, match="pictures"):
        taken(data, tmp_path / "whole", [pictures])


@pytest.mark.parametrize("asked", ["1/3", "0/4", "0/1"])
def test_a_folder_holds_one_share(data, parts, tmp_path, asked):
    part = shutil.copytree(parts[0], tmp_path / "part")
    with pytest.raises(UsageError, match="holds share 0/3") as caught:
        build(data, part, share=asked, allow_failed="1")
    assert "--out" in caught.value.fix
    report = build(data, part, allow_failed="1")  # what was not said follows the cache
    assert (report.plan.share, report.encoded) == ("0/3", 0)


def test_a_whole_cache_is_not_made_a_share(data, reference):
    with pytest.raises(UsageError, match="all records"):
        build(data, reference, share="0/3", allow_failed="1")
    assert build(data, reference, share="0/1", allow_failed="1").encoded == 0


KILLED = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[2]]
from pathlib import Path
from latentcache.pipeline import token_pool
from small_tokens import build
token_pool.UNIT_RECORDS = 10
more = {"take_from": tuple(map(Path, sys.argv[6:]))} if sys.argv[6:] else {"share": "1/3"}
more |= {"commit_every": 1, "events": Path(sys.argv[5]), "tokenizer": "stub:delay_ms=5"}
build(Path(sys.argv[3]), Path(sys.argv[4]), **more)
"""


def killed(data, cache, events, *parts):
    tests = Path(__file__).parents[1]
    words = [sys.executable, "-c", KILLED, tests, tests.parent, data, cache, events, *parts]
    with subprocess.Popen(list(map(str, words)), stderr=subprocess.DEVNULL) as child:
        while not events.exists() or not events.read_bytes():
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.SIGKILL)


def test_a_share_that_is_killed_goes_on_and_gives_what_it_has_meanwhile(data, parts, reference, tmp_path):
    part = tmp_path / "part"
    killed(data, part, tmp_path / "events")
    with pytest.raises(UsageError, match="holds share 1/3"):
        build(data, part, share="2/3")
    early = taken(data, tmp_path / "early", [parts[0], part, parts[2]])
    assert early.encoded > 0
    assert facts(tmp_path / "early") == facts(reference)
    report = build(data, part, allow_failed="1")
    assert 0 < report.encoded < len(opened(part)[0].documents)
    assert facts(part) == facts(parts[1])


def test_a_whole_that_is_killed_goes_on(data, parts, reference, tmp_path):
    killed(data, tmp_path / "whole", tmp_path / "events", parts[1])
    report = taken(data, tmp_path / "whole", parts)
    assert report.encoded == 0
    assert 0 < report.taken < 301
    assert facts(tmp_path / "whole") == facts(reference)


def chats(count):
    for number in range(count):
        yield [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "x" * number}]


def test_conversations_beside_texts(tmp_path):
    """The recipe has the template of the conversations on every node, also where its share has none."""
    data = tmp_path / "data"
    data.mkdir()
    write_texts(data / "a.jsonl", ["only text", "and another"])
    lines = (json.dumps({"messages": one}) + "\n" for one in chats(9))
    (data / "b.jsonl").write_text("".join(lines))
    build(data, tmp_path / "reference")
    shares = [tmp_path / f"part{number}" for number in range(5)]
    for number, part in enumerate(shares):
        build(data, part, share=f"{number}/5")
    report = taken(data, tmp_path / "whole", shares)
    assert (report.encoded, report.taken) == (0, 11)
    assert facts(tmp_path / "whole") == facts(tmp_path / "reference")


def test_a_share_without_a_record_is_a_cache_too(tmp_path):
    data = write_texts(tmp_path / "a.jsonl", ["one"])
    made = [build(data, tmp_path / f"part{number}", share=f"{number}/4").encoded for number in range(4)]
    assert sorted(made) == [0, 0, 0, 1]
    empty = tmp_path / f"part{made.index(0)}"
    assert build(data, empty).encoded == 0
    report = taken(data, tmp_path / "whole", [tmp_path / f"part{number}" for number in range(4)])
    assert (report.encoded, report.taken) == (0, 1)


def test_changed_data_changes_its_share_alone(data, tmp_path):
    own = shutil.copy(data, tmp_path / "a.jsonl")
    shares = [tmp_path / f"part{number}" for number in range(2)]
    for number, part in enumerate(shares):
        build(own, part, share=f"{number}/2", allow_failed="1")
    write_texts(own, [*LINES, "something new"])
    assert sum(build(own, part, allow_failed="1").encoded for part in shares) == 1


def test_what_a_share_refused_is_not_tried_again(tmp_path):
    save(byte_level(), tmp_path / "tok", eos_token="<|endoftext|>")
    data = write_texts(tmp_path / "a.jsonl", ["\ufdd0", "fine", "\ufdd1", "well"])
    named = {"tokenizer": str(tmp_path / "tok"), "allow_failed": "4"}
    build(data, tmp_path / "alone", **named)
    refused = opened(tmp_path / "alone")[0].refused
    assert [one["cause"] for one in refused] == ["reserved-character"] * 2
    shares = [tmp_path / f"part{number}" for number in range(2)]
    for number, part in enumerate(shares):
        build(data, part, share=f"{number}/2", **named)
    report = build(data, tmp_path / "whole", take_from=tuple(shares), **named)
    assert (report.plan.todo, report.taken) == (0, 2)
    assert opened(tmp_path / "whole")[0].refused == refused
    assert build(data, tmp_path / "tried", take_from=tuple(shares), retry_failed=True, **named).plan.todo == 2


def test_what_is_taken_from_is_held_against_collection(data, parts, tmp_path, monkeypatch):
    def make(doing, plan, running):
        manifest = CacheLayout(parts[0]).generation(1) / "manifest.json"
        assert isinstance(holders(manifest)[0].pid, int)
        raise KeyboardInterrupt

    monkeypatch.setattr("latentcache.pipeline.token_build.make_documents", make)
    with pytest.raises(KeyboardInterrupt):
        taken(data, tmp_path / "whole", parts)


@given(st.lists(st.booleans(), max_size=30))
def test_two_streams_become_one_in_the_order_of_their_records(is_other):
    rows = np.flatnonzero(~np.array(is_other, dtype=bool))
    other = np.flatnonzero(np.array(is_other, dtype=bool))
    assert list(in_order(iter(rows.tolist()), iter(other.tolist()), rows, other)) == list(range(len(is_other)))
