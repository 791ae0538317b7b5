"""``combine``: several caches, or several views of rows, as one; with weights in exact proportions.

Guarantee: counts are whole numbers that are known before training and exact in every epoch (``plan.mixing``).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from latentcache.errors import UsageError
from latentcache.loader.cache import Cache
from latentcache.plan.mixing import Weight, mixture
from latentcache.plan.numbers import choice, several

if TYPE_CHECKING:
    from latentcache.loader.rows import Rows

Unit = Literal["rows", "tokens", "documents"]
Served = TypeVar("Served", "Cache", "Rows")


def combine(
    sources: Sequence[Served],
    *,
    weights: Sequence[Weight] | None = None,
    samples: int | None = None,
    by: Unit = "rows",
) -> Served:
    """Several caches, or several views of rows, as one: a batch may hold samples of any of them.

    Args:
        sources: Caches (also parts and repeats of them), or rows; all of one type.
        weights: Fraction of the samples of an epoch that each gets, in any unit. Without them every sample is served
            once. Counts are exact in every epoch; over the epochs all samples of a source are served equally often.
        samples: Samples (or rows) of an epoch. By default the source with the most for its weight is served exactly
            once, and so every sample of the others at least once.
        by: With rows: what weights count, ``rows``, ``tokens`` or ``documents``.

    Raises:
        UsageError: Nothing to combine, fields or settings that differ (they are named), a value that is not allowed,
            or a source that has weights itself.
    """
    found: list[Any] = several("sources", sources, fix="combine([one, other])")
    choice("by", by, ("rows", "tokens", "documents"))
    rows = not any(isinstance(one, Cache) for one in found)
    if not found or not (_are_rows(found) if rows else all(isinstance(one, Cache) for one in found)):
        raise UsageError(
            "combine: needs caches, or rows, and not both", fix="combine([open_cache(a), open_cache(b)])"
        )
    if any(one.mixture for one in found):
        raise UsageError("combine: a source has weights itself", fix="combine the caches that it is made of")
    if weights is None and samples is not None:
        raise UsageError(f"samples={samples!r}: only allowed with weights", fix="pass weights too, as [1, 1]")
    _check_rows(found) if rows else _check_caches(found)
    mix = None
    if weights is not None:
        given = _per_row(found, weights, by) if rows else weights
        mix = mixture([one.name for one in found], list(map(len, found)), given, samples=samples)
    parts = [part for one in found for part in one.parts]
    if rows:
        return type(found[0])(parts, found[0].settings, mixture=mix)  # type: ignore[no-any-return]
    first = found[0]
    return Cache(parts, settings=first.settings, checksum=first.checksum, mixture=mix)  # type: ignore[return-value]


def _are_rows(found: Sequence[Any]) -> bool:
    from latentcache.loader.rows import Rows

    return all(isinstance(one, Rows) for one in found)


def _check_caches(caches: Sequence[Cache]) -> None:
    """Caches that can be in one batch: the same fields with equal recipes, and equal read settings."""
    first = caches[0].snapshots[0]
    for cache in caches:
        if cache.settings != caches[0].settings:
            raise UsageError("combine: caches with different read(...) settings", fix="call read after combine")
        for snapshot in cache.snapshots:
            if set(snapshot.fields) != set(first.fields):
                raise UsageError(
                    f"combine: {snapshot.paths.root} has the fields {', '.join(snapshot.fields)},"
                    f" {first.paths.root} has {', '.join(first.fields)}",
                    fix="build the missing fields",
                )
            for name, field in snapshot.fields.items():
                other = first.fields[name]
                if field.recipe_id == other.recipe_id and field.spec == other.spec:
                    continue
                kind, changes = field.kind, ""
                if kind is not None and field.recipe is not None and other.recipe is not None:
                    different = kind.differences(other.recipe, field.recipe)
                    changes = ", ".join(f"{part}: {was} and {now}" for part, was, now in different[:8])
                raise UsageError(
                    f"combine: {name} of {snapshot.paths.root} and {first.paths.root} were made differently",
                    why=changes,
                    fix="build both with the same settings",
                )


def _check_rows(views: Sequence[Rows]) -> None:
    different = sorted({str(view.settings) for view in views})
    if len(different) > 1:
        raise UsageError(
            "combine: these rows cannot be in one batch",
            why=" and ".join(different),
            fix="make them of caches of one tokenizer, with the same options",
        )


def _per_row(views: Sequence[Rows], weights: Sequence[Weight], by: Unit) -> list[Weight]:
    """Weights of rows, by what a row of each view holds on average."""
    given: list[Weight] = several("weights", weights, fix="weights=[3, 1]")
    for number, (view, weight) in enumerate(zip(views, given, strict=False)):
        documents = sum(len(np.unique(plan.document)) for plan in view.row_plans)
        held = {"rows": len(view), "tokens": view.tokens, "documents": documents}[by]
        try:
            given[number] = Fraction(str(weight)) * len(view) / held
        except (ValueError, ZeroDivisionError):
            continue  # refused with the others
    return given
