"""``open_cache``: a finished cache, with a lease on the snapshot that was current when it was opened."""

from __future__ import annotations

import os
import shlex
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import (
    CacheIncompleteError,
    StaleCacheError,
    UnsupportedModelError,
    UsageError,
)
from latentcache.fields.protocol import DescribeContext, FieldRecipe
from latentcache.fields.recipe import Differences
from latentcache.fields.registry import load
from latentcache.loader.documents import Documents
from latentcache.loader.samples import CachePart, ReadSettings, Selection
from latentcache.loader.view import View
from latentcache.plan.documents import LastChunk, Overflow, spread
from latentcache.plan.mixing import MAX_SAMPLES, Mixture
from latentcache.plan.numbers import choice, is_whole, whole
from latentcache.plan.samples import SampleIndex, times_counted
from latentcache.plan.shuffle import in_validation
from latentcache.store.remote.disk_cache import open_disk_cache
from latentcache.store.snapshot import Snapshot, open_leased

if TYPE_CHECKING:
    import torch

    from latentcache.loader.rows import Rows
    from latentcache.loader.sample_reader import SampleReader

#: Places in a row are counted in 32 bits.
_MAX_LENGTH = 2**31 - 1


class NoSampleError(UsageError, IndexError):
    """A sample that does not exist."""


