"""Images of a layout: which files are samples, and their captions, in columns.

One code path for every layout (``layouts``): a set is a folder whose images are samples, with caption files beside
them, or a table whose rows are. Images are not opened here. Cost: one scandir per folder, one stat per image and
caption file, one read per caption file that is new or may have changed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, count_of
from latentcache.fields.captions import samples_with_several
from latentcache.fields.focus import FOCUS
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, Rejected, SampleTable, stat_numbers
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.stat import StatMemo
from latentcache.sources.archives.entries import Archives
from latentcache.sources.archives.members import SPAN, hashed_images, places
from latentcache.sources.archives.tars import TAR
from latentcache.sources.captions import CaptionFiles, Chosen
from latentcache.sources.causes import counted, rejected
from latentcache.sources.known import (
    Known,
    Scan,
    Scanned,
    fold_reads,
    match_names,
    memo_row,
    prefixed_strings,
    strings_of,
    take_rows,
)
from latentcache.sources.layouts.kohya import balanced
from latentcache.sources.layouts.partners import ENDINGS, Partners
from latentcache.sources.layouts.sets import CaptionRule, ImageSet, Layout
from latentcache.sources.part import Part
from latentcache.sources.table import Listed, listed_images
from latentcache.sources.walk import (
    CAPTION_EXTENSIONS,
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    Level,
    Walk,
    common_endings,
    extension_of,
    in_order,
)

#: Most repeats of a sample.
MAX_REPEATS = 65535
#: What an image without a caption is counted as.
NO_CAPTION = "none"
_SET_COLUMNS = ("repeats", "image_set", FOCUS, SPAN)
_PLAIN_RULE = CaptionRule()
#: In the names of masks and control images that are beside their images.
_ASIDE = "label."
_BLOCK = 1 << 14


@dataclass(slots=True, kw_only=True)
class Found:
    """What a scan of images found beside the samples; ``inspect`` prints it."""

    captions: dict[str, int] = field(default_factory=dict)
    """Where captions are from -> how many: ``sidecar .txt``, ``class words``, ``none``."""
    first_without: str = ""
    """Name of the first image without a caption."""
    several: int = 0
    """Samples with more than one caption."""
    set_samples: tuple[int, ...] = ()
    """Samples of each set."""

    def count(self, sets: Sequence[ImageSet], chosen: Chosen, texts: Strings, names: Strings) -> None:
        """Count the samples of each set, and where their captions are from."""
        length, numbers = np.diff(texts.ends, prepend=0), {NO_CAPTION: 0}
        source = np.zeros(len(length), dtype=np.int32)

        def note(rows: NDArray[np.bool_], word: str) -> None:
            source[rows] = numbers.setdefault(word, len(numbers))

        for number, one in enumerate(sets):
            rule, mine = one.captions, chosen.owner == number
            note(mine, "file name" if rule.from_name else rule.text_source)
            for at, ending in enumerate(rule.extensions):
                note(mine & (chosen.which == at), f"sidecar {ending}")
            if chosen.line is not None:
                inside = "tar members" if one.archives == TAR else "column"
                note(mine & (chosen.line > 0), rule.table or inside)
            note(mine & (length == 0), rule.text_source if rule.is_empty_by_choice else NO_CAPTION)
        many = np.bincount(source, minlength=len(numbers)).tolist()
        words = [*list(numbers)[1:], NO_CAPTION]
        self.captions = {word: many[numbers[word]] for word in words if many[numbers[word]]}
        self.first_without = names[int((source == 0).argmax())] if many[0] else ""
        self.several = samples_with_several(texts)
        self.set_samples = tuple(np.bincount(chosen.owner, minlength=len(sets)).tolist())

    def notes(self) -> Iterator[Rejected]:
        """One note if some images have no caption and others do."""
        if self.first_without and set(self.captions) != {NO_CAPTION}:
            yield counted(self.first_without, "no-caption", self.captions[NO_CAPTION], "images have no caption")


class _Files:
    """The files of a walk: images of the part, and caption files that belong to one; others are noted."""

    def __init__(self, walk: Walk, layout: Layout, part: Part | None) -> None:
        self.walk, self._layout, self._part, self._count = walk, layout, part, 0
        self.partners, self._outside = Partners(), list[str]()
        self.owners = dict[tuple[int, ...], int]()
        self.sizes = [0] * len(layout.sets)
        """Images of each set, those of other parts too."""
        self._stats, self._rows = bytearray(), [np.empty((5, 0), dtype=np.int32)]
        self.names = prefixed_strings(self._walked())
        self.memos = np.frombuffer(self._stats, dtype=np.uint64).reshape(-1, STAT_WIDTH)
        # Of images in the byte order of their names: positions among the files, those of their captions (-1: none),
        # extension of the rule that the caption has, sets in ``owners``, place in the folder (of all parts).
        self.images, self.beside, self.which, self.owner, self.rank = np.concatenate(self._rows, axis=1)
        self._rows.clear()
        if self._outside:
            words = "images in folders that the layout does not use"
            walk.notes.add(counted(self._outside[0], "outside-sets", len(self._outside), words))
        walk.note_unused()

    def by_set(self) -> dict[int, dict[str, str]]:
        """Set -> names of the images in its folder -> the caption file beside each one, if any."""
        found = dict[int, dict[str, str]]()
        owners = {number: owners for owners, number in self.owners.items()}
        names, beside = self.names.take(self.images), self.names.take(np.maximum(self.beside, 0))
        for name, text, file, owner in zip(names, beside, self.beside.tolist(), self.owner.tolist(), strict=True):
            for number in owners[owner]:
                found.setdefault(number, {})[name] = text if file >= 0 else ""
        return found

    def _walked(self) -> Iterator[tuple[str, Sequence[str]]]:
        for level, start, stop in self.walk:
            if level.mark is None:
                level.mark, names = self._entered(level)
                yield level.prefix, names
            some = level.mark[:, start:stop]
            self._rows.append(some[:, some[0] >= 0])

    def _entered(self, level: Level) -> tuple[NDArray[np.int32], Sequence[str]]:
        """(5, n) columns of the names of a folder, position -1: it is no sample; and the names that are kept."""
        names, prefix = level.names, level.prefix
        images, is_image = common_endings(names, IMAGE_EXTENSIONS), np.ones(len(names), dtype=np.bool_)
        if not images:
            endings = [name[name.rfind(".") :] for name in names]
            images = {ending for ending in set(endings) if ending.lower() in IMAGE_EXTENSIONS}
            is_image = np.fromiter(map(images.__contains__, endings), dtype=np.bool_, count=len(names))
        owners, is_sample = self._layout.owners(prefix), is_image
        role = self._layout.role(prefix)
        if not role and not owners:
            unread = any(not folder or prefix.startswith(folder + "/") for folder in self._layout.unread)
            role = "split" if unread else "outside"
        if role or _ASIDE in "/".join(names):
            is_sample = is_image & ~self._set_aside(level, is_image, role)
        caption, which = np.full(len(names), -1, dtype=np.int64), np.full(len(names), -1, dtype=np.int8)
        kept = is_sample.copy()
        if self._part is not None:
            kept &= np.array([self._part.holds_name(prefix + name) for name in names], dtype=np.bool_)
        if not is_image.all():
            rules = (self._layout.sets[number].captions for number in owners)
            rule = next((rule for rule in rules if not rule.table), _PLAIN_RULE)
            others = _beside(names, is_sample, rule, caption, which)
            used = is_image.copy()
            used[caption[caption >= 0]] = True
            for number in np.flatnonzero(~used).tolist():
                self._unused(prefix + names[number], role, rule, others.get(number, ""))
            kept[caption[kept & (caption >= 0)]] = True
        place = np.where(kept, np.cumsum(kept) - 1 + self._count, -1)
        caption = np.where(caption >= 0, place[caption], -1)
        names = names if kept.all() else [name for name, keep in zip(names, kept.tolist(), strict=True) if keep]
        memos = np.zeros((len(names), STAT_WIDTH), dtype=np.uint64)
        memos[:, :5] = level.stats if len(names) == len(kept) else level.stats[kept]
        self._stats += memos.tobytes()
        self._count += len(names)
        owner = self.owners.setdefault(owners, len(self.owners))
        for number in owners:
            self.sizes[number] += int(is_sample.sum())
        place[~is_sample] = -1
        owner_of, rank = np.full(len(place), owner), np.cumsum(is_sample) - 1
        return np.array([place, caption, which, owner_of, rank], dtype=np.int32), names

    def _set_aside(self, level: Level, is_image: NDArray[np.bool_], role: str) -> NDArray[np.bool_]:
        """(n,) True for images that are no samples: masks, control images, those of no set."""
        found = is_image.copy() if role else np.zeros(len(is_image), dtype=np.bool_)
        for ending, word in ENDINGS.items() if not role else [("", role)]:
            for number in np.flatnonzero(is_image).tolist():
                name = level.prefix + level.names[number]
                if not name.rpartition(".")[0].endswith(ending):
                    continue
                found[number] = True
                if word == "outside":
                    self._outside.append(name)
                elif word != "split":  # the layout has a note on the split
                    self.partners.add(word, name, level.stats[number], ending)
        return found

    def _unused(self, name: str, role: str, rule: CaptionRule, other: str) -> None:
        """A caption file that belongs to no sample, or to one that has ``other``."""
        if role == "split" or name in self._layout.used:
            return
        if extension_of(name) == ".json":
            self.walk.pass_over(name)
        elif other:
            self.walk.notes.add(rejected(name, "caption-conflict", f"{other} is used"))
        else:
            detail = "its folder is in no set" if role else "no image beside it has its name"
            if not role and extension_of(name) not in rule.extensions:
                detail = f"captions are read from {', '.join(rule.extensions) or 'other places'}"
            self.walk.notes.add(rejected(name, "caption-unused", detail))


class ImageScan(Scan):
    """A scan of images that are files."""

    def __call__(self, layout: Layout) -> Scanned:
        """Every image of a layout; raises EmptySourceError, TableError or SourceError as ``scan.scan``."""
        tables = [one.captions.table for one in layout.sets if one.captions.table]
        texts = {*CAPTION_EXTENSIONS, *(ending for one in layout.sets for ending in one.captions.extensions)}
        walk = Walk(
            layout.root,
            (IMAGE_EXTENSIONS if self.videos else IMAGE_EXTENSIONS - CLIP_EXTENSIONS) | texts,
            used=layout.used.union(tables, *(one.files for one in layout.sets)),
            folders=layout.folders,
            listed=layout.listed,
        )
        files = _Files(walk, layout, None if tables else self.part)
        for note in layout.notes:
            walk.notes.add(note)
        return self._listing(layout, files, tables)

    def _listing(self, layout: Layout, files: _Files, tables: Sequence[str]) -> Scanned:
        walk, bad = files.walk, list[Rejected]()
        names, memos, chosen = files.names, files.memos, _of_folders(layout, files)
        read = list[tuple[bytes, StatMemo]]()
        if tables:
            listed = listed_images(layout, walk.root, files.by_set(), walk.said())
            names, memos, chosen = _with_rows(files, layout.sets, chosen, listed, self.part)
            bad, read = listed.rejected, list(listed.tables.values())
            for item in listed.notes:
                walk.notes.add(item)
        tables_at = len(names) - len(read)
        names, memos, further = self._with_partners(layout, files, names, memos, chosen)
        rules = [one.captions for one in layout.sets]
        reading, each = None, b"".join(rule.reading for rule in rules)
        if any(each):  # not all files are captions as they are written
            reading, there = np.zeros((len(names), HASH_BYTES), dtype=np.uint8), chosen.which >= 0
            own = np.frombuffer(each, dtype=np.uint8).reshape(-1, HASH_BYTES)[chosen.owner[there]]
            reading[chosen.caption[there]] = own
        archives = Archives(layout, len(names), bad)
        if archives.names:
            names, memos = strings_of([names, archives.names]), np.concatenate([memos, archives.memos])
            reading = np.zeros((archives.first, HASH_BYTES), dtype=np.uint8) if reading is None else reading
            reading = np.concatenate([reading, archives.readings(self)])
        held = self.held(names, memos, reading, self.rejected)
        for number, (content, memo) in enumerate(read, start=tables_at):
            held.remember(number, content, memo)
        if archives.names:
            inside = archives.samples(self, held, bad, walk.notes)
            chosen = Chosen.joined([chosen, inside])
            own, at = np.unique(chosen.image, return_inverse=True)  # by the names of files, then by members
            rank = np.argsort(sorted(range(len(own)), key=list(map(os.fsencode, names.take(own))).__getitem__))
            assert chosen.member is not None
            order = np.lexsort((chosen.member, rank[at]))
            chosen, none = chosen.take(order), np.full(len(inside.image), -1, dtype=np.int64)
            further = {name: np.concatenate([file, none])[order] for name, file in further.items()}
        captions = CaptionFiles(walk.root, names, held, rules)
        good = captions.read(chosen, bad)
        if not good.all():
            chosen, further = chosen.take(good), {name: file[good] for name, file in further.items()}
        caption = captions.column(chosen)
        found, called = Found(), _names(names, chosen, held)
        assert caption.text is not None
        found.count(layout.sets, chosen, caption.text, called)
        for item in (*found.notes(), *captions.unused_lines(chosen, caption.text)):
            walk.notes.add(item)
        images = chosen.image if chosen.member is None else chosen.image[chosen.member == 0]
        if further:
            images = np.unique(np.concatenate([images, *(file[file >= 0] for file in further.values())]))
        self._hash(walk.root, names, images, held)
        samples = _samples(names, called, held, chosen, caption, layout.sets, reading, further)
        samples = samples if chosen.member is None else self._inside(walk.root, samples, chosen, held)
        if not len(samples) and not walk.rejected and not bad and self.part is None:
            raise _nothing(walk, layout, walk.notes.all())
        rejections = in_order([*walk.rejected, *bad])
        return Scanned(samples=samples, rejected=rejections, notes=walk.notes.all(), images=found)

    def _inside(self, root: Path, samples: SampleTable, chosen: Chosen, held: Known) -> SampleTable:
        """With the contents of images in archives that are new or changed, if they are asked for."""
        image = samples.inputs["image"]
        assert chosen.known is not None
        content, inside = np.array(image.content), np.asarray(image.line) > 0
        before = np.full(len(samples), -1, dtype=np.int64)
        new = np.flatnonzero(inside & (chosen.known < 0))
        if held.table is not None and len(new):
            before[new] = match_names(samples.names.select(new), held.table.names)
        unknown = inside & ~content.any(axis=1)
        asked = unknown if self.hash_all else unknown & (before >= 0) & self.hash_known
        read = hashed_images(root, np.flatnonzero(asked), partial(places, samples), self.stopping)
        if done := {row: found for row, found in read if isinstance(found, tuple)}:
            rows, memos = np.array(list(done)), np.array([stat_numbers(memo) for _, memo in done.values()], np.uint64)
            content[rows] = np.array([np.frombuffer(one, np.uint8) for one, _ in done.values()])
            fold_reads(held.stat, np.asarray(image.file)[rows], memos)
        return replace(samples, inputs={**samples.inputs, "image": replace(image, content=content)})

    def _with_partners(
        self, layout: Layout, files: _Files, names: Strings, memos: NDArray[np.uint64], chosen: Chosen
    ) -> tuple[Strings, NDArray[np.uint64], dict[str, NDArray[np.integer]]]:
        """Files with masks and control images at the end; input -> (S,) position of each, -1: none.

        An input that the snapshot has stays one, so that a sample whose image is gone is found.
        """
        partners, before = files.partners, self.known.inputs if self.known is not None else {}
        inputs = dict.fromkeys([*partners.inputs(layout), *(set(before) - {"image", "caption"} - layout.unpaired)])
        found: dict[str, NDArray[np.integer]] = {
            name: np.full(len(chosen.image), -1, dtype=np.int64) for name in inputs
        }
        numbers = dict[str, int]()
        for row, name in enumerate(names.take(chosen.image)) if inputs else ():
            for role in inputs:
                other = partners.of(name, layout.sets[int(chosen.owner[row])], role)
                if other == name:
                    found[role][row] = chosen.image[row]
                elif other is not None:
                    found[role][row] = numbers.setdefault(other, len(names) + len(numbers))
        if self.part is None:
            for note in partners.unused(numbers, layout):
                files.walk.notes.add(note)
        if numbers:
            more = np.array([[*partners.stats[name], 0] for name in numbers], dtype=np.uint64)
            names, memos = strings_of([names, list(numbers)]), np.concatenate([memos, more])
        return names, memos, found

    def _hash(self, root: Path, names: Strings, images: NDArray[np.integer], held: Known) -> None:
        touched = images[held.touched[images] >= 0] if self.hash_known else images[:0]
        if held.table is not None:  # the images of a cache of captions were never read
            touched = touched[np.asarray(held.table.files.content)[held.touched[touched]].any(axis=1)]
        unknown = images[~held.content[images].any(axis=1)] if self.hash_all else touched
        read = hashed_images(root, unknown, lambda some: [{"path": name} for name in names.take(some)], self.stopping)
        for file, found in read:
            if isinstance(found, tuple):  # else whoever encodes it says why
                held.remember(file, *found)
        if held.table is not None and len(touched):  # those of the same content are what the snapshot says
            before = held.touched[touched]
            same = (take_rows(held.table.files.content, before) == held.content[touched]).all(axis=1)
            held.place[touched[same]] = before[same]


def _beside(
    names: Sequence[str],
    is_image: NDArray[np.bool_],
    rule: CaptionRule,
    caption: NDArray[np.int64],
    which: NDArray[np.int8],
) -> dict[int, str]:
    """Fill in the caption file of each image, and which extension it has; further files -> the one that is used."""
    order, texts = {ending: at for at, ending in enumerate(rule.extensions)}, dict[str, list[tuple[int, int]]]()
    of_names = False
    for number in np.flatnonzero(~is_image).tolist():
        stem, dot, ending = names[number].rpartition(".")
        at = order.get(dot + ending.lower(), -1)
        if at >= 0:
            texts.setdefault(stem, []).append((at, -number))  # of a.TXT and a.txt the later one wins
            of_names = of_names or ("." in stem and extension_of(stem) in IMAGE_EXTENSIONS)
    others = dict[int, str]()
    for number in np.flatnonzero(is_image).tolist() if texts else []:
        name = names[number]
        stem = name[: name.rfind(".")]
        files = sorted(texts[stem]) if stem in texts else []
        if of_names and name in texts:
            files += sorted(texts[name])
        if files:
            (which[number], first), *more = files
            caption[number] = -first
            others |= {-file: names[-first] for _, file in more} if more else {}
    return others


def _of_folders(layout: Layout, files: _Files) -> Chosen:
    """Samples of sets that are folders; of several sets each one counts, and the deepest says the caption."""
    folder_of, repeats = dict[int, int](), np.zeros(len(files.images), dtype=np.int32)
    reg = balanced(layout.sets, files.sizes)
    for owners, number in files.owners.items():
        own = [one for one in owners if not layout.sets[one].captions.table]
        folder_of[number] = own[0] if own else -1
        rows = np.flatnonzero(files.owner == number)
        for one in own:
            repeats[rows] += reg[one][files.rank[rows]] if one in reg else layout.sets[one].repeats
        other = next((one for one in own if layout.sets[one].captions != layout.sets[own[0]].captions), -1)
        images = files.images[rows] if other >= 0 else files.images[:0]
        if len(images):
            used, left = layout.sets[own[0]].label, layout.sets[other].label
            words = f"images have the captions of {used}, not those of {left}"
            files.walk.notes.add(counted(files.names[int(images[0])], "in-two-sets", len(images), words))
    owner = np.array([folder_of[number] for number in range(len(folder_of))] or [0], dtype=np.int32)[files.owner]
    which = files.which.astype(np.int8)
    chosen = Chosen(image=files.images, caption=files.beside, which=which, owner=owner, repeats=repeats)
    out = (owner >= 0) & (repeats == 0)
    if out.any():
        first = files.names[int(files.images[int(out.argmax())])]
        words = "regularization images are left out, as by the trainer"
        files.walk.notes.add(counted(first, "reg-unused", int(out.sum()), words))
    kept = (owner >= 0) & (repeats > 0)
    return chosen if kept.all() else chosen.take(kept)


def _names(names: Strings, chosen: Chosen, held: Known) -> Strings:
    if not chosen.own and len(chosen.image) == len(names) and bool((np.diff(chosen.image) == 1).all()):
        return names
    rows = held.rows_of("image", chosen.image) if chosen.known is None else chosen.known
    if held.table is not None and held.is_whole(rows):
        return held.table.names
    if not chosen.own:
        starts = range(0, len(chosen.image), _BLOCK)
        return strings_of(names.take(chosen.image[start : start + _BLOCK]) for start in starts)
    return strings_of([[a + b for a, b in zip(names.take(chosen.image), chosen.own, strict=True)]])


def repeats_of(samples: SampleTable) -> NDArray[np.uint16]:
    """(S,) how often each sample is seen in one epoch."""
    held = samples.columns.get("repeats")
    return np.ones(len(samples), dtype=np.uint16) if held is None else np.asarray(held)


def _with_rows(
    files: _Files, sets: Sequence[ImageSet], folders: Chosen, listed: Listed, part: Part | None
) -> tuple[Strings, NDArray[np.uint64], Chosen]:
    """Samples that are rows of tables beside those of folders; names and memos of their files, tables at the end."""
    places, first = dict(zip(files.names.take(files.images), files.images.tolist(), strict=True)), len(files.names)
    tables = {table: first + at for at, table in enumerate(listed.tables)}
    taken = [(places[name], *found) for name, found in listed.taken.items()]
    both = np.isin(folders.image, [image for image, *_ in taken])
    again = dict(zip(folders.image[both].tolist(), folders.repeats[both].tolist(), strict=True))
    if again:
        words = "images of a folder have the captions of a table, and the repeats of both"
        files.walk.notes.add(counted(files.names[min(again)], "in-two-sets", len(again), words))
    rows = Chosen(
        image=np.array([image for image, *_ in taken], dtype=np.int64),
        caption=np.array([tables[sets[one].captions.table] for _, one, *_ in taken], dtype=np.int64),
        which=np.full(len(taken), -1, dtype=np.int8),
        owner=np.array([one for _, one, *_ in taken], dtype=np.int64),
        repeats=np.array([times + again.get(image, 0) for image, _, _, times in taken], dtype=np.int64),
        line=np.array([row.line for _, _, row, _ in taken], dtype=np.uint32),
        focus=np.array([row.focus for _, _, row, _ in taken], dtype=np.float32).reshape(-1, 2),
        texts=[row.caption for _, _, row, _ in taken],
    )
    chosen = Chosen.joined([folders.take(~both), rows])
    chosen = chosen.take(np.argsort(chosen.image))
    if part is not None:
        mine = [part.holds_name(name) for name in files.names.take(chosen.image)]
        chosen = chosen.take(np.array(mine, dtype=np.bool_))
    own = np.unique(np.concatenate([chosen.image, chosen.caption[(chosen.caption >= 0) & (chosen.caption < first)]]))
    kept = np.concatenate([own, np.array(list(tables.values()), dtype=np.int64)])
    memos = [memo_row((*memo.identity, 0))[None] for _, memo in listed.tables.values()]
    caption = np.where(chosen.caption >= 0, np.searchsorted(kept, chosen.caption), -1)
    chosen = replace(chosen, image=np.searchsorted(kept, chosen.image), caption=caption)
    return strings_of([files.names.take(own), list(tables)]), np.concatenate([files.memos[own], *memos]), chosen


def _samples(
    names: Strings,
    called: Strings,
    held: Known,
    chosen: Chosen,
    caption: Input,
    sets: Sequence[ImageSet],
    reading: NDArray[np.uint8] | None,
    further: Mapping[str, NDArray[np.integer]],
) -> SampleTable:
    """The table of images at these positions among the files; masks and control images as :func:`_with_partners`."""
    images = chosen.image
    rows = held.rows_of("image", images)
    content = held.content if called is names else held.content[images]
    if chosen.member is not None and chosen.known is not None:
        rows, inside = np.maximum(rows, chosen.known), np.flatnonzero(chosen.member)
        content[inside] = 0
        if held.table is not None:
            content[inside] = take_rows(held.table.inputs["image"].content, chosen.known[inside])
    columns = {name: values for name, values in held.columns(rows).items() if name not in _SET_COLUMNS}
    columns.setdefault("original_size", np.zeros((len(images), 2), dtype=np.uint32))
    if chosen.span is not None:
        columns[SPAN] = chosen.span
    if any(one.repeats != 1 for one in sets) or (chosen.repeats != 1).any():
        columns["repeats"] = np.minimum(chosen.repeats, MAX_REPEATS).astype(np.uint16)
    if len(sets) > 1:
        columns["image_set"] = chosen.owner.astype(np.uint16)
    if chosen.focus is not None and (chosen.focus >= 0).any():
        columns[FOCUS] = chosen.focus
    return SampleTable(
        names=called,
        files=Files(names=names, stat=held.stat, content=held.content, reading=reading),
        inputs={
            "image": Input(content=content, file=images.astype(np.int32), line=chosen.member),
            "caption": caption,
            **{
                name: Input(content=take_rows(held.content, file), file=file.astype(np.int32))
                for name, file in further.items()
            },
        },
        columns=columns,
    )


def _nothing(walk: Walk, layout: Layout, notes: Sequence[Rejected]) -> EmptySourceError:
    if count := sum(len(one.files) for one in layout.sets):
        return EmptySourceError(
            f"no images in {count_of(count, 'archives')} of {walk.root}",
            where=str(walk.root),
            why="; ".join(note.detail for note in notes[:3]) or "they hold no members or rows",
            fix="say what the images are: --image-column NAME (of a tar: the end of their names, such as jpg)",
        )
    others = Counter(walk.others)
    for note in notes:
        others[extension_of(note.name)] += note.count * (note.reason in ("caption-unused", "hidden"))
    videos = CLIP_EXTENSIONS.intersection(walk.others)
    common = sorted(((name, count) for name, count in others.items() if count), key=lambda one: (-one[1], one[0]))[:5]
    there = ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common)
    why = f"looked for {' '.join(sorted(IMAGE_EXTENSIONS - videos))}; found {there or 'no files'}"
    if any(note.reason == "cache-folder" for note in notes) or (walk.root / "CURRENT").is_file():
        why += "; there is a cache in it, which is not read as data"
    fix = "give the folder that holds the images: `latentcache build FOLDER`"
    if videos:
        fix = "give --frames N, and the VAE of a video model with --model, to encode the videos"
    return EmptySourceError(f"no images in {walk.root}", where=str(walk.root), why=why, fix=fix)
