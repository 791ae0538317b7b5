"""What a token cache comes to in numbers: documents, tokens, tokens with loss, how long documents are.

Guarantee: everything is counted from columns; no id is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.identity.content import content_hash
from latentcache.store.documents import Documents


def token_accounts(documents: Documents, control: NDArray[np.uint32], num_sources: int) -> dict[str, Any]:
    """The accounts of a generation, as JSON values.

    Args:
        documents: Its D documents.
        control: (D,) control strings that stand in each record as text.
        num_sources: Files of the manifest's list.
    """
    lengths = documents.length.astype(np.int64)
    begins = np.concatenate([np.zeros(1, dtype=np.int64), documents.span_ends])[:-1] if len(lengths) else lengths
    trained = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(documents.spans[:, 1], dtype=np.int64)])
    with_loss = trained[documents.span_ends] - trained[begins]
    by_source = np.zeros(num_sources, dtype=np.int64)
    np.add.at(by_source, documents.source, lengths)
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "trainable": int(with_loss.sum()),
        "without_loss": int((with_loss == 0).sum()),
        "control_strings": int(control.sum()),
        "documents_with_control": int((control > 0).sum()),
        "shortest": int(lengths.min()) if len(lengths) else 0,
        "longest": int(lengths.max()) if len(lengths) else 0,
        "lengths": length_histogram(lengths),
        "tokens_by_source": by_source.tolist(),
    }


def length_histogram(lengths: NDArray[np.int64]) -> list[dict[str, int]]:
    """Documents and tokens by length: up to 64, up to 128, up to 256, and so on."""
    if not len(lengths):
        return []
    steps = np.maximum(np.ceil(np.log2(lengths)).astype(np.int64), 6)
    found = []
    for step in np.unique(steps).tolist():
        own = lengths[steps == step]
        found.append({"up_to": 1 << step, "documents": len(own), "tokens": int(own.sum())})
    return found


def fingerprint(recipe_id: bytes, documents: Documents) -> str:
    """32 hex digits of what views are made of: recipe, and content, length and runs of each document in order."""
    columns = (documents.content, documents.length, documents.span_ends, documents.spans)
    parts = [content_hash(np.ascontiguousarray(column).tobytes()) for column in columns]
    return content_hash(recipe_id + b"".join(parts)).hex()
