"""Texts and conversations to ids and loss spans with a real tokenizer.

Guarantee: the result of a record depends on the record and the description alone, not on the batch or the process.
Special-token text in content is counted, and stays text unless the recipe says otherwise. A token that
straddles the border of an answer carries loss, as in transformers' own assistant masks.

Special tokens are renamed to names that no text has (see ``chat``), in the tokenizer and in the output of a chat
template. Then one pass over the whole text does all: ids, positions, the tokenizer's own rules for blanks beside
special tokens. A text that has a character of these names is rejected.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from latentcache.encoders.text.chat import (
    CLOSE,
    MARK,
    OPEN,
    ChatRenderer,
    Rendered,
    Spans,
    SpecialTokens,
    guarded,
    unguarded,
)
from latentcache.errors import UnsupportedModelError, UnusableSampleError
from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure, Made
from latentcache.sources.causes import fault, hint_for
from latentcache.sources.records import Record

Tokens = tuple[NDArray[Any], NDArray[np.uint32] | None]
"""(n,) ids of a text, and (r, 2) spans of the tokens that its spans (in characters) touch; None: without spans."""


def token_spans(begins: NDArray[np.int64], ends: NDArray[np.int64], spans: Spans) -> NDArray[np.uint32]:
    """Runs of tokens that the spans touch, (r, 2): first token and number. Tokens have (n,) begins and ends."""
    learned = np.zeros(len(begins) + 2, dtype=np.int8)
    for begin, end in spans:
        learned[1:-1] |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    edges = np.flatnonzero(np.diff(learned))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], axis=1).astype(np.uint32).reshape(-1, 2)


class TextTokenizer:
    """A real tokenizer, opened with ``Described.producer`` in each process. Cost: 0.1 s for 30 000 entries."""

    def __init__(self, about: Mapping[str, Any], recipe: InputIdsRecipe) -> None:
        self.recipe = recipe
        original = json.loads(about["tokenizer"])
        self._control = SpecialTokens(original)
        tokenizer = guarded(original, self._control.ids) if recipe.split_control else unguarded(original)
        self._tokenizer = Tokenizer.from_str(json.dumps(tokenizer))
        self._chat: ChatRenderer | None = None
        if about["chat_template"]:
            self._chat = ChatRenderer(
                about["chat_template"],
                self._control,
                special=about["special"],
                options=recipe.template_options,
                split_control=recipe.split_control,
            )
        if recipe.split_control:
            self._check_names()

    def tokenize(self, records: Sequence[Record]) -> list[Made | Failure]:
        """One result for each record, in their order, whatever the other records are.

        Ids are (n,) in the recipe's dtype; n may be 0. Columns: ``spans`` (r, 2) first token and number of tokens of
        each loss span, rising, not touching; ``control`` occurrences of special-token text in the content;
        ``not_rendered`` bits of ``fields.input_ids.NOT_RENDERED``.
        """
        texts = [self._rendered(record) for record in records]
        usable = [text for text in texts if isinstance(text, Rendered)]
        tokens = self._encoded([text.text for text in usable], [text.spans for text in usable])
        documents = iter(map(self._document, usable, tokens))
        return [next(documents) if isinstance(text, Rendered) else text for text in texts]

    def _rendered(self, record: Record) -> Rendered | Failure:
        try:
            return self._prepare(record)
        except UnusableSampleError as error:
            return Failure(reason=error.slug, detail=error.what, hint=hint_for(error.slug), field=error.where)

    def _prepare(self, record: Record) -> Rendered:
        """The text of a record for the tokenizer; raises UnusableSampleError."""
        if record.messages is None:
            text = record.text or ""
            self._check_reserved(text)
            spans = [(record.begin, len(text))] if record.begin and self.recipe.loss != "all" else None
            return Rendered(text, spans, is_chat=False, controls=self._control.count(text))
        if self._chat is None:
            raise fault("no-template", "it is a conversation, and the tokenizer has no chat template")
        contents = [message.content for message in record.messages]
        contents += [value for message in record.messages for _, value in message.fields]
        contents += [record.tools, record.options]
        for content in contents:
            self._check_reserved(content)
        rendered = self._chat.render(record)
        text = rendered.text
        borders = [border for span in rendered.spans or () for border in span]
        if self.recipe.split_control:
            text, borders = self._control.rewrite(text, borders)
        spans = None if self.recipe.loss == "all" else list(zip(borders[::2], borders[1::2], strict=True))
        return rendered._replace(text=text, spans=spans, controls=sum(map(self._control.count, contents)))

    def _encoded(self, texts: Sequence[str], spans: Sequence[Spans | None]) -> list[Tokens]:
        """Encode texts, whose special tokens have their other names, to ids and loss spans.

        The tokenizer's threads would change the process (they warn at a fork). They are off where the environment
        says so, as in workers of a build; elsewhere texts go one by one, which uses no threads.
        """
        if os.environ.get("TOKENIZERS_PARALLELISM", "").lower() not in ("false", "0", "no", "off"):
            encodings = [self._tokenizer.encode(text, add_special_tokens=False) for text in texts]
        elif any(touched is not None for touched in spans):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        else:  # no positions in the text, which is faster
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        results = list[Tokens]()
        for encoding, touched in zip(encodings, spans, strict=True):
            begins, ends = np.array([] if touched is None else encoding.offsets, dtype=np.int64).reshape(-1, 2).T
            loss = None if touched is None else token_spans(begins, ends, touched)
            results.append((np.array(encoding.ids, dtype=self.recipe.dtype), loss))
        return results

    def _document(self, item: Rendered, tokens: Tokens) -> Made:
        """Make the item of a record; texts get their begin and end tokens."""
        ids, loss = tokens
        if not item.is_chat:
            recipe = self.recipe
            begin = [recipe.bos_id] if recipe.add_bos and recipe.bos_id is not None else []
            end = [recipe.eos_id] if recipe.add_eos and recipe.eos_id is not None else []
            if begin or end:
                ids = np.concatenate([begin, ids, end], dtype=ids.dtype, casting="unsafe")
            if loss is not None:  # the completion and its end
                first = len(begin) + int(loss[0, 0]) if len(loss) else len(ids) - len(end)
                loss = np.array([(first, len(ids) - first)], dtype=np.uint32)
        if loss is None:
            loss = np.array([(0, len(ids))], dtype=np.uint32)
        spans = loss[loss[:, 1] > 0]
        columns = {"spans": spans, "control": item.controls, "not_rendered": item.not_rendered}
        return Made(array=ids, columns=columns)

    def _check_reserved(self, text: str) -> None:
        if OPEN in text or CLOSE in text or MARK in text:
            raise fault("reserved-character", "it has a character between U+FDD0 and U+FDD2")

    def _check_names(self) -> None:
        """Check that the tokenizer knows every special token by its other name."""
        names = [f"{OPEN}{number}{CLOSE}" for number in self._control.ids.values()]
        encoded = self._encoded(names, [None] * len(names))
        for (content, number), (ids, _) in zip(self._control.ids.items(), encoded, strict=True):
            if ids.tolist() != [number]:
                raise UnsupportedModelError(
                    f"the special token {content!r} is indistinguishable from text in this tokenizer",
                    why=f"expected the id {number}, found {ids.tolist()}",
                    fix="turn special-token text into special tokens: --control-tokens",
                )
