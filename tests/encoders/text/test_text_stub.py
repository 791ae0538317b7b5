import subprocess
import sys

import numpy as np

from latentcache.encoders.text.producer import open_tokenizer
from latentcache.encoders.text.stub import stub_description
from latentcache.sources.records import Message, chat_record, text_record

ASKED = Message(role="user", content="ä?")
SAID = Message(role="assistant", content="ok", learned=True)


def test_a_text_is_its_bytes_and_an_end():
    (document,) = open_tokenizer(stub_description()).tokenize([text_record("a", 1, "hé")])
    assert document.array.tolist() == [*"hé".encode(), 257]
    assert document.array.dtype == np.uint16
    assert document.columns["spans"].tolist() == [[0, 4]]


def test_what_the_assistant_says_carries_loss_with_its_end():
    tokenizer = open_tokenizer(stub_description(chat=True))
    (document,) = tokenizer.tokenize([chat_record("a", 1, (ASKED, SAID, ASKED, SAID))])
    assert [document.array[s : s + n].tolist() for s, n in document.columns["spans"].tolist()] == [[*b"ok", 260]] * 2


def test_all_of_a_conversation_carries_loss_where_asked():
    tokenizer = open_tokenizer(stub_description(chat=True, loss="all"))
    (document,) = tokenizer.tokenize([chat_record("a", 1, (ASKED, SAID))])
    assert document.columns["spans"].tolist() == [[0, len(document.array)]]


def test_the_stub_needs_no_library():
    code = (
        "import sys\n"
        "from latentcache.encoders.text.producer import open_tokenizer\n"
        "from latentcache.encoders.text.stub import stub_description\n"
        "open_tokenizer(stub_description())\n"
        "assert not {'torch', 'transformers', 'tokenizers', 'tiktoken', 'jinja2'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
