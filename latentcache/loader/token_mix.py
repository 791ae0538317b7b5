"""Several views as one, in given shares: which rows an epoch serves is decided before training and exact.

The schedule is that of ``combine_caches``: whole numbers of rows by largest remainder, turns that rotate over the
epochs; at which of several lengths a row is served is decided for each epoch. Shares of documents or tokens are
turned into shares of rows by what a row of each view holds on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, get_args

import numpy as np

from latentcache.errors import UsageError
from latentcache.identity.content import content_hash
from latentcache.loader.token_view import TokenView
from latentcache.plan.given_numbers import several, whole
from latentcache.plan.names import name_of, told_apart
from latentcache.plan.weights import Repeats, Weight, mixture, refuse_without_weights

Unit = Literal["rows", "documents", "tokens"]


def combine_views(
    views: Sequence[TokenView],
    *,
    weights: Sequence[Weight] | None = None,
    rows: int | None = None,
    by: Unit = "rows",
    names: Sequence[str] | None = None,
    max_repeat: Repeats | None = None,
) -> TokenView:
    """Several views as one: a batch may hold rows of any of them.

    Args:
        views: Of one kind and length; of parts of one cache (``of_source``) or of several with one tokenizer.
        weights: Share of an epoch that each view gets, in any unit. Without them every row is served once. Counts of
            rows are exact in every epoch, also at several ``lengths``; over the epochs all rows of a view are served
            equally often. Only what fills no batch at the end of an epoch is repeated or left out.
        rows: Rows in an epoch. By default the view with the most rows for its share is served exactly once.
        by: What the shares are of: ``rows``, ``documents`` or ``tokens``; the last two to the nearest row, and as
            rows hold on average.
        names: What each is called, in ``plan(...).datasets``, in ``loader.served()`` and in checkpoints; which of its
            rows have an extra turn follows from its name, and not from what else is combined. By default the last
            part of the path of its cache, without ``.latentcache``, and the sources that were chosen of it.
        max_repeat: How often an epoch may serve a view over, at most: one number or one for each. More is refused,
            with the longest epoch that keeps to it. What fills a step (``small_buckets``) is beyond it.

    Raises:
        UsageError: No view, views that cannot stand in one batch, weights or names that cannot be; ``rows``,
            ``names`` or ``max_repeat`` without weights; more of a view than ``max_repeat``; a view that has weights
            itself.
    """
    views = several("views", views, fix="combine_views([one, other])")
    _check(views)
    if by not in get_args(Unit):
        raise UsageError(f"unknown by={by!r}", fix=f"use one of {', '.join(get_args(Unit))}")
    if weights is None:
        refuse_without_weights(rows=rows, names=names, max_repeat=max_repeat)
        mix = None
    else:
        rows = None if rows is None else whole("rows", rows, 0, why="an epoch has a whole number of them")
        called = names or told_apart([_called(view) for view in views])
        counts, shares = [len(view) for view in views], _shares(views, weights, by)
        mix = mixture(counts, shares, samples=rows, names=called, max_repeat=max_repeat)
    return TokenView(
        [part for view in views for part in view.parts],
        views[0].settings,
        recipe=views[0].recipe,
        identity=content_hash(b"".join(view.identity for view in views)),
        mixture=mix,
        generation=views[0].generation,
    )


def _check(views: Sequence[TokenView]) -> None:
    if not views or not all(isinstance(view, TokenView) for view in views):
        raise UsageError("no views to combine", fix="name at least one, each made by a TokenCache")
    if any(view.mixture for view in views):
        raise UsageError("combine_views of a view with weights", fix="combine the views it is made of")
    different = sorted({str((view.settings, view.recipe.identity())) for view in views})
    if len(different) > 1:
        raise UsageError(
            "these views cannot stand in one batch",
            why=" and ".join(different),
            fix="make them of caches of one tokenizer, with the same words",
        )


def _called(view: TokenView) -> str:
    """The last part of the path of its cache, and the sources that were chosen of it."""
    path, said, sources = view.name.partition(": ")
    return (name_of(path) if path else "view") + said + sources


def _shares(views: Sequence[TokenView], weights: Sequence[Weight], by: Unit) -> list[Weight]:
    """Shares of rows, by what a row of each view holds on average."""
    shares: list[Weight] = several("weights", weights, fix="one for each view, for example [3, 1]")
    for number, (view, weight) in enumerate(zip(views, shares, strict=False)):
        held = len(view) if by == "rows" else view.tokens if by == "tokens" else _documents(view)
        try:
            shares[number] = Fraction(str(weight)) * len(view) / held
        except (ValueError, ZeroDivisionError):
            continue  # refused with the others
    return shares


def _documents(view: TokenView) -> int:
    return sum(len(np.unique(part.plan.document)) for part in view.parts)
