"""What ``info`` says of the rows of a token cache: how many each length would have, and how many are planned.

Guarantee: numbers of rows are those of the views, by the same functions; no id is read and no tokenizer is opened.
Cost: of packed rows a second for each million documents, so of more than two million only a bound is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from latentcache.cli.console import SHOWN, counted, out, table

if TYPE_CHECKING:
    from pathlib import Path

    from latentcache.plan.rows import Corpus
    from latentcache.store.documents import Documents
    from latentcache.store.token_generation import TokenGeneration

#: Row lengths that ``info`` counts rows for.
ROW_LENGTHS = (512, 1024, 2048, 4096, 8192)
#: Documents up to which packed rows are counted by packing them.
PACKED_DOCUMENTS = 2_000_000


def row_facts(documents: Documents) -> list[dict[str, Any]]:
    """For each common length the rows of padded, packed and block views, and what does not fit.

    Args:
        documents: Of the generation.
    """
    from latentcache.plan.rows import Corpus

    corpus = Corpus(
        length=documents.length, span_ends=documents.span_ends, spans=documents.spans, where=documents.where
    )
    return [_facts(corpus, length) for length in ROW_LENGTHS]


def _facts(corpus: Corpus, length: int) -> dict[str, Any]:
    import numpy as np

    lengths = corpus.length.astype(np.int64)
    fits = lengths <= length
    inside, rows, total = int(lengths[fits].sum()), int(fits.sum()), int(lengths.sum())
    packed, tokens = _packed(corpus, length)
    return {
        "max_length": length,
        "too_long": len(lengths) - rows,
        "too_long_tokens": total - inside,
        "cut_tokens": int((lengths[~fits] - length).sum()),
        "padded_rows": rows,
        "padded_fill": round(inside / (rows * length), 4) if rows else 0.0,
        "packed_rows": packed,
        "packed_fill": None if packed is None else round(tokens / (packed * length), 4) if packed else 0.0,
        "packed_rows_at_least": -(-inside // length),
        "block_rows": -(-total // length),
    }


def _packed(corpus: Corpus, length: int) -> tuple[int | None, int]:
    """Rows of the packed view of documents that fit, and tokens in them; None where there are too many documents."""
    from latentcache.plan.row_kinds import packed_rows

    if len(corpus.length) > PACKED_DOCUMENTS:
        return None, 0
    plan = packed_rows(corpus, length, overflow="drop", idle="drop")
    return len(plan), int(plan.length.sum(dtype="int64"))


def planned_rows(cache: Path, generation: TokenGeneration) -> list[dict[str, Any]]:
    """The packed views that were planned of this generation's documents and are kept in the cache.

    Args:
        cache: Its folder.
        generation: The current one.
    """
    from latentcache.store.layout import CacheLayout
    from latentcache.store.plans import PlanFolder

    found = []
    for facts, columns in PlanFolder(CacheLayout(cache)).kept():
        if facts.get("documents") != generation.fingerprint:
            continue
        rows, tokens, length = len(columns["ends"]), int(columns["length"].sum(dtype="int64")), facts["max_length"]
        found.append(
            {
                "kind": facts["kind"],
                "max_length": length,
                "overflow": facts.get("overflow", ""),
                "whole": not facts["chosen"],
                "rows": rows,
                "tokens": tokens,
                "fill": round(tokens / (rows * length), 4) if rows else 0.0,
            }
        )
    return sorted(found, key=lambda one: (one["max_length"], one["kind"], one["overflow"], not one["whole"]))


def show_rows(payload: dict[str, Any]) -> None:
    """Sources, rows and plans for people."""
    sources = payload["sources"]
    if len(sources) > 1:
        lines: list[tuple[object, ...]] = [("source", "documents", "tokens")]
        lines += [(one["name"], one["documents"], f"{one['tokens']:,}") for one in sources[:SHOWN]]
        _table(lines)
        if len(sources) > SHOWN:
            out(f"  ... and {len(sources) - SHOWN} more (all of them with --json)")
    rows: list[tuple[object, ...]] = [
        ("rows of", "padded", "filled", "packed", "filled", "too long", "cut to fit", "blocks")
    ]
    for one in payload["rows"]:
        packed, least = one["packed_rows"], one["packed_rows_at_least"]
        cells = (f"{least} or more", "") if packed is None else (packed, f"{one['packed_fill']:.1%}")
        cut = f"{one['cut_tokens']:,} tokens"
        padded = (one["padded_rows"], f"{one['padded_fill']:.1%}")
        rows.append((one["max_length"], *padded, *cells, one["too_long"], cut, one["block_rows"]))
    _table(rows)
    for plan in payload["plans"]:
        part = "" if plan["whole"] else " of a part"
        rows_of = f"{counted(plan['rows'], 'row')} of {plan['max_length']}, {plan['fill']:.1%} filled"
        out(f"planned{part}: {plan['kind']}, overflow {plan['overflow']}: {rows_of}")
    out("one epoch is rows / (batch size x ranks) steps, rounded up, before accumulation")


def _table(rows: list[tuple[object, ...]]) -> None:
    for line in table(rows):
        out(f"  {line}")