class Cache(View):
    """Samples of a finished cache. Builds that end later do not change what it serves. Picklable.

    It has a lease on its snapshot until it is forgotten, so ``latentcache gc`` cannot delete it. Its loaders keep
    files open until they are closed or forgotten.
    """

    def __init__(
        self, parts: Sequence[CachePart], settings: ReadSettings, mixture: Mixture | None = None, note: str = ""
    ) -> None:
        self.parts, self.settings, self.mixture = tuple(parts), settings, mixture
        """Counts of each source in an epoch, if ``combine`` was given weights."""
        self._note = note

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """The snapshot of each combined part."""
        return tuple(part.snapshot for part in self.parts)

    @property
    def path(self) -> str:
        """The cache folder; of a combination the first one."""
        return str(self.parts[0].snapshot.paths.root)

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(self.parts[0].snapshot.fields)

    @cached_property
    def _selection(self) -> Selection:
        """The samples that have all fields. Needs no torch, as planning does not."""
        return Selection(self.parts, None, self.settings, self.mixture)

    @cached_property
    def _reader(self) -> SampleReader:
        from latentcache.loader.sample_reader import SampleReader

        return SampleReader(self._selection)

    def __len__(self) -> int:
        """Samples that a loader serves; an image at two resolutions is two. Of documents: documents."""
        if self._has_samples:
            return len(self._selection.index.bucket)
        return sum(map(len, map(self._documents, self.parts)))

    @property
    def excluded(self) -> int:
        """Samples that lack one of the fields."""
        return self._selection.excluded if self._has_samples else 0

    @property
    def buckets(self) -> dict[str, int]:
        """Samples per bucket, by its label (``512x768``: height x width, pixels); none of documents."""
        if not self._has_samples:
            return {}
        index = self._selection.index
        counts = np.bincount(index.bucket, minlength=len(index.buckets))
        return dict(zip(map(str, index.buckets), counts.tolist(), strict=True))

    @property
    def tokens(self) -> int:
        """Tokens of all documents; 0 of images."""
        packed = [name for name, rows in self.parts[0].snapshot.fields.items() if rows.spec.collate == "pack"]
        return sum(self._documents(part, name).tokens for part in self.parts for name in packed)

    @property
    def repeats(self) -> dict[int, int]:
        """Samples by how often an epoch serves each: ``{1: 90, 10: 5}``, as their data set and ``repeated`` say."""
        samples_by_times: Counter[int] = Counter()
        for part in self.parts:
            samples_by_times.update(
                times_counted(part.occurrences(part.chosen, self.settings.repeats), len(part.chosen))
            )
        return dict(sorted(samples_by_times.items()))

    def __getitem__(self, sample: int | str) -> Any:
        """Describe one sample: file, crop, caption, values, decoded tokens; for people, in a terminal or a notebook.

        Args:
            sample: Its number from 0 (a negative one counts from the end), or its name.

        Raises:
            NoSampleError: There is no such number (an IndexError).
            UsageError: There is no such name.
        """
        describe, find = (load(f"latentcache.report.sample:{name}") for name in ("sample_of", "find_sample"))
        if isinstance(sample, str):
            return describe(self.snapshots[0], find(self.snapshots[0], sample))
        count = sum(len(part.chosen) for part in self.parts)
        if not is_whole(sample, -count) or int(sample) >= count:
            raise NoSampleError(f"sample {sample!r} of {count} samples", why="they count from 0", fix="cache[0]")
        number = int(sample) % count
        starts = np.cumsum([0, *(len(part.chosen) for part in self.parts)])
        owner = int(np.searchsorted(starts, number, side="right")) - 1
        part = self.parts[owner]
        return describe(part.snapshot, int(part.chosen[number - int(starts[owner])]))

    def __repr__(self) -> str:
        times = self.repeats
        repeated = f", {sum(times.values())} without repeats" if set(times) - {1} else ""
        excluded = f", {self.excluded} excluded" if self.excluded else ""
        counts = sorted(self.buckets.items(), key=lambda item: -item[1]) if self._has_samples else []
        shapes = [f"{label}: {count}" for label, count in counts[:4]] or [f"{self.tokens} tokens"]
        more = f" and {len(counts) - 4} more buckets" if len(counts) > 4 else ""
        numbers = ", ".join(str(snapshot.number) for snapshot in self.snapshots[:3])
        return (
            f"Cache({len(self)} samples of {self.name} (snapshot {numbers}){repeated}{excluded}\n"
            f"  fields: {', '.join(self.fields)}\n  {', '.join(shapes)}{more})"
        )

    def recipe(self, field: str | None = None) -> FieldRecipe:
        """Return the recipe of a field, by default of the only one.

        Raises:
            UsageError: There is no such field, or its kind is not installed.
        """
        name = self._field(field)
        recipe = self.parts[0].snapshot.fields[name].recipe
        if recipe is None:
            raise UsageError(f"field={name!r}: its kind is not installed", fix="install the package that made it")
        return recipe

    def check(self, model: str | os.PathLike[str]) -> None:
        """Raise unless this cache was made with a model. No weights are loaded.

        Args:
            model: Folder of a VAE, a pipeline or a tokenizer, or a hub id.

        Raises:
            StaleCacheError: They differ; ``differences`` names the settings.
            ModelNotFoundError: There is nothing at this path.
            UnsupportedModelError: It is no such model, or no path.
        """
        if not isinstance(model, str | os.PathLike):
            raise UnsupportedModelError(f"a {type(model).__name__} cannot be compared", fix="give its folder")
        for snapshot in self.snapshots:
            if different := _model_differences(snapshot, model):
                raise StaleCacheError(
                    f"{snapshot.paths.root} was made with another model",
                    where=str(snapshot.paths.root),
                    why=", ".join(
                        f"{name}: {str(was)[:8] or 'none'} -> {str(now)[:8] or 'none'}"
                        for name, was, now in different
                    ),
                    fix="build the cache again with this model, or load the model that fits",
                    differences=tuple((name, str(was), str(now)) for name, was, now in different),
                )

    def split(self, validation: float) -> tuple[Cache, Cache]:
        """Training and validation part. Content decides, so no sample crosses over when data is added.

        Args:
            validation: Fraction of the samples for validation, from 0 to 1.

        Raises:
            UsageError: ``validation`` is not between 0 and 1, or the cache has weights.
        """
        self._check_no_weights("split")
        contents = (np.asarray(part.snapshot.samples.first_input.content)[part.chosen] for part in self.parts)
        held = [in_validation(content, validation) for content in contents]
        training = self._some([~chosen for chosen in held], ", training part")
        return training, self._some(held, ", validation part")

    def repeated(self, times: int) -> Cache:
        """Every sample ``times`` as often in an epoch, beside the repeats of its data set.

        Raises:
            UsageError: ``times`` is below 1, or the cache has weights.
        """
        self._check_no_weights("repeated")
        times = whole("times", times, 1, MAX_SAMPLES // max(len(self), 1))
        parts = [replace(part, multiple=part.multiple * times) for part in self.parts]
        return self._combined(parts, None, f"{self._note}, {times} times")

    def read(
        self,
        *,
        scaled: bool = True,
        augment: bool = True,
        caption_dropout: float = 0.0,
        dtype: torch.dtype | None = None,
        repeats: bool = True,
    ) -> Cache:
        """The same samples with other values, or without their repeats. Nothing is kept of an earlier ``read``.

        Args:
            scaled: Latents as the model trains on them; False gives them as they are stored. Masks are 0.0 to 1.0.
            augment: Serve what a build stored of each sample: a draw from its posterior, its random crops and flips,
                its caption variants. (seed, epoch, sample) decides. False, for validation: the mean, the first crop
                without a flip, the first caption.
            caption_dropout: Probability of the empty prompt in place of a caption, by (seed, epoch, sample); for all
                embeddings of the sample together.
            dtype: Floating type of the values; by default the type they are stored in.
            repeats: Serve a sample as often in an epoch as its data set says (``10_cats/`` of kohya: ten times).
                False for once.

        Raises:
            UsageError: A value is not allowed, the cache does not hold it, or ``repeats`` of a cache with weights.
        """
        settings = ReadSettings(
            scaled=bool(scaled),
            augment=bool(augment),
            caption_dropout=caption_dropout,
            dtype=dtype,
            repeats=bool(repeats),
            checksum=self.settings.checksum,
        )
        if settings.repeats != self.settings.repeats:
            self._check_no_weights("read(repeats=)")
        view = Cache(self.parts, settings, self.mixture, self._note)
        if settings.caption_dropout:
            view._reader_of(None)  # raises an error if there is no empty prompt
        return view

    def prompt(self, text: str = "") -> dict[str, torch.Tensor]:
        """Embeddings (1, ...) of the empty prompt (``build --empty-prompt``), or of that of ``--negative-prompt``.

        Raises:
            UsageError: The cache does not hold this prompt.
        """
        return self._reader.prompt(text)

    def rows(
        self,
        *,
        pack: int | None = None,
        pad: int | None = None,
        chunk: int | None = None,
        overflow: Overflow | None = None,
        last_chunk: LastChunk = "keep",
        cross_document: bool = True,
        field: str | None = None,
    ) -> Rows:
        """Documents as rows of one length. Give one of ``pack``, ``pad`` and ``chunk``: tokens in a row.

        Args:
            pack: Several documents per row, as few rows as best-fit-decreasing over all of them finds; they do not
                attend to each other.
            pad: One document (or piece of one) per row, in their order.
            chunk: All documents in their order as one string, cut into rows.
            overflow: Policy of ``pack`` and ``pad`` for longer documents: ``error``, ``drop``,
                ``truncate_right``, ``truncate_left`` or ``split``. By default ``error`` if only parts of documents
                carry loss (conversations), ``split`` for texts, which loses nothing.
            last_chunk: With ``chunk``: ``keep`` the incomplete last chunk as a padded row, or ``drop`` and count it.
            cross_document: With ``chunk``: tokens attend to the documents before theirs in a row, as is usual in
                pretraining; False keeps documents apart as ``pack`` does.
            field: The field that holds the documents; by default the only one.

        Raises:
            UsageError: A value is not allowed, or an option does not belong to this kind of rows.
            PlanError: A policy is ``error`` and there are such documents; file and line are named.
        """
        from latentcache.loader.rows import RowPart, Rows, RowSettings

        self._check_no_weights("rows")
        lengths = {"pack": pack, "pad": pad, "chunk": chunk}
        kinds = [kind for kind, length in lengths.items() if length is not None]
        if len(kinds) != 1:
            raise UsageError(
                f"rows({', '.join(f'{kind}={lengths[kind]}' for kind in kinds)}): needs one of pack, pad and chunk",
                fix="rows(pack=4096)",
            )
        kind = kinds[0]
        length = whole(kind, lengths[kind], 2, _MAX_LENGTH, why="a token is learned from the one before it")
        foreign = {
            "last_chunk": kind != "chunk" and last_chunk != "keep",
            "cross_document": kind != "chunk" and not cross_document,
            "overflow": kind == "chunk" and overflow is not None,
        }
        for name in filter(foreign.get, foreign):
            raise UsageError(f"not with {kind}", argument=name, fix="leave it out")
        documents = [self._documents(part, field) for part in self.parts]
        first = documents[0]
        settings = RowSettings(
            kind=kind,
            field=first.field,
            recipe_id=first.snapshot.fields[first.field].recipe_id,
            length=length,
            pad_id=first.pad_id,
            overflow=overflow or ("error" if first.learns_parts else "split"),
            last_chunk=last_chunk,
            cross_document=bool(cross_document),
        )
        rows = Rows([RowPart(part, settings, self.name) for part in documents], settings)
        rows._warn()
        return rows

    def documents(self, field: str | None = None) -> Documents:
        """Whole documents of a field, each once, for exports.

        Raises:
            UsageError: There is no such field, or several caches are combined.
        """
        if len(self.parts) > 1:
            raise UsageError("documents of a combination of caches", fix="use each cache")
        return self._documents(self.parts[0], field, repeats=False)

    def __reduce__(self) -> Any:
        return Cache, (self.parts, self.settings, self.mixture, self._note)

    @property
    def name(self) -> str:
        """Names of the folders, without ``.latentcache``, and the samples that were chosen of them."""
        roots = [snapshot.paths.root.absolute() for snapshot in self.snapshots]
        names = [path.name.removesuffix(".latentcache") for path in roots]
        return " + ".join(names[:3]) + (" + ..." if len(names) > 3 else "") + self._note

    @property
    def _has_samples(self) -> bool:
        """True if a field is served as it is: not documents."""
        return any(field.spec.collate != "pack" for field in self.parts[0].snapshot.fields.values())

    def _index_of(self, fields: Sequence[str] | None) -> SampleIndex:
        return self._selected(fields).index

    def _selected(self, fields: Sequence[str] | None) -> Selection:
        return self._selection if fields is None else Selection(self.parts, fields, self.settings, self.mixture)

    def _reader_of(self, fields: Sequence[str] | None) -> SampleReader:
        from latentcache.loader.sample_reader import SampleReader

        return self._reader if fields is None else SampleReader(self._selected(fields))

    def _of_snapshot(self, number: int) -> Cache | None:
        """All samples of another snapshot, served likewise; None if samples were chosen or combined."""
        part = self.parts[0]
        if len(self.parts) > 1 or part.samples is not None or self.mixture is not None:
            return None
        snapshot = open_leased(part.snapshot.paths.root, number, part.snapshot.disk_cache)
        part = replace(part, snapshot=snapshot)
        return self._combined([part], None, self._note)

    def _documents(self, part: CachePart, field: str | None = None, *, repeats: bool = True) -> Documents:
        """The documents of a part, each as often as an epoch serves it: all once, then those that are repeated."""
        samples = part.samples
        times = part.occurrences(part.chosen, self.settings.repeats) if repeats else None
        if times is not None:  # a copy right after its document would be read off it in a chunk
            again = spread(np.zeros_like(times), times)
            samples = np.repeat(part.chosen, times)[np.argsort(again, kind="stable")]
        return Documents(part.snapshot, self._field(field, "pack"), samples=samples, checksum=self.settings.checksum)

    def _field(self, field: str | None, collate: str = "") -> str:
        """The field that is named, or the only one."""
        fields = self.parts[0].snapshot.fields
        if field is not None and field not in fields:
            raise UsageError(f"field={field!r}: unknown", fix=f"use one of {', '.join(fields)}")
        names = [name for name, rows in fields.items() if not collate or rows.spec.collate == collate]
        if field is None and len(names) != 1:
            problem = "several fields hold documents" if collate else "the cache has several fields"
            raise UsageError(
                f"field=None: {problem}" if names else "no field holds documents",
                fix=f"field={(names or list(fields))[0]!r}" if names else "use cache.loader(...)",
            )
        return field or names[0]

    def _combined(self, parts: Sequence[CachePart], mix: Mixture | None, note: str = "") -> Cache:
        return Cache(parts, self.settings, mix, note)

    def _check_alike(self, other: Cache) -> None:
        """Fields with equal recipes, and equal read settings, can be in one batch."""
        first = self.snapshots[0]
        if other.settings != self.settings:
            raise UsageError(
                "combine: caches with other settings", fix="open them alike, and call read after combine"
            )
        for snapshot in other.snapshots:
            if set(snapshot.fields) != set(first.fields):
                raise UsageError(
                    f"combine: {snapshot.paths.root} has the fields {', '.join(snapshot.fields)},"
                    f" {first.paths.root} has {', '.join(first.fields)}",
                    fix="build the missing fields",
                )
            for name, field in snapshot.fields.items():
                of_first = first.fields[name]
                changes = list[str]()
                # The id of a recipe does not depend on the scale and shift that a loader applies.
                affines = [rows.recipe and rows.recipe.read_time.affine for rows in (field, of_first)]
                is_same = (field.recipe_id, field.spec) == (of_first.recipe_id, of_first.spec)
                if is_same and affines[0] == affines[1]:
                    continue
                if field.recipe is not None and of_first.recipe is not None:
                    different = of_first.recipe.differences(field.recipe)
                    changes = [f"{part}: {was} and {now}" for part, was, now in different[:8]]
                raise UsageError(
                    f"combine: {name} of {snapshot.paths.root} and {first.paths.root} were made differently",
                    why=", ".join(changes),
                    fix="build both with the same settings",
                )

    def _some(self, chosen: Sequence[NDArray[np.bool_]], note: str) -> Cache:
        """The samples of each part that are chosen."""
        pairs = zip(self.parts, chosen, strict=True)
        parts = [replace(part, samples=part.chosen[which]) for part, which in pairs]
        return self._combined(parts, None, self._note + note)

    def _check_no_weights(self, method: str) -> None:
        """Raise an error for a call that would change the mixture, if there is one."""
        if self.mixture is not None:
            raise UsageError(
                f"{method} of a cache with weights",
                why="the weights hold for the samples that were combined",
                fix=f"call {method} on each cache, then combine them with the weights",
            )


def open_cache(
    path: str | os.PathLike[str],
    *,
    checksum: Literal["first", "always"] = "first",
    allow_partial: bool = False,
    snapshot: int | None = None,
    disk_cache: str | os.PathLike[str] | None = None,
    disk_cache_bytes: int | None = None,
) -> Cache:
    """Open a snapshot of a cache and take a lease on it.

    Args:
        path: The cache folder, or the URL that a cache was pushed to.
        checksum: ``first``: each entry is proven when a process first reads it. ``always``: on every read.
        allow_partial: Serve the rest of a cache that a repair removed entries from.
        snapshot: Number of the snapshot, so that all ranks open the same one; by default the current one.
        disk_cache: Folder on a local disk for the shards of a URL, which are fetched in the order the plan needs
            them. The ranks and jobs of a node share it, and later runs fetch only what is new.
        disk_cache_bytes: Limit for the shards in this folder. If they need more, give loaders a ``shuffle_block``.

    Raises:
        UsageError: An argument is not allowed.
        RemoteError: The store of a URL cannot be used.
        CacheNotFoundError: There is no cache, no finished build in it, or the snapshot is gone.
        CacheFormatError: Written by a newer version.
        CacheDamagedError: Its manifest or a column is damaged.
        CacheIncompleteError: A repair removed entries, and no build has made them again.
    """
    choice("checksum", checksum, ("first", "always"))
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise UsageError(f"path={path!r}: must be a cache folder", fix="open_cache('images.latentcache')")
    root = Path(path)
    shards = None
    if "://" in (url := os.fspath(path)):
        if disk_cache is None:
            fix = f"open_cache({url!r}, disk_cache='/nvme/images.latentcache')"
            raise UsageError("a URL needs a folder for its shards", argument="disk_cache", fix=fix)
        limit = None if disk_cache_bytes is None else whole("disk_cache_bytes", disk_cache_bytes, 1)
        root = Path(disk_cache)
        shards = open_disk_cache(url, Path(disk_cache), limit)
    elif disk_cache is not None or disk_cache_bytes is not None:
        raise UsageError("disk_cache: only for the URL of a cache", fix="leave disk_cache out")
    held = open_leased(root, None if snapshot is None else whole("snapshot", snapshot, 1), shards)
    if not (held.complete or allow_partial):
        build = f"latentcache build {shlex.quote(str(held.source['root']))} --out {shlex.quote(str(root))}"
        raise CacheIncompleteError(
            f"entries are missing from {root}",
            where=str(root),
            why=f"a repair removed damaged entries (snapshot {held.number}), and no build has made them again",
            fix=f"{build} (or open_cache(..., allow_partial=True) to train on the rest)",
        )
    samples = f"{len(held.samples)} of {held.building} samples"
    merge = "`latentcache merge PART... --out CACHE` makes the whole"
    notes = (
        (held.building, f"snapshot {held.number} of {root} has {samples}: its build had not ended"),
        (held.demo, f"{root} was made with the demo encoder: it is for trying the tool, not for training"),
        (held.part, f"{root} holds part {held.part} of its data; {merge}"),
    )
    for applies, note in notes:
        if applies:
            warnings.warn(note, stacklevel=3)
    return Cache([CachePart(held)], ReadSettings(checksum=checksum))


def _model_differences(snapshot: Snapshot, model: str | os.PathLike[str]) -> Differences:
    """(setting, cached, wanted) of the fields that a model makes; raises UnsupportedModelError if it makes none."""
    different = Differences()
    unsupported = list[UnsupportedModelError]()
    for name in snapshot.fields:
        kind, recipe, provenance = (getattr(snapshot.fields[name], part) for part in ("kind", "recipe", "provenance"))
        if kind is None or recipe is None:
            raise UnsupportedModelError(f"field {name}: its kind is not installed", fix="install its package")
        settings = kind.settings(**{kind.encoder_setting: os.fspath(model)})
        context = DescribeContext(recipe=recipe, provenance=provenance, check=True)
        try:
            described = load(kind.describer)(settings, context)
        except UnsupportedModelError as error:
            unsupported.append(error)
            continue
        different += recipe.differences(described.recipe, (provenance, described.provenance))
    if len(unsupported) == len(snapshot.fields):
        raise unsupported[0]
    return different
