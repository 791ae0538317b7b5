import io

import numpy as np
import pytest

from latentcache.encoders.stub_tokeniser import stub_description
from latentcache.encoders.tokenising import TokenisedDocument
from latentcache.pipeline.token_worker import (
    get_frame,
    pack_description,
    pack_records,
    pack_results,
    put_frame,
    unpack_description,
    unpack_records,
    unpack_results,
)
from latentcache.sources.records import Message, chat_record, text_record
from latentcache.sources.sample import Refusal


def carried(head, body=b""):
    stream = io.BytesIO()
    put_frame(stream, head, body)
    stream.seek(0)
    return get_frame(stream)


def test_records_arrive_as_they_were():
    turns = (
        Message(role="user", content="hé\u2028", fields=(("tool_calls", "[1]"),)),
        Message(role="assistant", content="", learned=True),
    )
    made = [text_record("a\udcff.jsonl", 3, "é\n"), chat_record("b", 1, turns, tools="[]")]
    assert unpack_records(carried(pack_records(made))[0]) == made


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_results_arrive_as_they_were(dtype):
    document = TokenisedDocument(
        content=b"x" * 16,
        ids=np.array([1, 2, 3], dtype=dtype),
        runs=np.array([[0, 1], [2, 1]], dtype=np.uint32),
        control_strings=2,
    )
    empty = TokenisedDocument(
        content=b"y" * 16, ids=np.array([], dtype=dtype), runs=np.empty((0, 2), dtype=np.uint32)
    )
    refusal = Refusal(name="a", cause="template", detail="no", hint="mend", line=4, field="messages[0]")
    found = unpack_results(*carried(*pack_results([document, refusal, empty])))
    assert found[1] == refusal
    for one, other in zip((found[0], found[2]), (document, empty), strict=True):
        assert (one.content, one.control_strings, one.ids.dtype) == (other.content, other.control_strings, dtype)
        assert (one.ids.tolist(), one.runs.tolist()) == (other.ids.tolist(), other.runs.tolist())


def test_a_description_arrives_as_it_was():
    made = stub_description(chat=True, delay_ms=3)
    assert unpack_description(carried(pack_description(made))[0]) == made


def test_a_stream_that_ends_early_has_no_frame():
    stream = io.BytesIO()
    put_frame(stream, [1], b"body")
    whole = stream.getvalue()
    assert get_frame(io.BytesIO(whole)) == ([1], b"body")
    for end in range(len(whole)):
        assert get_frame(io.BytesIO(whole[:end])) is None
