"""A documented stand-in for a tokenizer: one token for each byte of UTF-8. For tests of everything but tokenizers.

Ids 0 to 255 are bytes; 256 begins a text, 257 ends one, 258 is padding, 259 begins a turn and 260 ends it. A turn
is 259, the role, a line end, the content and 260; its content and its end carry loss where the turn is learned.
Nothing in a text can turn into an id above 255, so no control strings are found. NumPy only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from latentcache.encoders.text.protocol import TokenizedDocument, TokenizerDescription
from latentcache.identity.content import json_hash
from latentcache.sources.records import Message, Record
from latentcache.sources.sample import Refusal
from latentcache.fields.input_ids import TokenRecipe

_BOS, _EOS, _PAD, _TURN, _END = range(256, 261)
_NUM_IDS = 261
#: Bumped when the same record would give other ids.
_VERSION = 1


def stub_description(
    *, chat: bool = False, loss: str | None = None, add_bos: bool = False, add_eos: bool = True, delay_ms: int = 0
) -> TokenizerDescription:
    """What the stub makes of a record.

    Args:
        chat: Whether the records are conversations; they get their template's hash into the recipe.
        loss: ``all`` or ``assistant``; by default ``assistant`` for conversations.
        add_bos: Whether a text begins with 256.
        add_eos: Whether a text ends with 257.
        delay_ms: Milliseconds to sleep for each record; no part of the recipe.
    """
    recipe = TokenRecipe(
        tokenizer=json_hash({"stub": "bytes", "version": _VERSION}).hex(),
        num_ids=_NUM_IDS,
        chat_template=json_hash({"stub": "turns", "version": _VERSION}).hex() if chat else "",
        loss=loss or ("assistant" if chat else "all"),
        add_bos=add_bos,
        add_eos=add_eos,
        bos_id=_BOS,
        eos_id=_EOS,
        pad_id=_PAD,
    )
    return TokenizerDescription(recipe=recipe, delay_ms=delay_ms)


class StubTokenizer:
    """A :class:`~latentcache.encoders.text.protocol.RecordTokenizer` of bytes.

    Args:
        description: From :func:`stub_description`.
    """

    def __init__(self, description: TokenizerDescription) -> None:
        self._recipe = description.recipe
        self._delay_s = description.delay_ms / 1000

    @property
    def recipe(self) -> TokenRecipe:
        """What it makes of a record."""
        return self._recipe

    def tokenize(self, records: Sequence[Record]) -> list[TokenizedDocument | Refusal]:
        """One document for each record."""
        time.sleep(self._delay_s * len(records))
        return [self._document(record) for record in records]

    def _document(self, record: Record) -> TokenizedDocument:
        if record.messages is None:
            ids = [*[_BOS] * self._recipe.add_bos, *(record.text or "").encode(), *[_EOS] * self._recipe.add_eos]
            runs = [(0, len(ids))] if ids else []
        else:
            ids, runs = _turns(record.messages, self._recipe.loss == "all")
        return TokenizedDocument(
            content=record.content,
            ids=np.array(ids, dtype=self._recipe.dtype),
            runs=np.array(runs, dtype=np.uint32).reshape(-1, 2),
        )


def _turns(messages: Sequence[Message], everything: bool) -> tuple[list[int], list[tuple[int, int]]]:
    """Ids of a conversation, and its runs with loss."""
    ids: list[int] = []
    runs = []
    for message in messages:
        content = message.content.encode()
        ids += [_TURN, *f"{message.role}\n".encode(), *content, _END]
        if message.learned:
            runs.append((len(ids) - len(content) - 1, len(content) + 1))
    return ids, [(0, len(ids))] if everything and ids else runs
