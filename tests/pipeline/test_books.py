import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_builds import recipe_of

from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline.books import Books, Holding
from latentcache.pipeline.events import EventLog
from latentcache.pipeline.survey import placements_for
from latentcache.pipeline.units import Unit
from latentcache.pipeline.work import Planned, Progress
from latentcache.sources.sample import Sample
from latentcache.store.catalog import Catalog
from latentcache.store.generation import pack_memo

RECIPE = recipe_of()
MEMO = StatMemo(size=1, mtime_ns=2, ctime_ns=3, inode=4, device=5, seen_ns=6)
TABLES = RECIPE.geometry.tables()


def planned(index):
    sample = Sample(name=f"{index}.png", caption="", stat=MEMO)
    return Planned(index=index, sample=sample, size=Size(64, 64), placements=placements_for(Size(64, 64), TABLES))


def key_of(index):
    return bytes([index + 1]) * 32


class Desk:
    """Books, and workers that say the right things."""

    def __init__(self, root, events=None):
        self.progress = Progress(total=9)
        self.books = Books(
            root=root, recipe=RECIPE, catalog=Catalog([]), events=EventLog(events), progress=self.progress
        )

    def given(self, *indices):
        holding = Holding()
        self.books.give(holding, Unit(items=tuple(map(planned, indices))))
        return holding

    def say(self, holding, kind, **facts):
        return self.books.hear(holding, {"kind": kind, **facts})

    def take(self, holding, index, keys=None, content=None):
        return self.say(
            holding,
            "take",
            index=index,
            content=(content or bytes([index]) * 16).hex(),
            memo=pack_memo(MEMO),
            size=[64, 64],
            keys=[key.hex() for key in keys or [key_of(index)]],
        )

    def decoded(self, holding, index, *pixels):
        pixels = pixels or (bytes([index]) * 16,)
        return self.say(holding, "decoded", index=index, pixels=[found.hex() for found in pixels])

    def encoded(self, holding, *indices):
        for index in indices:
            self.take(holding, index)
            self.decoded(holding, index)
        self.say(holding, "encoded", keys=[key_of(index).hex() for index in indices])

    def committed(self, holding, *indices):
        self.say(holding, "committed", keys=[key_of(index).hex() for index in indices], bytes=10 * len(indices))


def test_a_sample_is_done_when_it_is_committed_and_not_before(tmp_path):
    desk = Desk(tmp_path, tmp_path / "events")
    one = desk.given(1, 2)
    desk.encoded(one, 1)
    assert (one.untaken, one.unmade, sorted(one.samples)) == (1, 1, [1, 2])
    assert desk.books.result.encoded == set()
    assert not (tmp_path / "events").read_text()
    desk.committed(one, 1)
    assert sorted(one.samples) == [2]
    assert desk.books.result.encoded == {key_of(1)}
    assert json.loads((tmp_path / "events").read_text())["keys"] == [key_of(1).hex()]
    assert (desk.progress.looked, desk.progress.encoded, desk.progress.committed, desk.progress.waiting) == (
        1,
        1,
        1,
        0,
    )


def test_a_key_goes_to_one_worker_until_that_one_is_gone(tmp_path):
    desk = Desk(tmp_path)
    one, two = desk.given(1), desk.given(2)
    assert desk.take(one, 1, [key_of(7)]) == {"wanted": [0]}
    assert desk.take(two, 2, [key_of(7)]) == {"wanted": []}
    assert two.samples == {}
    assert [item.index for item in desk.books.take_back(one)] == [1]
    three = desk.given(1)
    assert desk.take(three, 1, [key_of(7)]) == {"wanted": [0]}


def test_what_a_dead_worker_committed_in_silence_counts_and_is_said(tmp_path):
    desk = Desk(tmp_path, tmp_path / "events")
    one = desk.given(1, 2, 3)
    desk.encoded(one, 1, 2)
    desk.committed(one, 1)
    desk.books.found(one, [key_of(1), key_of(2)])
    assert [item.index for item in desk.books.take_back(one)] == [3]
    said = [json.loads(line)["keys"] for line in (tmp_path / "events").read_text().splitlines()]
    assert said == [[key_of(1).hex()], [key_of(2).hex()]]
    assert desk.books.result.encoded == {key_of(1), key_of(2)}


def test_a_convict_and_its_copies_are_refused(tmp_path):
    (tmp_path / "1.png").write_bytes(b"evil")
    desk = Desk(tmp_path)
    desk.books.convict(planned(1), "decoder-crash", "it died")
    (failed,) = desk.books.result.failed
    assert (failed.index, failed.refusal.cause, failed.refusal.detail) == (1, "decoder-crash", "it died")
    assert failed.refusal.content
    assert failed.refusal.stat.size == 4
    assert "--retry-failed" in failed.refusal.hint
    one = desk.given(2)
    assert desk.take(one, 2, content=failed.refusal.content) == {"refused": ("decoder-crash", "it died")}


def test_a_piece_that_cannot_be_encoded_is_no_longer_waited_for(tmp_path):
    desk = Desk(tmp_path)
    one = desk.given(1)
    desk.take(one, 1, [key_of(1), key_of(2)])
    desk.decoded(one, 1, b"1" * 16, b"2" * 16)
    desk.say(one, "refused", index=1, key=key_of(1).hex(), cause="non-finite", detail="NaN")
    assert one.unmade == 1
    desk.say(one, "encoded", keys=[key_of(2).hex()])
    assert one.unmade == 0
    desk.say(one, "committed", keys=[key_of(2).hex()], bytes=1)
    assert one.samples == {}
    assert desk.books.result.unencodable == {b"\1" * 16: ("non-finite", "NaN")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["take", "encode", "commit", "die"])), max_size=40))
def test_whatever_happens_the_counts_come_out_even(steps):
    desk = Desk(None)
    holding, state = desk.given(*range(6)), dict.fromkeys(range(6), "given")
    for index, step in steps:
        if step == "take" and state[index] == "given":
            desk.take(holding, index)
            desk.decoded(holding, index)
            state[index] = "taken"
        elif step == "encode" and state[index] == "taken":
            desk.say(holding, "encoded", keys=[key_of(index).hex()])
            state[index] = "encoded"
        elif step == "commit" and state[index] == "encoded":
            desk.committed(holding, index)
            state[index] = "done"
        elif step == "die":
            left = [item.index for item in desk.books.take_back(holding)]
            assert left == [number for number in range(6) if state[number] != "done"]
            state |= dict.fromkeys(left, "given")
            holding = desk.given(*left)
        values = list(state.values())
        assert holding.untaken == values.count("given")
        assert holding.unmade == values.count("given") + values.count("taken")
        assert desk.progress.looked == 6 - values.count("given")
        assert desk.progress.waiting == values.count("taken")
        assert len(desk.books.result.encoded) == values.count("done")


def test_an_unknown_word_is_no_message(tmp_path):
    desk = Desk(tmp_path)
    with pytest.raises(KeyError):
        desk.say(Holding(), "nonsense")
