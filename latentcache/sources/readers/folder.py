"""Images of a layout: which files are samples, and their captions, in columns.

Every layout has the same code path. A set is a folder or a table: its images or its rows are samples.
Images are not opened here. Cost: one scandir per folder and one stat per image and caption file. Caption files that
are new or may have changed are read once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, SourceError, UnusableSampleError, count_of
from latentcache.fields.captions import further_captions
from latentcache.fields.clips import FOCUS
from latentcache.fields.strings import Strings
from latentcache.fields.table import STAT_WIDTH, Files, Input, Rejected, SampleTable
from latentcache.identity.content import HASH_BYTES
from latentcache.identity.stat import StatMemo
from latentcache.sources.captions import CaptionFiles
from latentcache.sources.causes import Findings, counted, in_order, rejected
from latentcache.sources.formats import TAR
from latentcache.sources.inventory import (
    CAPTION_EXTENSIONS,
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    TABLE_NAMES,
    Folder,
    Inventory,
    Unused,
    extension_of,
)
from latentcache.sources.known import KnownFiles, hash_rows, is_range, match_names, take_rows, with_hashes
from latentcache.sources.layout import CaptionRule, ImageSet, Layout
from latentcache.sources.partners import ENDINGS, Partners
from latentcache.sources.places import SPAN, sizes
from latentcache.sources.readers.archive import ArchiveImages, read_archives
from latentcache.sources.readers.balance import balanced
from latentcache.sources.readers.table import TableImages, read_tables
from latentcache.sources.units import Scan, ScanResult, Units

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
class ImageCounts:
    """Numbers of samples by set and by origin of their captions; ``inspect`` prints them."""

    captions: dict[str, int] = field(default_factory=dict)
    """Origin of captions -> how many: ``sidecar .txt``, ``class words``, ``none``."""
    first_without: str = ""
    several: int = 0
    """Samples with more than one caption."""
    set_samples: tuple[int, ...] = ()

    def count(self, sets: Sequence[ImageSet], units: Units, texts: Strings, names: Strings) -> None:
        """Count the samples of each set, and where their captions are from."""
        is_empty, numbers = np.diff(texts.ends, prepend=0) == 0, {NO_CAPTION: 0}
        source = np.zeros(len(units), dtype=np.int32)

        def note(rows: NDArray[np.bool_], word: str) -> None:
            source[rows] = numbers.setdefault(word, len(numbers))

        for number, one in enumerate(sets):
            rule, mine = one.captions, units["owner"] == number
            note(mine, "file name" if rule.from_name else rule.text_source)
            for at, ending in enumerate(rule.extensions):
                note(mine & (units["which"] == at), f"sidecar {ending}")
            if rule.table or one.archives:
                inside = "tar members" if one.archives == TAR else "column"
                note(mine & (units["line"] > 0), rule.table or inside)
            note(mine & is_empty, rule.text_source if rule.is_empty_by_choice else NO_CAPTION)
        many = np.bincount(source, minlength=len(numbers)).tolist()
        words = [*list(numbers)[1:], NO_CAPTION]
        self.captions = {word: many[numbers[word]] for word in words if many[numbers[word]]}
        self.first_without = names[int((source == 0).argmax())] if many[0] else ""
        self.several = len(further_captions(texts))
        self.set_samples = tuple(np.bincount(units["owner"], minlength=len(sets)).tolist())

    def notes(self) -> Iterator[Rejected]:
        """One note if some images have no caption and others do."""
        if self.first_without and set(self.captions) != {NO_CAPTION}:
            yield counted(self.first_without, "no-caption", self.captions[NO_CAPTION], "images have no caption")


class _Files:
    """The files of an inventory in columns: which are images of sets, and the caption files beside these."""

    def __init__(self, inventory: Inventory, layout: Layout, *, videos: bool) -> None:
        self._inventory, self._layout, self._count = inventory, layout, 0
        texts = {*CAPTION_EXTENSIONS, *(ending for one in layout.sets for ending in one.captions.extensions)}
        self._wanted = (IMAGE_EXTENSIONS if videos else IMAGE_EXTENSIONS - CLIP_EXTENSIONS) | texts
        self._used = layout.used.union(*(one.files | {one.captions.table} for one in layout.sets))
        self.partners, self._outside = Partners(), list[str]()
        self.findings, self.unused = Findings(), Unused()
        self._splits = dict[str, tuple[str, int]]()
        self.owners = dict[tuple[int, ...], int]()
        self._stats, self._rows = bytearray(), [np.empty((4, 0), dtype=np.int32)]
        self.names = Strings.of(chain.from_iterable(self._listed()))
        self.memos = np.frombuffer(self._stats, dtype=np.uint64).reshape(-1, STAT_WIDTH)
        # Of images in the byte order of their names: positions among the files, those of their captions (-1: none),
        # extension of the rule that the caption has, sets in ``owners``.
        self.images, self.beside, self.which, self.owner = np.concatenate(self._rows, axis=1)
        self._rows.clear()
        if self._outside:
            words = "images in folders that the layout does not use"
            self.findings.notes.add(counted(self._outside[0], "outside-sets", len(self._outside), words))
        for split, (first, count) in self._splits.items():
            words = f"files of the split {split}; {layout.split} is read"
            self.findings.notes.add(counted(first, "split-unused", count, words))
        self.findings.notes.add(*self.unused.notes())

    def by_set(self) -> dict[int, dict[str, str]]:
        """Set -> names of the images in its folder -> the caption file beside each one, if any."""
        found = dict[int, dict[str, str]]()
        owners = {number: owners for owners, number in self.owners.items()}
        names, beside = self.names.take(self.images), self.names.take(np.maximum(self.beside, 0))
        for name, text, file, owner in zip(names, beside, self.beside.tolist(), self.owner.tolist(), strict=True):
            for number in owners[owner]:
                found.setdefault(number, {})[name] = text if file >= 0 else ""
        return found

    def _listed(self) -> Iterator[list[str]]:
        """The wanted names of each folder; their rows are kept in the byte order of whole names."""
        entered = dict[str, tuple[NDArray[np.int32], NDArray[np.int64]]]()
        for path in sorted(self._layout.folders, key=lambda folder: os.fsencode(folder + "/")):
            for folder, start, stop in self._inventory.spans(path):
                if folder.path not in entered:
                    size = len(folder.stats)
                    names, is_wanted = self._taken(folder)
                    bounds = np.concatenate([[0], np.cumsum(is_wanted)]) if len(names) < size else np.arange(size + 1)
                    yield [folder.prefix + name for name in names]
                    entered[folder.path] = self._entered(folder, names, is_wanted), bounds
                    folder.release()
                rows, bounds = entered[folder.path] if folder.folders else entered.pop(folder.path)
                some = rows[:, bounds[start] : bounds[stop]]
                self._rows.append(some[:, some[0] >= 0])

    def _taken(self, folder: Folder) -> tuple[list[str], NDArray[np.bool_]]:
        """The names of a folder that may be images or captions, and (n,) True for these; others are noted."""
        names = folder.names
        self.findings.notes.add(*folder.notes)
        self.unused.add(folder.prefix + name for name in folder.loose)
        if folder.counts.keys() <= self._wanted:
            return names, np.ones(len(names), dtype=np.bool_)
        is_wanted = np.array([extension_of(name) in self._wanted for name in names], dtype=np.bool_)
        others = [folder.prefix + name for name in compress(names, ~is_wanted)]
        if split := self._layout.split_of(folder.path):
            self._left_to(split, others)
        else:
            self._others(others)
        return list(compress(names, is_wanted)), is_wanted

    def _others(self, names: Sequence[str]) -> None:
        """Note files that this layout has no use for."""
        for name in names:
            if name in self._used:
                continue
            if name.rpartition("/")[2] in TABLE_NAMES:
                self.findings.notes.add(rejected(name, "nested-table", "this layout has no metadata table here"))
            else:
                self.unused.add((name,))

    def _left_to(self, split: str, names: Sequence[str]) -> None:
        """Count files of a split that is not read."""
        names = [name for name in names if name not in self._used]
        if names:
            first, count = self._splits.get(split, (names[0], 0))
            self._splits[split] = first, count + len(names)

    def _entered(self, folder: Folder, names: Sequence[str], is_wanted: NDArray[np.bool_]) -> NDArray[np.int32]:
        """(4, n) columns of the wanted names of a folder, position -1: it is no sample."""
        prefix, count = folder.prefix, len(names)
        endings = [name[name.rfind(".") :] for name in names]
        images = {ending for ending in set(endings) if ending.lower() in IMAGE_EXTENSIONS}
        is_image = np.fromiter(map(images.__contains__, endings), dtype=np.bool_, count=count)
        owners, role = self._layout.owners(prefix), self._layout.role(prefix)
        split, is_sample = self._layout.split_of(folder.path), is_image
        if split:
            role = "split"
            self._left_to(split, [prefix + name for name in names])
        elif not role and not owners:
            role = "outside"
        if role or _ASIDE in "/".join(names):
            is_sample = is_image & ~self._set_aside(prefix, names, is_image, role)
        stats = folder.stats if count == len(folder.stats) else folder.stats[is_wanted]
        caption, which = np.full(count, -1, dtype=np.int32), np.full(count, -1, dtype=np.int32)
        lost, replaced = {name: item for name, item in folder.rejected.items() if name}, set[str]()
        if lost or not is_image.all():
            rules = (self._layout.sets[number].captions for number in owners)
            rule = next((rule for rule in rules if not rule.table), _PLAIN_RULE)
            every, padded = [*names, *lost], np.append(is_sample, np.zeros(len(lost), dtype=np.bool_))
            others, used = _beside(every, padded, rule, caption, which), is_image.copy()
            if (is_lost := caption >= count).any():
                if rule is not _PLAIN_RULE:  # else tables have the captions
                    is_sample = is_sample & ~is_lost
                    for number in np.flatnonzero(is_lost).tolist():
                        text = every[caption[number]]
                        self._without(prefix + names[number], stats[number], text, lost[text])
                        replaced.add(text)
                caption[is_lost] = which[is_lost] = -1
            used[caption[caption >= 0]] = True
            for number in np.flatnonzero(~used).tolist():
                self._unused(prefix + names[number], role, rule, others.get(number, ""))
            caption[caption >= 0] += self._count
        self.findings.rejected += (item for name, item in folder.rejected.items() if name not in replaced)
        memos = np.zeros((count, STAT_WIDTH), dtype=np.uint64)
        memos[:, :5] = stats
        self._stats += memos.tobytes()
        place = np.where(is_sample, np.arange(self._count, self._count + count), -1)
        self._count += count
        owner = np.full(count, self.owners.setdefault(owners, len(self.owners)))
        return np.array([place, caption, which, owner], dtype=np.int32)

    def _set_aside(
        self, prefix: str, names: Sequence[str], is_image: NDArray[np.bool_], role: str
    ) -> NDArray[np.bool_]:
        """(n,) True for images that are no samples: masks, control images, those of no set."""
        found = np.zeros(len(is_image), dtype=np.bool_)
        for number in np.flatnonzero(is_image).tolist():
            name = prefix + names[number]
            ending = "" if role else next((one for one in ENDINGS if name.rpartition(".")[0].endswith(one)), "")
            found[number] = word = role or ENDINGS.get(ending, "")
            if word == "outside":
                self._outside.append(name)
            elif word not in ("", "split"):  # files of another split are counted
                self.partners.add(word, name, self._count + number, ending)
        return found

    def _without(self, name: str, stat: NDArray[np.uint64], text: str, item: Rejected) -> None:
        """Reject an image in place of its caption file, which cannot be used."""
        memo = (*stat.view(np.int64).tolist(), 0)
        own = rejected(name, item.reason, f"caption file {text}: {item.detail}")
        self.findings.rejected.append(replace(own, stat=memo))

    def _unused(self, name: str, role: str, rule: CaptionRule, other: str) -> None:
        """A caption file that belongs to no sample, or to one that has ``other``."""
        if role == "split" or name in self._layout.used:
            return
        if extension_of(name) == ".json":
            self.unused.add((name,))
        elif other:
            self.findings.notes.add(rejected(name, "caption-conflict", f"{other} is used"))
        else:
            detail = "its folder is in no set" if role else "no image beside it has its name"
            if not role and extension_of(name) not in rule.extensions:
                detail = f"captions are read from {', '.join(rule.extensions) or 'other places'}"
            self.findings.notes.add(rejected(name, "caption-unused", detail))


class ImageScan(Scan):
    """A scan of images that are files."""

    def __call__(self, layout: Layout, inventory: Inventory) -> ScanResult:
        """Every image of a layout; raises EmptySourceError, TableError or SourceError as ``scan.scan``."""
        tables, part = [one.captions.table for one in layout.sets if one.captions.table], self.options.part
        for one in layout.sets:
            self._check_repeats(layout, one.label, one.repeats)
        files = _Files(inventory, layout, videos=self.options.videos)
        findings, root = files.findings, inventory.root
        findings.notes.add(*layout.notes)
        read, units = dict[str, tuple[bytes, StatMemo]](), _of_folders(layout, files)
        if tables:
            listed = read_tables(layout, root, files.by_set(), findings)
            units, read = _with_rows(files, layout.sets, units, listed), listed.tables
        if part is not None:
            mine = [part.holds_name(name) for name in files.names.take(units["image"])]
            units = units.take(np.array(mine, dtype=np.bool_))
        self._pair(layout, files, units)
        archives, rules = read_archives(self, layout, findings), [one.captions for one in layout.sets]
        added = [*(memo for _, memo in read.values()), *archives.memos.values()]
        names, memos = files.names, files.memos
        if added:
            names = Strings.of(chain(names, read, archives.memos))
            memos = np.concatenate([memos, np.array(added, dtype=np.uint64)])
        names, memos = _used_files(names, memos, units, len(files.names))
        first = len(names) - len(archives.memos)
        reading = _readings(len(names), units, rules, archives)
        held = self.held(names, memos, reading)
        for number, (content, memo) in enumerate(read.values(), start=first - len(read)):
            held.remember(number, content, memo)
        if archives.memos:
            units = _sorted(names, Units.joined([units, archives.units.behind(first)]))
        captions = CaptionFiles(root, held, rules)
        if len(units):  # sets that share an image add up, and regularization images are as many as the others
            most = int(units["repeats"].argmax())
            self._check_repeats(layout, held.names[int(units["image"][most])], int(units["repeats"][most]))
        good = captions.read(units, findings)
        units = units if good.all() else units.take(good)
        samples = _samples(units, held, captions.column(units), layout.sets, reading)
        found, captioned = ImageCounts(), samples.inputs["caption"].text
        assert captioned is not None
        found.count(layout.sets, units, captioned, samples.names)
        findings.notes.add(*found.notes(), *captions.unused_lines(units, captioned))
        notes, rejections = findings.notes.all(), in_order(findings.rejected)
        if not len(samples) and not rejections and part is None:
            raise _nothing(root, files.unused.counts, layout, notes)
        scanned = ScanResult(samples=samples, rejected=rejections, notes=notes, images=found)
        return self._hashed(root, scanned, held)

    def _check_repeats(self, layout: Layout, name: str, repeats: int) -> None:
        if repeats > MAX_REPEATS and self.options.repeats is not False:
            raise SourceError(
                f"{name}: {repeats} repeats, more than {MAX_REPEATS}",
                where=str(layout.root),
                why="more occurrences of a sample in an epoch cannot be stored",
                fix="give fewer repeats, or --no-repeats",
            )

    def _pair(self, layout: Layout, files: _Files, units: Units) -> None:
        """Add columns of masks and control images: those of the snapshot too, so that one that is gone is found."""
        partners, before = files.partners, self.known.inputs if self.known is not None else {}
        inputs = dict.fromkeys(
            [*partners.inputs(layout), *sorted({*before} - {"image", "caption"} - layout.unpaired)]
        )
        for role in inputs:
            rows = zip(
                files.names.take(units["image"]), units["image"].tolist(), units["owner"].tolist(), strict=True
            )
            found = [partners.of(name, image, layout.sets[owner], role) for name, image, owner in rows]
            units.columns[role] = np.array(found, dtype=np.int32)
        used = {file for role in inputs for file in units[role].tolist()}
        if self.options.part is None:
            files.findings.notes.add(*partners.unused(used, layout))

    def _hashed(self, root: Path, scanned: ScanResult, held: KnownFiles) -> ScanResult:
        """With the contents of files that may be what they were, by their size, or that the snapshot rejected."""
        samples, old, columns = scanned.samples, held.table, dict(scanned.samples.columns)
        hashed, unread = 0, dict[tuple[str, int], UnusableSampleError]()
        out = {item.label for item in self.rejected}
        for name in [name for name in samples.inputs if name != "caption"]:
            own = samples.inputs[name]
            rows = np.flatnonzero((own.file >= 0) & ~own.content.any(axis=1))
            to_hash, matched = np.full(len(rows), self.hash_all), np.arange(len(rows))
            if out:
                to_hash |= np.array([label in out for label in samples.names.take(rows)], dtype=np.bool_)
            if old is not None and name in old.inputs and len(matched):
                is_known = np.zeros(len(old.files), dtype=np.bool_)
                is_known[held.place[held.place >= 0]] = True
                left = np.flatnonzero(~is_known[old.inputs[name].file])
                place = match_names(samples.names.select(rows), old.names.select(left))
                matched, before = matched[place >= 0], left[place[place >= 0]]
                then = old.inputs[name].content[before]
                alike = sizes(samples, rows[matched], name) == sizes(old, before, name)
                to_hash[matched] |= alike & then.any(axis=1) & (self.chosen is None or self.chosen[before])
            samples, failed = with_hashes(root, samples, name, rows[to_hash], self.stopping)
            hashed += int(np.count_nonzero(to_hash))
            unread |= {(name, row): error for row, error in failed.items()}
            if old is not None and name == "image" and len(matched):
                same = then.any(axis=1) & (then == samples.inputs[name].content[rows[matched]]).all(axis=1)
                for label in set(old.columns).difference(_SET_COLUMNS):
                    columns[label][rows[matched[same]]] = old.columns[label][before[same]]
        return replace(scanned, samples=replace(samples, columns=columns), hashed=hashed, unread=unread)


def _beside(
    names: Sequence[str],
    is_image: NDArray[np.bool_],
    rule: CaptionRule,
    caption: NDArray[np.int32],
    which: NDArray[np.int32],
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


def _of_folders(layout: Layout, files: _Files) -> Units:
    """Samples of sets that are folders; of several sets each one counts, and the deepest says the caption."""
    sets, repeats = layout.sets, np.zeros(len(files.images), dtype=np.int64)
    images, sizes = np.bincount(files.owner, minlength=len(files.owners)), np.zeros(len(sets), dtype=np.int64)
    for owners, number in files.owners.items():
        sizes[list(owners)] += images[number]
    reg, folder_of = balanced(sets, sizes.tolist()), np.zeros(max(len(files.owners), 1), dtype=np.int32)
    for owners, number in files.owners.items():
        own = [one for one in owners if not sets[one].captions.table]
        folder_of[number] = own[0] if own else -1
        rows = np.flatnonzero(files.owner == number)
        for one in own:
            repeats[rows] += reg.get(one, sets[one].repeats)
        other = next((one for one in own if sets[one].captions != sets[own[0]].captions), -1)
        if other >= 0 and len(rows):
            words = f"images have the captions of {sets[own[0]].label}, not those of {sets[other].label}"
            first = files.names[int(files.images[rows[0]])]
            files.findings.notes.add(counted(first, "in-two-sets", len(rows), words))
    owner = folder_of[files.owner]
    units = Units(image=files.images, caption=files.beside, which=files.which, owner=owner, repeats=repeats)
    out = (owner >= 0) & (repeats == 0)
    if out.any():
        first = files.names[int(files.images[int(out.argmax())])]
        words = "regularization images are left out, as by the trainer"
        files.findings.notes.add(counted(first, "reg-unused", int(out.sum()), words))
    kept = (owner >= 0) & (repeats > 0)
    return units if kept.all() else units.take(kept)


def _used_files(
    names: Strings, memos: NDArray[np.uint64], units: Units, first: int
) -> tuple[Strings, NDArray[np.uint64]]:
    """The files that units name, and those from ``first`` on; the units get the new positions."""
    used = np.zeros(len(names) + 1, dtype=np.bool_)  # the last one is for -1
    used[first:-1] = True
    for column in units.files.values():
        used[column] = True
    used[-1] = False
    if used[:-1].all():
        return names, memos
    number, kept = np.cumsum(used, dtype=np.int32) - 1, np.flatnonzero(used)
    number[-1] = -1
    units.columns |= {name: number[column] for name, column in units.files.items()}
    return names.select(kept), memos[kept]


def _sorted(names: Strings, units: Units) -> Units:
    """By the names of files, then by members."""
    own, at = np.unique(units["image"], return_inverse=True)
    rank = np.argsort(sorted(range(len(own)), key=list(map(os.fsencode, names.take(own))).__getitem__))
    return units.take(np.lexsort((units["member"], rank[at])))


def _readings(
    count: int, units: Units, rules: Sequence[CaptionRule], archives: ArchiveImages
) -> NDArray[np.uint8] | None:
    """(F, 16) how each caption file and archive is read; None: all captions are as they are written."""
    each = [rule.reading for rule in rules]
    if not any(map(any, each)) and not archives.memos:
        return None
    reading, there = np.zeros((count, HASH_BYTES), dtype=np.uint8), units["which"] >= 0
    reading[units["caption"][there]] = hash_rows(each)[units["owner"][there]]
    reading[count - len(archives.memos) :] = archives.readings
    return reading


def repeats_of(samples: SampleTable) -> NDArray[np.uint16]:
    """(S,) how often each sample is seen in one epoch."""
    held = samples.columns.get("repeats")
    return np.ones(len(samples), dtype=np.uint16) if held is None else np.asarray(held)


def _with_rows(files: _Files, sets: Sequence[ImageSet], folders: Units, listed: TableImages) -> Units:
    """Samples that are rows of tables beside those of folders; the tables are behind the other files."""
    places = dict(zip(files.names.take(files.images), files.images.tolist(), strict=True))
    tables = {table: len(files.names) + at for at, table in enumerate(listed.tables)}
    taken = [(places[name], *found) for name, found in listed.taken.items()]
    both = np.isin(folders["image"], [image for image, *_ in taken])
    again = dict(zip(folders["image"][both].tolist(), folders["repeats"][both].tolist(), strict=True))
    if again:
        words = "images of a folder have the captions of a table, and the repeats of both"
        files.findings.notes.add(counted(files.names[min(again)], "in-two-sets", len(again), words))
    captions = [-1 if row.caption is None else tables[sets[one].captions.table] for _, one, row, _ in taken]
    rows = Units(
        image=np.array([image for image, *_ in taken], dtype=np.int32),
        caption=np.array(captions, dtype=np.int32),
        owner=np.array([one for _, one, *_ in taken], dtype=np.int32),
        repeats=np.array([times + again.get(image, 0) for image, _, _, times in taken], dtype=np.int64),
        line=np.array([0 if row.caption is None else row.line for _, _, row, _ in taken], dtype=np.uint32),
        focus=np.array([row.focus for _, _, row, _ in taken], dtype=np.float32).reshape(-1, 2),
        text=np.array([row.caption or "" for _, _, row, _ in taken], dtype=object),
    )
    units = Units.joined([folders.take(~both), rows])
    return units.take(np.argsort(units["image"]))


def _samples(
    units: Units, held: KnownFiles, caption: Input, sets: Sequence[ImageSet], reading: NDArray[np.uint8] | None
) -> SampleTable:
    images, inside = units["image"], np.flatnonzero(units["member"])
    rows = np.maximum(held.rows_of("image", images), units["known"])
    if held.table is not None and held.is_whole(rows):
        names = held.table.names
    elif not len(inside) and is_range(images, len(held.names)):
        names = held.names
    else:
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(images), _BLOCK)]
        each = (zip(held.names.take(images[one]), units["own"][one].tolist(), strict=True) for one in blocks)
        names = Strings.of(file + own for pairs in each for file, own in pairs)
    content = held.content if names is held.names else held.content[images]
    if len(inside):
        known = units["known"][inside]
        content[inside] = 0 if held.table is None else take_rows(held.table.inputs["image"].content, known)
    before = held.table.columns if held.table is not None else {}
    columns = {name: take_rows(column, rows) for name, column in before.items() if name not in _SET_COLUMNS}
    columns.setdefault("original_size", np.zeros((len(images), 2), dtype=np.uint32))
    if "span" in units.columns:
        columns[SPAN] = units["span"]
    if any(one.repeats != 1 for one in sets) or (units["repeats"] != 1).any():
        columns["repeats"] = units["repeats"].astype(np.uint16)
    if len(sets) > 1:
        columns["image_set"] = units["owner"].astype(np.uint16)
    if (units["focus"] >= 0).any():
        columns[FOCUS] = units["focus"]
    member = units["member"] if "member" in units.columns else None
    inputs = {"image": Input(content=content, file=images.astype(np.int32), line=member), "caption": caption}
    for name, file in units.files.items():
        if name not in inputs:
            inputs[name] = Input(content=take_rows(held.content, file), file=file.astype(np.int32))
    files = Files(names=held.names, stat=held.stat, content=held.content, reading=reading)
    return SampleTable(names=names, files=files, inputs=inputs, columns=columns)


def _nothing(root: Path, unused: Mapping[str, int], layout: Layout, notes: Sequence[Rejected]) -> EmptySourceError:
    if count := sum(len(one.files) for one in layout.sets):
        return EmptySourceError(
            f"no images in {count_of(count, 'archives')} of {root}",
            where=str(root),
            why="; ".join(note.detail for note in notes[:3]) or "they hold no members or rows",
            fix="say what the images are: --image-column=NAME (of a tar: the end of their names, such as jpg)",
        )
    others = Counter(unused)
    for note in notes:
        others[extension_of(note.name)] += note.count * (note.reason in ("caption-unused", "hidden"))
    videos = CLIP_EXTENSIONS.intersection(unused)
    common = sorted(((name, count) for name, count in others.items() if count), key=lambda one: (-one[1], one[0]))[:5]
    there = ", ".join(f"{count} {extension or 'without ending'}" for extension, count in common)
    why = f"looked for {' '.join(sorted(IMAGE_EXTENSIONS - videos))}; found {there or 'no files'}"
    if any(note.reason == "cache-folder" for note in notes) or (root / "CURRENT").is_file():
        why += "; there is a cache in it, which is not read as data"
    fix = "give the folder that holds the images: `latentcache build FOLDER`"
    if videos:
        fix = "give --frames=N, and the VAE of a video model with --model, to encode the videos"
    return EmptySourceError(f"no images in {root}", where=str(root), why=why, fix=fix)
