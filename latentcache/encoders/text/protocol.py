"""Tokenization as producers see it: records in, ids and loss spans out. No tokenizer library here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.input_ids import InputIdsRecipe
from latentcache.fields.protocol import Failure
from latentcache.sources.records import Record
from latentcache.value import Value


# Not frozen: there is one for each item, and a frozen one takes three times as long to make.
@dataclass(slots=True, kw_only=True)
class TokenizedDocument:
    """One record as tokens."""

    ids: NDArray[Any]
    """(n,) in the recipe's dtype; n may be 0."""
    spans: NDArray[np.uint32]
    """(r, 2) first token and number of tokens of each loss span; rising, not touching."""
    control: int = 0
    """Occurrences of special-token text in the content."""
    not_rendered: int = 0
    """Bits of ``fields.input_ids.NOT_RENDERED``: content that the template leaves out."""


class RecordTokenizer(Protocol):
    """Turns records into documents. Made in each process from a description, never sent between processes."""

    @property
    def recipe(self) -> InputIdsRecipe:
        """The recipe of its documents."""

    def tokenize(self, records: Sequence[Record]) -> list[TokenizedDocument | Failure]:
        """One result for each record, in their order. The result of one does not depend on the others."""


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
        """As JSON values, to open it in a worker."""
        return asdict(self) | {"recipe": self.recipe.as_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TokenizerDescription:
        """Inverse of :meth:`as_json`."""
        pairs = {name: tuple((str(one), str(other)) for one, other in data[name]) for name in ("special", "parts")}
        recipe = InputIdsRecipe.from_json(data["recipe"])
        return cls(**{**data, **pairs, "recipe": recipe, "notes": tuple(data["notes"])})
