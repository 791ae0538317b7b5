"""Token ids of records: their recipe and their settings.

The recipe has everything that moves ids or loss spans. What only decides how rows are served (lengths, packing,
padding, truncation) belongs to a view of the loader. Engine, library versions, workers and batch size are provenance.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import UsageError
from latentcache.fields.protocol import Array, Failure, FieldKind, FieldRecipe, FieldSpec, WorkSize
from latentcache.fields.recipe import Differences
from latentcache.fields.settings import Settings, differing, setting

#: Increased if the same record and tokenizer give other ids or spans.
TOKEN_RULE = 2
#: Kinds of content that a chat template may leave out -> bit in the column ``not_rendered``.
NOT_RENDERED = (
    *("system turn", "developer turn", "user turn", "assistant turn", "tool turn"),
    *("reasoning", "text beside tool calls", "tool calls", "tools"),
)


class InputIdsRecipe(FieldRecipe):
    """The settings that decide ids and loss spans. Two equal recipes give equal ids for equal records."""

    id_name = "input_ids"
    tokenizer: str
    """Hex fingerprint of the tokenizer's content (``fields.tokenizer``), without truncation and padding state."""
    num_ids: int
    """One more than the largest id, added tokens included: decides uint16 or uint32."""
    chat_template: str = ""
    """Hex hash of the template's text; empty for plain text."""
    template_options: tuple[tuple[str, str], ...] = ()
    """Sorted (name, canonical JSON) of the values that the template gets beside the messages."""
    loss: str = "all"
    """Tokens with loss. ``all``: every one. ``assistant``: the assistant's turns, with the token that ends a turn."""
    add_bos: bool = False
    """True: a plain text begins with the bos token. Chat templates write it themselves."""
    add_eos: bool = True
    """True: a plain text ends with the eos token."""
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    """Only the default of views: recorded, not part of the identity."""
    split_control: bool = True
    """True: special-token text in content (``<|endoftext|>`` in a blog post) stays plain text."""
    rule: int = TOKEN_RULE

    @property
    def dtype(self) -> str:
        """Storage type of ids: ``uint16`` if every id fits, else ``uint32``."""
        return "uint16" if self.num_ids <= 1 << 16 else "uint32"

    @property
    def spec(self) -> FieldSpec:
        """Storage and collation."""
        return FieldSpec(dtype=self.dtype, dims=("tokens",), ragged=True, collate="pack", pad_value=self.pad_id or 0)

    def identity(self) -> dict[str, Any]:
        """The part that enters the id, as JSON values."""
        return {name: value for name, value in self.as_json().items() if name != "pad_id"}

    def differences(self, requested: Self, provenance: Sequence[Mapping[str, Any]] = ({}, {})) -> Differences:
        """Settings of the identity that differ; of a tokenizer its parts, if both provenances have them."""
        parts = [about["parts"] for about in provenance if "parts" in about]
        of_tokenizer = differing(*parts) if len(parts) == 2 else []
        changes = differing(self.identity(), requested.identity())
        return [
            row
            for change in changes
            for row in (of_tokenizer if of_tokenizer and change[0] == "tokenizer" else [change])
        ]


def parse_option(word: str) -> tuple[str, str]:
    """``NAME=JSON`` as (name, canonical JSON); a value that is not JSON is a text."""
    name, sign, text = word.partition("=")
    if not sign or not name:
        raise UsageError(
            "no value",
            argument="template_options",
            value=word,
            fix="--template-option=NAME=JSON",
        )
    try:
        return name, json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return name, json.dumps(text)


class InputIdsSettings(Settings):
    """Options of the recipe of token ids."""

    tokenizer: str | None = setting(
        "Tokenizer: a tokenizer.json, a folder with one, a hub id, or stub (bytes).", metavar="PATH"
    )
    chat_template: Path | None = setting("Jinja template [default: the tokenizer's]", metavar="FILE")
    template_options: tuple[tuple[str, str], ...] | None = setting(
        "Give the template a value, such as enable_thinking=false; repeat for several.",
        flag="--template-option",
        metavar="NAME=JSON",
        parse=parse_option,
    )
    loss: str | None = setting(
        "Tokens with loss [default: assistant for conversations, else all]", choices=("all", "assistant")
    )
    add_bos: bool | None = setting("Begin each text with bos [default: as the tokenizer does]")
    add_eos: bool | None = setting("End each text with eos [default: yes]")
    control_tokens: bool | None = setting("Turn special-token text in content into special tokens [default: no]")


class InputIds(FieldKind):
    """Token ids of records, one item per distinct record, packed in blocks."""

    name = "input_ids"
    kind = 1
    inputs = ("record",)
    settings = InputIdsSettings
    recipe = InputIdsRecipe
    packing = "block"
    device = "cpu"
    columns = {"control": ("<u4", ()), "not_rendered": ("<u2", ())}  # noqa: RUF012 - never written
    ragged_columns = {"spans": ("<u4", (2,))}  # noqa: RUF012 - never written
    work = WorkSize(unit_cost=1 << 20, unit_jobs=1024, cost_bytes=320, batch_cost=1 << 20, batch_items=1024)
    encoder = "tokenizer"
    describer = "latentcache.encoders.text.describe:describe"
    producer = "latentcache.encoders.text.producer:TokenProducer"
    decoder = "latentcache.encoders.text.describe:decoder"

    def check(self, array: Array, recipe: InputIdsRecipe) -> Failure | None:
        """Ids outside the vocabulary."""
        largest = int(array.max(initial=0))
        if largest < recipe.num_ids:
            return None
        detail = f"token id {largest} is outside the vocabulary of {recipe.num_ids}"
        return Failure(reason="storage-overflow", detail=detail)

    def describe(self, recipe: InputIdsRecipe, provenance: Mapping[str, Any]) -> dict[str, str]:
        """Tokenizer, template and loss."""
        template = f", chat template {recipe.chat_template[:8]}" if recipe.chat_template else ""
        name = provenance.get("tokenizer", "")
        return {"tokenizer": f"{name} ({recipe.tokenizer[:8]}{template}), loss on {recipe.loss}"}

    def remarks(self, columns: Mapping[str, Any]) -> list[tuple[str, str, NDArray[np.intp]]]:
        """Content that the chat template leaves out, by its kind."""
        bits = np.asarray(columns["not_rendered"])
        used = np.bitwise_or.reduce(bits)
        return [
            ("not-rendered", f"the chat template leaves out: {kind}", np.flatnonzero(bits & (1 << number)))
            for number, kind in enumerate(NOT_RENDERED)
            if used & (1 << number)
        ]

    def numbers(self, recipe: InputIdsRecipe, columns: Mapping[str, Any]) -> Mapping[str, float]:
        """Tokens, tokens with loss, and special-token text in content; ``spans`` are (ends, values)."""
        _, spans = columns["spans"]
        values = np.asarray(spans).reshape(-1, 2)
        return {
            "tokens": int(np.asarray(columns["length"]).sum(dtype=np.int64)),
            "loss_tokens": int(values[:, 1].sum(dtype=np.int64)),
            "special_token_text": int(np.asarray(columns["control"]).sum(dtype=np.int64)),
        }
