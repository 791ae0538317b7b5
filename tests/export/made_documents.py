"""Documents in memory, hypothesis strategies and their export."""

from functools import partial

import numpy as np
from hypothesis import strategies as st

from latentcache.export.tokens import FILES, write_splits
from latentcache.fields.input_ids import InputIdsRecipe

#: Ids of both widths, and documents of them.
VOCABULARIES = st.sampled_from([300, 1 << 16, (1 << 16) + 1, 200_000])
CORPORA = VOCABULARIES.flatmap(
    lambda num_ids: st.tuples(
        st.just(num_ids),
        st.lists(st.lists(st.integers(0, num_ids - 1), min_size=1, max_size=9), min_size=1, max_size=12),
    )
)


class MemoryDocuments:
    """Replacement for ``cache.documents()``. ``spans``: (first, count) of loss tokens per document; None: all."""

    field = "input_ids"

    def __init__(self, ids, num_ids=300, spans=None):
        self.ids = ids
        self.recipe = InputIdsRecipe(
            tokenizer="ab" * 16, num_ids=num_ids, loss="all" if spans is None else "assistant"
        )
        self.dtype = np.dtype(self.recipe.dtype)
        self.lengths = np.array([len(document) for document in ids], dtype=np.int64)
        spans = [[(0, len(document))] for document in ids] if spans is None else spans
        self.span_ends = np.cumsum([len(document) for document in spans], dtype=np.int64)
        self.spans = np.array([span for document in spans for span in document], dtype=np.uint32).reshape(-1, 2)

    def __len__(self):
        return len(self.ids)

    def where(self, number):
        return f"memory:{number + 1}"

    def gather(self, documents, target, starts):
        for document, start in zip(documents, starts, strict=True):
            target[start : start + len(self.ids[document])] = self.ids[document]


def export(form, splits, out, num_ids=300, tokenizer="", on_progress=lambda *at: None):
    """Export documents; a plain list is the split ``train``. Return the written files by split."""
    splits = {"train": MemoryDocuments(splits, num_ids)} if isinstance(splits, list) else splits
    dtype = next(iter(splits.values())).dtype.name
    out.mkdir()
    return write_splits(splits, partial(FILES[form], out, dtype=dtype, tokenizer=tokenizer), on_progress)
