"""What the pipeline knows of tokenization: records in, ids and runs with loss out. No tokenizer library here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from latentcache.sources.records import Record
from latentcache.sources.sample import Refusal
from latentcache.fields.input_ids import TokenRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedDocument:
    """One record as tokens."""

    content: bytes
    """16 bytes: the content hash of its record."""
    ids: NDArray[Any]
    """(n,) in the recipe's dtype; n may be 0."""
    runs: NDArray[np.uint32]
    """(r, 2) first token and number of tokens of each run that carries loss; rising, not touching."""
    control_strings: int = 0
    """Control strings that stand in its content as text."""


class RecordTokenizer(Protocol):
    """Turns records into documents. Made in each process from a description, never sent between processes."""

    @property
    def recipe(self) -> TokenRecipe:
        """What it makes of a record."""

    def tokenize(self, records: Sequence[Record]) -> list[TokenizedDocument | Refusal]:
        """One result for each record, in their order. The result of one does not depend on the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDescription:
    """All that a process needs to make a tokenizer; text only, so it can be sent to any process.

    The text of ``tokenizer.json`` is in it rather than its path: every worker uses the bytes that were fingerprinted,
    whatever happens to the file meanwhile.
    """

    recipe: TokenRecipe
    tokenizer: str = ""
    """``tokenizer.json`` as text; empty for the stub."""
    chat_template: str = ""
    """Jinja, as it is rendered; empty where there is none."""
    special: tuple[tuple[str, str], ...] = ()
    """Names that templates know special tokens by, as (``bos_token``, ``<s>``)."""
    fast: bool = False
    """True if byte-level BPE goes through the fast engine; ``fastcheck.verify_fast`` decides, and nothing else."""
    delay_ms: int = 0
    """Of the stub: how long it sleeps for each record."""
    parts: tuple[tuple[str, str], ...] = ()
    """Provenance: (part of the tokenizer, hex hash), as in ``identity.tokenizer``."""
    notes: tuple[str, ...] = ()
    """What a user should know: one sentence each."""
