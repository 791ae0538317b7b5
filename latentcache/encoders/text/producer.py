"""Tokenize records in a worker."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure, Made, Prepared, Producer, ProducerContext
from latentcache.identity.content import json_hash
from latentcache.sources.records import Record

if TYPE_CHECKING:
    from latentcache.encoders.text.tokenizer import TextTokenizer

_BOS, _EOS, _PAD, _TURN, _END = range(256, 261)
_NUM_IDS = 261
_NO_TOKENS = Failure(
    reason="no-tokens",
    detail="the tokenizer gives no token for it",
    hint="leave the record out, or let every text end with a token (--add-eos)",
)
#: Increased if the same record gives other ids.
_VERSION = 1


def open_tokenizer(about: Mapping[str, Any], recipe: InputIdsRecipe) -> StubTokenizer | TextTokenizer:
    """Open the tokenizer of ``describe_tokenizer``; the stub needs no library. Raises as TextTokenizer."""
    if not about["tokenizer"]:
        return StubTokenizer(recipe, about["delay_ms"])
    # Chat templates and tokenizers cost a second.
    from latentcache.encoders.text.tokenizer import TextTokenizer

    return TextTokenizer(about, recipe)


class TokenProducer(Producer):
    """Token ids of records."""

    def __init__(self, producer: Mapping[str, Any], recipe: InputIdsRecipe, context: ProducerContext) -> None:
        self._tokenizer = open_tokenizer(producer, recipe)

    def encode(self, batch: Sequence[Prepared]) -> list[Made | Failure]:
        """See :class:`Producer`."""
        documents = self._tokenizer.tokenize([item.value.inputs["record"] for item in batch])
        return [
            _NO_TOKENS if isinstance(document, Made) and not len(document.array) else document
            for document in documents
        ]


def stub_recipe(*, chat: bool, loss: str, add_bos: bool, add_eos: bool) -> InputIdsRecipe:
    """Recipe of the stub; with ``chat`` the records are conversations, and it has the hash of their template."""
    return InputIdsRecipe(
        tokenizer=json_hash({"stub": "bytes", "version": _VERSION}).hex(),
        num_ids=_NUM_IDS,
        chat_template=json_hash({"stub": "turns", "version": _VERSION}).hex() if chat else "",
        loss=loss,
        add_bos=add_bos,
        add_eos=add_eos,
        bos_id=_BOS,
        eos_id=_EOS,
        pad_id=_PAD,
    )


class StubTokenizer:
    """A tokenizer of bytes for tests, as :class:`TextTokenizer` is one; it sleeps ``delay_ms`` for each record.

    Ids 0 to 255 are bytes. 256 begins a text, 257 ends one, 258 is padding, 259 begins a turn and 260 ends it. A turn
    is 259, the role, a newline, the content and 260. Its content and its end carry loss if the turn does. No text can
    turn into an id above 255, so there is no special-token text. NumPy only.
    """

    def __init__(self, recipe: InputIdsRecipe, delay_ms: int) -> None:
        self.recipe = recipe
        self._delay_s = delay_ms / 1000

    def tokenize(self, records: Sequence[Record]) -> list[Made | Failure]:
        """One document for each record."""
        time.sleep(self._delay_s * len(records))
        return [self._document(record) for record in records]

    def _document(self, record: Record) -> Made:
        recipe = self.recipe
        everything = self.recipe.loss == "all"
        if record.messages is None:
            text = record.text or ""
            ids = chr(_BOS) * recipe.add_bos + _bytes(text) + chr(_EOS) * recipe.add_eos
            begin = 0 if everything else record.begin
            spans = [(len(_bytes(text[:begin])) + recipe.add_bos if begin else 0, len(ids))]
        else:
            ids = ""
            spans = []
            for message in record.messages:
                ids += chr(_TURN) + _bytes(f"{message.role}\n")
                begin = len(ids)
                ids += _bytes(message.content) + chr(_END)
                spans += [(begin, len(ids))] if message.learned else []
            spans = [(0, len(ids))] if everything else spans
        learned = [(begin, end - begin) for begin, end in spans if begin < end]
        columns = {"spans": np.array(learned, dtype=np.uint32).reshape(-1, 2), "control": 0, "not_rendered": 0}
        array = np.frombuffer(ids.encode("utf-16-le"), dtype="<u2").astype(recipe.dtype, copy=False)
        return Made(array=array, columns=columns)


def _bytes(text: str) -> str:
    """Make each byte of UTF-8 a character: ids are characters until NumPy turns all of them into numbers at once."""
    return text.encode().decode("latin-1")
