import numpy as np
from described import opened_tokenizer

from latentcache.sources.records import Message, chat_record, text_record

ASKED = Message(role="user", content="ä?")
SAID = Message(role="assistant", content="ok", learned=True)


def test_a_text_is_its_bytes_and_an_end():
    (document,) = opened_tokenizer("stub").tokenize([text_record("a", 1, "hé")])
    assert document.array.tolist() == [*"hé".encode(), 257]
    assert document.array.dtype == np.uint16
    assert document.columns["spans"].tolist() == [[0, 4]]
    prompt = text_record("a", 1, "hé", begin=2)
    (document,) = opened_tokenizer("stub", loss="assistant").tokenize([prompt])
    assert document.columns["spans"].tolist() == [[3, 1]]
    (document,) = opened_tokenizer("stub", loss="assistant", add_eos=False).tokenize([prompt])
    assert document.columns["spans"].tolist() == []


def test_what_the_assistant_says_carries_loss_with_its_end_or_all_where_asked():
    record = chat_record("a", 1, (ASKED, SAID, ASKED, SAID))
    (document,) = opened_tokenizer("stub", chat=True).tokenize([record])
    assert [document.array[s : s + n].tolist() for s, n in document.columns["spans"].tolist()] == [[*b"ok", 260]] * 2
    (document,) = opened_tokenizer("stub", chat=True, loss="all").tokenize([record])
    assert document.columns["spans"].tolist() == [[0, len(document.array)]]
