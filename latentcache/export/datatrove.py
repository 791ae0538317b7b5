"""Write documents as datatrove's tokenized files, which nanotron reads too: ids, ends of documents, metadata.

Format: huggingface/datatrove 0.10.1, ``pipeline/tokens/tokenizer.py`` (``TokenizedFile``) and ``utils/dataset.py``:
``.ds`` holds ids of 2 or 4 bytes, ``.ds.index`` the end of each document in tokens (uint64), ``.ds.metadata`` three
lines: name of the tokenizer and bytes of an id, tokens, tokens as text. Its readers take the bytes of an id as an
argument and ignore that file, so the export prints the number. ``.ds.loss`` is not written: no reader opens it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.export.documents import DocumentsFormat, Written


def _beside(file: Path, written: Written, facts: Mapping[str, Any]) -> None:
    """Write ends and metadata beside a file of ids."""
    index, words = (file.with_name(f"{file.name}.{ending}") for ending in ("index", "metadata"))
    index.write_bytes(written.ends.astype("<u8").tobytes())
    words.write_text(metadata(str(facts.get("tokenizer") or ""), written), "utf-8")


def metadata(tokenizer: str, written: Written) -> str:
    """The three lines; the first has one ``|``."""
    name = " ".join(tokenizer.replace("|", " ").split()) or "Unknown Tokenizer"
    return f"{name}|{np.dtype(written.dtype).itemsize}\n{written.tokens}\n{written.tokens / 1e9:.3g} GT"


DATATROVE = DocumentsFormat(
    name="datatrove",
    ids="{split}/00000_tokens.ds",
    dtypes={"uint16": "uint16", "uint32": "uint32"},
    beside=_beside,
)
