"""The reader of rows by itself: what it writes, what it leaves alone, and whom it names. Rows: test_token_view.py."""

import numpy as np
import pytest
from made_tokens import cache_of, texts

from latentcache.errors import CorruptEntryError
from latentcache.loader.token_rows import RowArrays, RowReader
from latentcache.plan.row_kinds import packed_rows
from latentcache.store.documents import MemoryTokens

CACHE = cache_of(texts())


class Damaged(MemoryTokens):
    """A store in which one document fails its check."""

    bad = 7

    def ids(self, document):
        if document == self.bad:
            raise CorruptEntryError("no such bytes", where="a shard:96", why="checksum")
        return super().ids(document)

    def gather(self, document, start, length, out, at):
        if self.bad in document.tolist():
            raise CorruptEntryError("the block of some document is damaged")
        super().gather(document, start, length, out, at)


def a_reader(store=CACHE.store, overflow="split"):
    plan = packed_rows(CACHE._corpus, 40, overflow=overflow)
    return RowReader(store, CACHE._corpus, plan, dtype="uint16")


def arrays(count, width):
    wide = np.full((4, count, width), 99, dtype=np.int64)
    return RowArrays(
        input_ids=wide[0],
        attention_mask=wide[1],
        labels=wide[2],
        position_ids=wide[3],
        seq_idx=np.full((count, width), 99, dtype=np.int32),
    )


def fill(reader, rows, out, at):
    rows = np.array(rows)
    lengths = reader.lengths[rows]
    narrow = np.empty(out.input_ids.shape, dtype=np.uint16)
    reader.fill(rows, lengths, out, np.array(at), narrow, pad_id=0, left=False)


def test_rows_go_to_their_places_and_no_others_are_written():
    out = arrays(5, 40)
    fill(a_reader(), [2, 0], out, [4, 1])
    for name in RowArrays.__dataclass_fields__:
        array = getattr(out, name)
        assert (array[[0, 2, 3]] == 99).all()
        assert not (array[[4, 1]] == 99).all(axis=1).any()
    again = arrays(2, 40)
    fill(a_reader(), [2, 0], again, [0, 1])
    assert np.array_equal(again.labels, out.labels[[4, 1]])


def test_the_document_that_fails_is_named():
    reader = a_reader(Damaged(texts()))
    row = next(row for row in range(len(reader.plan)) if 7 in reader.plan.document[list(reader.plan.pieces(row))])
    with pytest.raises(CorruptEntryError, match="the tokens of memory:8 are damaged") as caught:
        fill(reader, [row], arrays(1, 40), [0])
    assert (caught.value.sample, caught.value.where, caught.value.why) == ("memory:8", "a shard:96", "checksum")
