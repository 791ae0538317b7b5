"""Tokenization as producers see it: records in, ids and loss spans out. No tokenizer library here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure, Made
from latentcache.sources.records import Record
from latentcache.value import Value


class RecordTokenizer:
    """Turns records into items. Made in each process from a description, never sent between processes."""

    recipe: InputIdsRecipe

    def tokenize(self, records: Sequence[Record]) -> list[Made | Failure]:
        """One result for each record, in their order. The result of one does not depend on the others.

        Ids are (n,) in the recipe's dtype; n may be 0. Columns: ``spans`` (r, 2) first token and number of tokens of
        each loss span, rising, not touching; ``control`` occurrences of special-token text in the content;
        ``not_rendered`` bits of ``fields.input_ids.NOT_RENDERED``.
        """
        raise NotImplementedError


class TokenizerDescription(Value):
    """Everything that a process needs to make a tokenizer; text only, so it can be sent to any process.

    It has the text of ``tokenizer.json`` rather than its path: every worker uses the bytes that were fingerprinted,
    even if the file changes meanwhile.
    """

    recipe: InputIdsRecipe
    tokenizer: str = ""
    """``tokenizer.json`` as text; empty for the stub."""
    chat_template: str = ""
    """Jinja, as it is rendered; empty if there is none."""
    special: tuple[tuple[str, str], ...] = ()
    """Names of special tokens in templates: (``bos_token``, ``<s>``)."""
    delay_ms: int = 0
    """Pause of the stub for each record."""
    parts: tuple[tuple[str, str], ...] = ()
    """Provenance: (part of the tokenizer, hex hash), as in ``identity.tokenizer``."""
    notes: tuple[str, ...] = ()
    """One sentence each, for the user."""
    revision: str = ""
    """Commit of a hub repository."""

    def as_json(self) -> dict[str, Any]:
        """What opens it in a worker, which has the recipe."""
        said = asdict(self)
        return {name: said[name] for name in ("tokenizer", "chat_template", "special", "delay_ms")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], recipe: InputIdsRecipe) -> TokenizerDescription:
        """Inverse of :meth:`as_json`."""
        return cls(**{**data, "special": tuple((role, token) for role, token in data["special"])}, recipe=recipe)
