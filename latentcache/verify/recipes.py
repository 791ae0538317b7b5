"""Compare a snapshot with its recipes, with today's plan, and with what an encoder gives today, for any kind.

Samples are encoded by the caller, one field after the other, so that one model is loaded at a time. The field's kind
decides what noise is (``kind.compare``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EncoderError, LatentcacheError, StoreError, UsageError
from latentcache.fields.protocol import DescribeContext, Described, Difference, Failure, FieldPlan, Group, Made
from latentcache.fields.registry import load
from latentcache.fields.table import Rejected
from latentcache.sources.causes import hint_for
from latentcache.store.reader import EntryReader
from latentcache.store.snapshot import FieldRows, Snapshot
from latentcache.verify.entries import BadEntries, Check, Depth, View, confidence, words
from latentcache.verify.findings import PROBLEMS, RecipeChange, Reencoded


def described_now(
    snapshot: Snapshot, settings: Mapping[str, Any], depth: Depth
) -> tuple[Mapping[str, Described], Mapping[str, str]]:
    """The fields as a build with these settings would make them now, and why the encoder of some is not compared.

    Files are read, nothing is loaded.
    """
    for name in settings:
        if name not in snapshot.fields:
            held = ", ".join(snapshot.fields)
            fix = "leave its settings out, or build it first"
            raise UsageError(f"the cache has no field {name}", why=f"its fields: {held}", fix=fix)
    fields, not_compared = dict[str, Described](), dict[str, str]()
    leads_first = sorted(snapshot.fields.items(), key=lambda pair: bool(pair[1].kind and pair[1].kind.follows))
    for name, rows in leads_first:
        if rows.kind is None or rows.recipe is None or not rows.kind.describer:
            continue
        default = rows.kind.settings()
        wanted = rows.kind.resolved(settings, snapshot.samples, held=True) or default
        lost = Described(recipe=rows.recipe, label="", provenance=rows.provenance)
        if depth.untrusted and wanted == default:  # the manifest would name a path
            not_compared[name] = f"{rows.kind.encoder} was not checked (this cache is untrusted)"
            fields[name] = lost
            continue
        context = DescribeContext(
            recipe=rows.recipe,
            provenance={} if depth.untrusted else rows.provenance,
            device=depth.device,
            check=True,
            followed=fields.get(rows.kind.follows),
        )
        try:
            described: Described = load(rows.kind.describer)(wanted, context)
        except EncoderError as error:
            if wanted != default or depth.reencode:
                raise
            word = rows.provenance.get(rows.kind.encoder_setting, "")
            not_compared[name] = f"{rows.kind.encoder} {word} was not checked ({error.args[0]}); {error.fix}"
            fields[name] = lost
            continue
        is_same = wanted == default and described.recipe.recipe_id == rows.recipe.recipe_id
        fields[name] = replace(described, recipe=rows.recipe) if is_same else described
    return fields, not_compared


def check_recipes(check: Check, requested: Mapping[str, Described]) -> tuple[RecipeChange, ...]:
    """Note every sample of a field as stale whose recipe is not the one that was asked for."""
    changes: list[RecipeChange] = []
    for name, described in requested.items():
        view = check.views[name]
        kind, recipe, wanted = view.rows.kind, view.rows.recipe, described.recipe
        if kind is None or recipe is None or recipe == wanted:
            continue
        differences = recipe.differences(wanted, (view.rows.provenance, described.provenance))
        if not differences and recipe.recipe_id == wanted.recipe_id:
            continue
        differences = differences or [("recipe_id", recipe.recipe_id.hex(), wanted.recipe_id.hex())]
        of_field = [RecipeChange(field=name, setting=s, cached=old, requested=new) for s, old, new in differences]
        changes += of_field
        first = min(of_field, key=lambda change: change.requested in (None, [], ()))
        reason = f"recipe:{first.setting}"
        every = np.unique(view.sample)
        sides: dict[str, Any] = {"expected": _both(of_field, "requested"), "found": _both(of_field, "cached")}
        check.findings.add("stale", reason, every, field=name, **sides)
    return tuple(changes)


def check_plans(check: Check) -> None:
    """Compare the rows of each field with what its kind plans for the same samples today."""
    table = check.findings.table
    for view in check.views.values():
        kind, recipe = view.rows.kind, view.rows.recipe
        lost = set[int]()
        rejected = dict[int, Rejected]()
        if kind is not None and recipe is not None:
            try:
                plan = kind.plan(table, recipe)
            except (LatentcacheError, ValueError, TypeError, KeyError) as error:
                every = np.flatnonzero(check.samples)
                text = f"{type(error).__name__}: {error}"
                check.findings.add("unverifiable", "plan", every, field=view.name, found=text)
                continue
            rejected = dict(plan.rejected)
            if not view.rows.holds(plan, table):
                lost = _moved(check, view, plan, plan.keys(kind, kind.content(table), recipe))
        _check_absent(check, view, lost, rejected)


def _moved(check: Check, view: View, plan: FieldPlan, keys: NDArray[np.uint8]) -> set[int]:
    """Note samples with other items than planned; gives those that only lack planned ones."""
    known = keys.any(axis=1)
    planned, stored = _marks(plan.sample[known], keys[known]), _marks(view.sample, view.rows.row_keys())
    absent = np.unique(plan.sample[known][~np.isin(planned, stored)])
    extra = np.unique(view.sample[~np.isin(stored, planned)])
    moved = extra[check.samples[extra]]
    check.findings.add(
        "stale",
        "geometry-changed",
        moved,
        field=view.name,
        expected=partial(_labels, moved, plan.sample, plan.group, plan.groups),
        found=partial(_labels, moved, view.sample, view.rows.group, view.rows.groups),
        hint="today's rules that place or cut this sample give another item",
    )
    return set(absent.tolist()) - set(extra.tolist())


def _labels(moved: NDArray[np.int64], sample: Any, group: Any, groups: Sequence[Group], position: int) -> str:
    """The groups of one of the samples that moved."""
    return ", ".join(
        sorted({groups[number].label for number in np.asarray(group)[sample == moved[position]].tolist()})
    )


def _check_absent(check: Check, view: View, planned: set[int], rejected: Mapping[int, Rejected]) -> None:
    """Samples that lack items of a field: rejected by it, or lost."""
    table = check.findings.table
    recorded = {item.label: item for item in check.snapshot.rejected}
    without = np.flatnonzero(np.bincount(view.sample, minlength=len(table)) == 0)
    numbers = np.array(sorted({*without.tolist(), *planned}), dtype=np.int64)
    lost = []
    for number, name in zip(numbers.tolist(), table.names.take(numbers), strict=True):
        if not check.samples[number]:
            continue
        item = recorded.get(name) or rejected.get(number)
        if item is not None:
            sample = np.array([number])
            hint = item.hint or hint_for(item.reason)
            check.findings.add("quarantined", item.reason, sample, field=view.name, found=item.detail, hint=hint)
        elif number in planned or (view.rows.kind is None and not check.snapshot.complete):
            lost.append(number)
    check.findings.add(
        "missing", "entry-lost", np.array(lost, dtype=np.int64), field=view.name, found="the snapshot lacks it"
    )


def _marks(sample: NDArray[np.integer], key: NDArray[np.uint8]) -> NDArray[Any]:
    """(n,) one item per row of sample and key."""
    number = np.ascontiguousarray(sample.astype(">u4")).view(np.uint8).reshape(-1, 4)
    return np.ascontiguousarray(np.concatenate([number, key], axis=1)).view(f"S{4 + key.shape[1]}").ravel()


def _both(changes: list[RecipeChange], side: str) -> str:
    """The values of one side, with the names of the settings if there are several."""
    values = [(change.setting, getattr(change, side)) for change in changes]
    texts = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values]
    return texts[0][1][:80] if len(texts) == 1 else ", ".join(f"{name} {text[:80]}" for name, text in texts)


#: Encode the inputs of rows of a field again, in any order, with a described encoder: each row, its item or why there
#: is none (``source-changed``: the input is another one), and the device.
Reencode = Callable[..., Iterable[tuple[int, Made | Failure, str]]]


def reencode_samples(
    check: Check,
    reencode: Reencode,
    descriptions: Mapping[str, Described],
    root: Path,
) -> Reencoded:
    """Encode some of the chosen samples without a problem again, all fields of each, and note what differs."""
    fine = check.samples & ~check.findings.of(*PROBLEMS)
    depth = check.depth
    # In an order of its own: one fine sample more or less moves no other in or out but the last.
    order = np.random.default_rng(depth.seed).permutation(len(fine))
    drawn = order[fine[order]][: depth.reencode]
    differences = list[Difference]()
    failed = set[int]()
    device = ""
    reader = EntryReader(check.paths, check.snapshot)
    try:
        for view in check.views.values():
            known = view.rows.kind is not None and view.rows.recipe is not None
            rows = np.flatnonzero(np.isin(view.sample, drawn)).tolist()
            described = descriptions.get(view.name)
            arguments = check.snapshot, root, view.name, rows, described
            for row, item, used in reencode(*arguments, device=depth.device) if known and rows else ():
                device = used or device
                difference = _compare(check, reader, view, row, item, device)
                if difference is None:
                    failed.add(int(view.sample[row]))
                else:
                    differences.append(difference)
    finally:
        reader.close()
    samples = max(len(drawn) - len(failed), 0)
    drifted = sum(difference.differs for difference in differences)
    return Reencoded(
        asked=depth.reencode,
        seed=depth.seed,
        samples=samples,
        entries=len(differences),
        drifted=drifted,
        device=device,
        largest=max((difference.largest for difference in differences), default=0.0),
        mean=max((difference.mean for difference in differences), default=0.0),
        confidence=confidence(samples, int(fine.sum())) if samples and not drifted and not failed else "",
    )


def _compare(
    check: Check, reader: EntryReader, view: View, number: int, item: Made | Failure, device: str
) -> Difference | None:
    """Compare a stored item with the item that was encoded now; None if that is not possible."""
    rows = view.rows
    row = np.array([number])
    sample = view.sample[row]
    entry = view.entry[row]
    if isinstance(item, Failure):
        if item.reason == "source-changed":
            check.findings.add("stale", "source-changed", sample, found=item.detail)
        else:
            text = f"{item.reason}: {item.detail}" if item.detail else item.reason
            check.findings.add("unverifiable", "not-encoded", sample, field=view.name, found=text)
        return None
    try:
        stored = reader.read(view.name, number)
    except StoreError as error:
        is_unread = type(error) is StoreError or getattr(error, "reason", "") == "io-error"
        category, reason = ("unverifiable", "io-error") if is_unread else ("corrupt", "payload")
        check.note(view, category, reason, entry, found=words(error))
        return None
    assert rows.kind is not None
    assert rows.recipe is not None
    difference = rows.kind.compare(stored, item.array, {**rows.noise, "device": device}, rows.recipe)
    other = [name for name, value in item.columns.items() if not _equal(_stored_column(rows, name, number), value)]
    if difference.differs or other:
        # A block holds items of other samples: it has to go, and only this sample has drifted.
        check.bad.append(BadEntries(view.name, "drift", entry))
        text = difference.detail if difference.differs else f"other values of {', '.join(other)}"
        keys = rows.row_keys(row)
        check.findings.add("drift", "reencoded", sample, field=view.name, keys=keys, expected="as stored", found=text)
    return replace(difference, differs=bool(difference.differs or other))


def _equal(stored: NDArray[Any], now: Any) -> bool:
    """Exactly; measurements, which are floats, within a tenth."""
    return np.allclose(stored, now, rtol=0.1) if stored.dtype.kind == "f" else np.array_equal(stored, now)


def _stored_column(rows: FieldRows, name: str, row: int) -> NDArray[Any]:
    """The stored value of one of a kind's own columns."""
    if name in rows.ragged_columns:
        ends, values = rows.ragged_columns[name]
        return np.asarray(values[int(ends[row - 1]) if row else 0 : int(ends[row])])
    return np.asarray(rows.columns[name][row]) if name in rows.columns else np.empty(0)
