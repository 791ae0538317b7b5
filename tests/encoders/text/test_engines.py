import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import byte_level

from latentcache.encoders.text.engines import ReferenceEngine, token_spans


@given(st.lists(st.integers(0, 4), max_size=12), st.lists(st.integers(0, 30), max_size=6))
def test_runs_are_the_tokens_that_a_span_touches(lengths, borders):
    ends = np.cumsum(np.array(lengths, dtype=np.int64))
    begins = ends - np.array(lengths, dtype=np.int64)
    borders = sorted(set(borders))
    spans = list(zip(borders[::2], borders[1::2], strict=False))
    runs = token_spans(begins, ends, spans)
    found = {token for start, number in runs.tolist() for token in range(start, start + number)}
    wanted = {
        token
        for token, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True))
        if any(begin < b and max(end, begin + 1) > a for a, b in spans)
    }
    assert found == wanted
    assert all(a + n < b for (a, n), (b, _) in zip(runs.tolist(), runs.tolist()[1:], strict=False))
    assert runs.dtype == np.uint32
    assert runs.shape[1] == 2


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_ids_are_those_of_the_library_in_the_dtype(dtype, monkeypatch):
    tokenizer = byte_level()
    engine = ReferenceEngine(tokenizer.to_str(), dtype)
    texts = ["hello world", "", "été"]
    wanted = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for spans in ([None] * 3, [[(0, 5)], [], None]):
        for threads in ("false", "true"):  # off, as in workers
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", threads)
            found = engine.encode(texts, spans)
            assert [ids.tolist() for ids, _ in found] == wanted
            assert {ids.dtype for ids, _ in found} == {np.dtype(dtype)}
