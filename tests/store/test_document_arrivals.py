import pickle
import shutil

import numpy as np
import pytest
from made_coming import announced, seal
from small_tokens import build, opened, spoken, tamper, write_texts

from latentcache.errors import CorruptEntryError, MissingEntryError, NotYetEncodedError
from latentcache.store.coming import ArrivalLog
from latentcache.store.document_arrivals import follow_tokens
from latentcache.store.layout import CacheLayout
from latentcache.store.token_reader import TokenReader

CHAT = '{"messages": [{"role": "user", "content": "q%d"}, {"role": "assistant", "content": "answer"}]}'
TEXTS = ["one", "two", "one", "three"]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    build(write_texts(folder / "a.jsonl", TEXTS), folder / "cache")
    return folder / "cache"


def read(reader, numbers):
    """Documents that were waited for, as their texts again."""
    reader.ready(np.array(numbers))
    return [bytes(reader.ids(number)[:-1].astype("u1")).decode() for number in numbers]


def test_documents_are_served_when_their_blocks_are_sealed(built, tmp_path):
    layout, _ = announced(built, tmp_path, more=1)
    generation = follow_tokens(layout, timeout_s=0.0)
    reader = TokenReader(layout, generation)
    with pytest.raises(NotYetEncodedError, match=r"a\.jsonl:4 was not encoded within 0 s") as caught:
        reader.ready(np.array([3]))
    assert "0 of 5 entries are there" in caught.value.why
    seal(built, layout)
    assert read(reader, [3, 0, 2]) == ["three", "one", "one"]
    assert generation.arrivals.arrived == 4
    with pytest.raises(NotYetEncodedError, match=r"a\.jsonl:5"):
        reader.ready(np.array([4]))


def test_runs_come_with_them(tmp_path):
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(f"{CHAT % number}\n" for number in range(3)))
    build(data, tmp_path / "built")
    layout, _ = announced(tmp_path / "built", tmp_path / "cache")
    seal(tmp_path / "built", layout)
    found = TokenReader(layout, follow_tokens(layout, timeout_s=0.0)).ready(np.array([2, 0]))
    expected = opened(tmp_path / "built")[0].documents
    for place, number in enumerate((2, 0)):
        assert found.runs(place).tolist() == expected.runs(number).tolist()
        assert found.where(place) == expected.where(number)
    assert found.length.tolist() == expected.length[[2, 0]].tolist()


def test_a_record_that_was_refused_is_named(built, tmp_path):
    layout, log = announced(built, tmp_path)
    reader = TokenReader(layout, follow_tokens(layout, timeout_s=30.0))
    with ArrivalLog(log) as told:
        told.refused([1])
    with pytest.raises(MissingEntryError, match=r"a\.jsonl:2 could not be used") as caught:
        reader.ready(np.array([1]))
    assert "on_bad" not in caught.value.fix


def test_what_the_finished_generation_does_not_have_will_not_come(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    layout, _ = announced(built, tmp_path / "cache", more=1)
    reader = TokenReader(layout, follow_tokens(layout, timeout_s=30.0))
    assert read(reader, range(4)) == TEXTS
    with pytest.raises(MissingEntryError, match=r"a\.jsonl:5 could not be used"):
        reader.ready(np.array([4]))


def test_blocks_of_the_generation_before_are_known_unread_and_checked_when_they_are_read(built, tmp_path):
    shutil.copytree(built, tmp_path / "cache")
    tamper(tmp_path / "cache")
    layout, _ = announced(built, tmp_path / "cache", more=1, before=1)
    reader = TokenReader(layout, follow_tokens(layout, timeout_s=0.0))
    with pytest.raises(CorruptEntryError, match=r"a\.jsonl"):
        read(reader, [0])


def test_a_block_that_the_generation_before_uses_in_part_has_its_other_documents_too(built, tmp_path):
    """The columns name those in use only; a line that comes back is none of them, and nobody tokenises it again."""
    shutil.copytree(built, tmp_path / "cache")
    build(write_texts(tmp_path / "a.jsonl", ["one", "three"]), tmp_path / "cache")
    layout, _ = announced(built, tmp_path / "cache", more=1, before=2)
    generation = follow_tokens(layout, timeout_s=0.0)
    assert read(TokenReader(layout, generation), range(4)) == TEXTS
    assert generation.arrivals.arrived == 4


def test_a_damaged_block_of_an_unfinished_build_has_not_come(built, tmp_path):
    shutil.copytree(built, tmp_path / "damaged")
    tamper(tmp_path / "damaged")
    layout, _ = announced(built, tmp_path / "cache")
    seal(tmp_path / "damaged", layout)
    with pytest.raises(NotYetEncodedError):
        TokenReader(layout, follow_tokens(layout, timeout_s=0.0)).ready(np.array([0]))


def test_blocks_of_another_recipe_are_not_taken(built, tmp_path):
    build(write_texts(tmp_path / "a.jsonl", TEXTS), tmp_path / "other", add_eos=False)
    layout, _ = announced(built, tmp_path / "cache")
    seal(tmp_path / "other", layout)
    with pytest.raises(NotYetEncodedError):
        TokenReader(layout, follow_tokens(layout, timeout_s=0.0)).ready(np.array([0]))


def test_a_pickled_reader_looks_for_itself(built, tmp_path):
    layout, _ = announced(built, tmp_path)
    reader = TokenReader(layout, follow_tokens(layout, timeout_s=0.0))
    again = pickle.loads(pickle.dumps(reader))
    seal(built, layout)
    assert read(again, range(4)) == spoken(opened(built)[1])
    assert reader.generation.arrivals.arrived == 0
    assert read(pickle.loads(pickle.dumps(again)), [3]) == ["three"]


def test_nobody_builds_tokens(tmp_path):
    assert follow_tokens(CacheLayout(tmp_path), timeout_s=1.0) is None
