"""Images of a layout: which files are samples, and their captions, in columns.

Every layout has the same code path. A set is a folder or a table: its images or its rows are samples.
Images are not opened here. Cost: one scandir per folder and one stat per image and caption file. Caption files that
are new or may have changed are read once.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from latentcache.errors import EmptySourceError, UnusableSampleError, count_of
from latentcache.fields.captions import further_captions
from latentcache.fields.strings import Strings
from latentcache.fields.table import OF_TABLE, STAT_WIDTH, Input, Rejected, SampleTable, table_column
from latentcache.identity.content import HASH_BYTES, StatMemo
from latentcache.sources.captions import longer_files, read_captions
from latentcache.sources.causes import counted, in_order, rejected
from latentcache.sources.formats.archives import TAR
from latentcache.sources.inventory import (
    CAPTION_EXTENSIONS,
    CLIP_EXTENSIONS,
    IMAGE_EXTENSIONS,
    TABLE_NAMES,
    Folder,
    Inventory,
    count_unused,
    extension_of,
)
from latentcache.sources.known import (
    KnownFiles,
    Scan,
    ScanResult,
    Units,
    hash_rows,
    is_range,
    match_names,
    take_rows,
    with_hashes,
)
from latentcache.sources.layout import ENDINGS, CaptionRule, ImageSet, Layout, Partners, balanced
from latentcache.sources.locations import SPAN, sizes
from latentcache.sources.readers.archive import archive_reading, open_archives, read_archives
from latentcache.sources.readers.table import read_tables
from latentcache.value import Value

#: Origin that is counted for an image without a caption.
NO_CAPTION = "none"
_SET_COLUMNS = ("repeats", "image_set", SPAN)
_PLAIN_RULE = CaptionRule()
#: In the names of masks and control images that are beside their images.
_ASIDE = "label."
_BLOCK = 1 << 14


class ImageCounts(Value):
    """Numbers of samples by set and by origin of their captions; ``inspect`` prints them."""

    captions: Mapping[str, int]
    """Origin of captions -> how many: ``sidecar .txt``, ``class words``, ``none``."""
    first_without: str
    several: int
    """Samples with more than one caption."""
    set_samples: tuple[int, ...]


def _counts(sets: Sequence[ImageSet], units: Units, texts: Strings, names: Strings) -> ImageCounts:
    is_empty = np.diff(texts.ends, prepend=0) == 0
    origin = np.full(len(units), NO_CAPTION, dtype=object)
    for number, image_set in enumerate(sets):
        rule = image_set.captions
        mine = units["owner"] == number
        origin[mine] = "file name" if rule.from_name else rule.text_source
        for at, ending in enumerate(rule.extensions):
            origin[mine & (units["which"] == at)] = f"sidecar {ending}"
        if rule.table or image_set.archives:
            inside = "tar members" if image_set.archives == TAR else "column"
            origin[mine & (units["line"] > 0)] = rule.table or inside
        origin[mine & is_empty] = rule.text_source if rule.is_empty_by_choice else NO_CAPTION
    is_none = origin == NO_CAPTION
    return ImageCounts(
        captions=dict(Counter(origin.tolist()).most_common()),
        first_without=names[int(is_none.argmax())] if is_none.any() else "",
        several=len(further_captions(texts)),
        set_samples=tuple(np.bincount(units["owner"], minlength=len(sets)).tolist()),
    )


class _Files:
    """The files of a layout in columns: which are images of sets, and the caption files beside these.

    ``first``: archives and tables, which come before the others, and their memos.
    """

    def __init__(self, request: Scan, inventory: Inventory, layout: Layout, first: Mapping[str, StatMemo]) -> None:
        self._layout = layout
        self._count = len(first)
        texts = (image_set.captions.extensions for image_set in layout.sets)
        images = IMAGE_EXTENSIONS if request.options.videos else IMAGE_EXTENSIONS - CLIP_EXTENSIONS
        self._wanted = images.union(CAPTION_EXTENSIONS, *texts)
        self._used = layout.used.union(first, *(image_set.files for image_set in layout.sets))
        self.partners = Partners()
        self.findings = request.findings
        self.owners = dict[tuple[int, ...], int]()
        self.is_in_order = True
        """True if the images are in the byte order of their names: no folder of images is in another one."""
        self._last: str | None = None
        self._stats = bytearray(np.array(list(first.values()), dtype=np.uint64).tobytes())
        self._rows = [np.empty((4, 0), dtype=np.int32)]
        folders = {folder.path: folder for path in layout.folders for folder in inventory.below(path)}
        in_order = sorted(folders.values(), key=lambda folder: os.fsencode(folder.prefix))
        self.names = Strings.of(chain(first, chain.from_iterable(map(self._added, in_order))))
        self.memos = np.frombuffer(self._stats, dtype=np.uint64).reshape(-1, STAT_WIDTH)
        # Of images: positions among the files, those of their captions (-1: none), extension of the rule that the
        # caption has, sets in ``owners``.
        self.images, self.beside, self.which, self.owner = np.concatenate(self._rows, axis=1)
        self._rows.clear()

    def of_sets(self) -> dict[int, dict[str, tuple[int, str]]]:
        """Set -> names of the images in its folder -> position of the image, and the caption file beside it."""
        inside = dict[int, dict[str, tuple[int, str]]]()
        owners = {number: owners for owners, number in self.owners.items()}
        names, texts = self.names.take(self.images), self.names.take(np.maximum(self.beside, 0))
        columns = self.images.tolist(), self.beside.tolist(), self.owner.tolist()
        for name, text, image, file, owner in zip(names, texts, *columns, strict=True):
            for number in owners[owner]:
                inside.setdefault(number, {})[name] = image, text if file >= 0 else ""
        return inside

    def _added(self, folder: Folder) -> list[str]:
        """Add the images and caption files of a folder, and note the others; the whole names of what was added."""
        prefix, names, stats, notes = folder.prefix, folder.names, folder.stats, self.findings.notes
        folder.release()
        notes.add(*folder.notes)
        count_unused(notes, (prefix + name for name in folder.loose))
        if split := self._layout.split_of(folder.path):
            self.findings.rejected += folder.rejected.values()
            words = f"files of the split {split}; {self._layout.split} is read"
            notes.count("split-unused", words, (prefix + name for name in names if prefix + name not in self._used))
            return []
        endings = list(map(extension_of, names))
        if not folder.counts.keys() <= self._wanted:
            is_wanted = [ending in self._wanted for ending in endings]
            self._note_others(prefix + name for name, wanted in zip(names, is_wanted, strict=True) if not wanted)
            names, endings = list(compress(names, is_wanted)), list(compress(endings, is_wanted))
            stats = stats[np.array(is_wanted, dtype=np.bool_)]
        is_image = np.fromiter(map(IMAGE_EXTENSIONS.__contains__, endings), dtype=np.bool_, count=len(names))
        owners = self._layout.owners(prefix)
        role = self._layout.role(prefix) or ("" if owners else "outside")
        is_sample = self._without_partners(prefix, names, is_image, role)
        caption, which = self._captions(folder, names, is_image, is_sample, role)
        memos = np.zeros((len(names), STAT_WIDTH), dtype=np.uint64)
        memos[:, :5] = stats
        self._stats += memos.tobytes()
        rows = np.flatnonzero(is_sample)
        if len(rows):
            self.is_in_order &= self._last is None or not prefix.startswith(self._last)
            self._last = prefix
        owner = np.full(len(rows), self.owners.setdefault(owners, len(self.owners)))
        self._rows.append(np.array([rows + self._count, caption[rows], which[rows], owner], dtype=np.int32))
        self._count += len(names)
        return [prefix + name for name in names]

    def _note_others(self, names: Iterable[str]) -> None:
        """Note files that this layout has no use for."""
        for name in names:
            if name in self._used:
                continue
            if name.rpartition("/")[2] in TABLE_NAMES:
                self.findings.notes.add(rejected(name, "nested-table", "this layout has no metadata table here"))
            else:
                count_unused(self.findings.notes, (name,))

    def _without_partners(
        self, prefix: str, names: Sequence[str], is_image: NDArray[np.bool_], role: str
    ) -> NDArray[np.bool_]:
        """(n,) True for samples: images but masks, control images, and those of no set."""
        is_sample = is_image.copy()
        for number in np.flatnonzero(is_image).tolist() if role or _ASIDE in "/".join(names) else ():
            name = prefix + names[number]
            stem = name.rpartition(".")[0]
            ending = "" if role else next((ending for ending in ENDINGS if stem.endswith(ending)), "")
            is_sample[number] = not (role or ending)
            if role == "outside":
                words = "images in folders that the layout does not use"
                self.findings.notes.count("outside-sets", words, (name,))
            elif role or ending:
                self.partners.add(role or ENDINGS[ending], name, self._count + number, ending)
        return is_sample

    def _captions(
        self,
        folder: Folder,
        names: Sequence[str],
        is_image: NDArray[np.bool_],
        is_sample: NDArray[np.bool_],
        role: str,
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """(n,) position of each sample's caption file, -1: none, and which extension of the rule the file has.

        A sample whose caption file cannot be used is rejected in place of this file: ``is_sample`` is changed.
        """
        caption, which = np.full((2, len(names)), -1, dtype=np.int32)
        rules = [self._layout.sets[number].captions for number in self._layout.owners(folder.prefix)]
        rule = next((rule for rule in rules if not rule.table), _PLAIN_RULE)
        lost = [name for name in folder.rejected if name]
        every = [*names, *lost]
        order = {ending: at for at, ending in enumerate(rule.extensions)}
        texts = defaultdict[str, list[tuple[int, int]]](list)
        for number in (*np.flatnonzero(~is_image).tolist(), *range(len(names), len(every))):
            stem, dot, ending = every[number].rpartition(".")
            if dot + ending.lower() in order:
                texts[stem].append((order[dot + ending.lower()], -number))  # of a.TXT and a.txt the later one wins
        replaced = set[str]()
        conflicts = dict[int, str]()
        is_used = is_image.copy()
        for number in np.flatnonzero(is_sample).tolist() if texts else []:
            name = names[number]
            files = [*sorted(texts.get(name.rpartition(".")[0], ())), *sorted(texts.get(name, ()))]
            if not files:
                continue
            text = every[-files[0][1]]
            conflicts |= {-file: text for _, file in files[1:]}
            if text not in folder.rejected:
                which[number], caption[number] = files[0][0], self._count - files[0][1]
                is_used[-files[0][1]] = True
            elif rule is not _PLAIN_RULE:  # else tables have the captions
                is_sample[number] = False
                item = folder.rejected[text]
                detail = f"caption file {text}: {item.detail}"
                self.findings.rejected.append(rejected(folder.prefix + name, item.reason, detail))
                replaced.add(text)
        self.findings.rejected += (item for name, item in folder.rejected.items() if name not in replaced)
        for number in np.flatnonzero(~is_used).tolist():
            self._note_unused(folder.prefix + names[number], role, rule, conflicts.get(number, ""))
        return caption, which

    def _note_unused(self, name: str, role: str, rule: CaptionRule, other: str) -> None:
        """Note a caption file that belongs to no sample, or to one that has ``other``."""
        if name in self._layout.used:
            return
        if extension_of(name) == ".json":
            count_unused(self.findings.notes, (name,))
        elif other:
            self.findings.notes.add(rejected(name, "caption-conflict", f"{other} is used"))
        else:
            detail = "its folder is in no set" if role else "no image beside it has its name"
            if not role and extension_of(name) not in rule.extensions:
                detail = f"captions are read from {', '.join(rule.extensions) or 'other places'}"
            self.findings.notes.add(rejected(name, "caption-unused", detail))


def read_images(request: Scan, layout: Layout, inventory: Inventory) -> ScanResult:
    """Every image of a layout; raises EmptySourceError, TableError or SourceError as ``scan.scan``."""
    part = request.options.part
    root = inventory.root
    findings = request.findings
    rules = [image_set.captions for image_set in layout.sets]
    archives = open_archives(layout, findings)
    tables = {rule.table: StatMemo(*[0] * STAT_WIDTH) for rule in rules if rule.table}
    first = {name: memo for name, (_, memo) in archives.items()} | tables
    files = _Files(request, inventory, layout, first)
    findings.notes.add(*layout.notes)
    read = dict[int, tuple[bytes, StatMemo]]()
    if tables:
        units, read = read_tables(layout, root, files.of_sets(), findings)
        units = units.take(np.argsort(units["image"]))
    else:
        units = _of_folders(layout, files)
    if request.options.repeats is False:  # an image may be in two sets
        units.columns.pop("repeats", None)
    if part is not None:
        mine = [part.holds_name(name) for name in files.names.take(units["image"])]
        units = units.take(np.array(mine, dtype=np.bool_))
    _pair(request, layout, files, units)
    names, memos = _used_files(files.names, files.memos, units, len(first))
    sets = [image_set for image_set, _ in archives.values()]
    held = KnownFiles(request, names, memos, _readings(len(names), units, rules, sets))
    for number, (content, memo) in read.items():
        held.remember(number, content, memo)
    if archives:
        units = Units.joined([units, read_archives(request, layout, sets, held)])
    if archives or not files.is_in_order:  # by the names of files, then by members
        images, at = np.unique(units["image"], return_inverse=True)
        rank = np.argsort(sorted(range(len(images)), key=list(map(os.fsencode, names.take(images))).__getitem__))
        units = units.take(np.lexsort((units["member"], rank[at])))
    caption, good = read_captions(root, held, rules, units, findings)
    units = units if good.all() else units.take(good)
    assert caption.text is not None
    samples = _samples(units, held, caption, layout.sets)
    counts = _counts(layout.sets, units, caption.text, samples.names)
    if counts.first_without and set(counts.captions) != {NO_CAPTION}:
        number = counts.captions[NO_CAPTION]
        findings.notes.add(counted(counts.first_without, "no-caption", number, "images have no caption"))
    if not request.options.caption_lines:
        longer = longer_files(held, rules, units, caption.text)
        findings.notes.count("caption-lines", "caption files are longer than the first line, which is used", longer)
    notes = findings.notes.all()
    rejections = in_order(findings.rejected)
    if not len(samples) and not rejections and part is None:
        raise _nothing(inventory, layout, notes)
    scanned = ScanResult(samples=samples, rejected=rejections, notes=notes, images=counts)
    return _hashed(request, root, scanned, held)


def _pair(request: Scan, layout: Layout, files: _Files, units: Units) -> None:
    """Add columns of masks and control images: those of the snapshot too, so that one that is gone is found."""
    partners = files.partners
    before = request.known.inputs if request.known is not None else {}
    inputs = dict.fromkeys([*partners.inputs(layout), *sorted({*before} - {"image", "caption"} - layout.unpaired)])
    for role in inputs:
        rows = zip(files.names.take(units["image"]), units["image"].tolist(), units["owner"].tolist(), strict=True)
        paired = [partners.of(name, image, layout.sets[owner], role) for name, image, owner in rows]
        units.columns[role] = np.array(paired, dtype=np.int32)
    used = {file for role in inputs for file in units[role].tolist()}
    if request.options.part is None:
        partners.note_unused(used, layout, files.findings.notes)


def _hashed(request: Scan, root: Path, scanned: ScanResult, held: KnownFiles) -> ScanResult:
    """With the contents of files that may be what they were, by their size, or that the snapshot rejected."""
    samples = scanned.samples
    old = held.table
    columns = dict(scanned.samples.columns)
    hashed = 0
    unread = dict[tuple[str, int], UnusableSampleError]()
    was_rejected = {item.label for item in request.rejected}
    for name in [name for name in samples.inputs if name != "caption"]:
        column = samples.inputs[name]
        rows = np.flatnonzero((column.file >= 0) & ~column.content.any(axis=1))
        to_hash = np.full(len(rows), request.hash_all)
        matched = np.arange(len(rows))
        if was_rejected:
            to_hash |= np.array([label in was_rejected for label in samples.names.take(rows)], dtype=np.bool_)
        if old is not None and name in old.inputs and len(matched):
            is_known = np.zeros(len(old.files), dtype=np.bool_)
            is_known[held.position[held.position >= 0]] = True
            left = np.flatnonzero(~is_known[old.inputs[name].file])
            at = match_names(samples.names.select(rows), old.names.select(left))
            matched = matched[at >= 0]
            before = left[at[at >= 0]]
            then = old.inputs[name].content[before]
            alike = sizes(samples, rows[matched], name) == sizes(old, before, name)
            to_hash[matched] |= alike & then.any(axis=1) & (request.chosen is None or request.chosen[before])
        samples, failed = with_hashes(root, samples, name, rows[to_hash], request.stopping)
        hashed += int(np.count_nonzero(to_hash))
        unread |= {(name, row): error for row, error in failed.items()}
        if old is not None and name == "image" and len(matched):
            same = then.any(axis=1) & (then == samples.inputs[name].content[rows[matched]]).all(axis=1)
            for label in filter(_is_of_file, old.columns):
                columns[label][rows[matched[same]]] = old.columns[label][before[same]]
    return replace(scanned, samples=replace(samples, columns=columns), hashed=hashed, unread=unread)


def _of_folders(layout: Layout, files: _Files) -> Units:
    """Samples of sets that are folders; of several sets each one counts, and the deepest says the caption."""
    sets = layout.sets
    repeats = np.zeros(len(files.images), dtype=np.int64)
    images = np.bincount(files.owner, minlength=len(files.owners))
    sizes = np.zeros(len(sets), dtype=np.int64)
    for owners, number in files.owners.items():
        sizes[list(owners)] += images[number]
    reg = balanced(sets, sizes.tolist())
    folder_of = np.zeros(max(len(files.owners), 1), dtype=np.int32)
    for owners, number in files.owners.items():
        folder_of[number] = owners[0] if owners else -1
        rows = np.flatnonzero(files.owner == number)
        for owner in owners:
            repeats[rows] += reg.get(owner, sets[owner].repeats)
        other = next((owner for owner in owners if sets[owner].captions != sets[owners[0]].captions), -1)
        if other >= 0:
            words = f"images have the captions of {sets[owners[0]].label}, not those of {sets[other].label}"
            files.findings.notes.count("in-two-sets", words, files.names.take(files.images[rows]))
    owner = folder_of[files.owner]
    units = Units(image=files.images, caption=files.beside, which=files.which, owner=owner, repeats=repeats)
    left_out = files.names.take(files.images[(owner >= 0) & (repeats == 0)])
    files.findings.notes.count("reg-unused", "regularization images are left out, as by the trainer", left_out)
    kept = (owner >= 0) & (repeats > 0)
    return units if kept.all() else units.take(kept)


def _used_files(
    names: Strings, memos: NDArray[np.uint64], units: Units, first: int
) -> tuple[Strings, NDArray[np.uint64]]:
    """The ``first`` files, and those that units name; the units get the new positions."""
    used = np.zeros(len(names) + 1, dtype=np.bool_)  # the last one is for -1
    used[:first] = True
    for column in units.files.values():
        used[column] = True
    used[-1] = False
    if used[:-1].all():
        return names, memos
    number = np.cumsum(used, dtype=np.int32) - 1
    kept = np.flatnonzero(used)
    number[-1] = -1
    units.columns |= {name: number[column] for name, column in units.files.items()}
    return names.select(kept), memos[kept]


def _readings(
    count: int, units: Units, rules: Sequence[CaptionRule], archives: Sequence[ImageSet]
) -> NDArray[np.uint8] | None:
    """(F, 16) how each caption file and archive is read; None: all captions are as they are written."""
    readings = [rule.reading for rule in rules]
    if not any(map(any, readings)) and not archives:
        return None
    reading = np.zeros((count, HASH_BYTES), dtype=np.uint8)
    there = units["which"] >= 0
    reading[units["caption"][there]] = hash_rows(readings)[units["owner"][there]]
    reading[: len(archives)] = hash_rows(map(archive_reading, archives))
    return reading


def repeats_of(samples: SampleTable) -> NDArray[np.uint32]:
    """(S,) how often each sample is seen in one epoch."""
    held = samples.columns.get("repeats")
    return np.ones(len(samples), dtype=np.uint32) if held is None else np.asarray(held)


def _is_of_file(column: str) -> bool:
    """True for a column that a snapshot keeps for an unchanged file."""
    return column not in _SET_COLUMNS and not column.startswith(OF_TABLE)


def _samples(units: Units, held: KnownFiles, caption: Input, sets: Sequence[ImageSet]) -> SampleTable:
    images = units["image"]
    inside = np.flatnonzero(units["member"])
    rows = np.maximum(held.rows_of("image", images), units["known"])
    if held.table is not None and held.is_whole(rows):
        names = held.table.names
    elif not len(inside) and is_range(images, len(held.names)):
        names = held.names
    else:
        blocks = [slice(start, start + _BLOCK) for start in range(0, len(images), _BLOCK)]
        pairs = (zip(held.names.take(images[block]), units["tail"][block].tolist(), strict=True) for block in blocks)
        names = Strings.of(file + tail for block in pairs for file, tail in block)
    content = held.content if names is held.names else held.content[images]
    if len(inside):
        known = units["known"][inside]
        content[inside] = 0 if held.table is None else take_rows(held.table.inputs["image"].content, known)
    before = held.table.columns if held.table is not None else {}
    columns = {name: take_rows(column, rows) for name, column in before.items() if _is_of_file(name)}
    columns.setdefault("original_size", np.zeros((len(images), 2), dtype=np.uint32))
    if "span" in units.columns:
        columns[SPAN] = units["span"]
    if any(image_set.repeats != 1 for image_set in sets) or (units["repeats"] != 1).any():
        columns["repeats"] = units["repeats"].astype(np.uint32)
    if len(sets) > 1:
        columns["image_set"] = units["owner"].astype(np.uint16)
    others = units["more"].tolist() if "more" in units.columns else []
    for name in sorted({name for more in others for name in more}):
        columns[OF_TABLE + name] = table_column([more.get(name) for more in others])
    member = units["member"] if "member" in units.columns else None
    inputs = {"image": Input(content=content, file=images.astype(np.int32), line=member), "caption": caption}
    for name, file in units.files.items():
        if name not in inputs:
            inputs[name] = Input(content=take_rows(held.content, file), file=file.astype(np.int32))
    return SampleTable(names=names, files=held.files, inputs=inputs, columns=columns)


def _nothing(inventory: Inventory, layout: Layout, notes: Sequence[Rejected]) -> EmptySourceError:
    root = inventory.root
    if count := sum(len(image_set.files) for image_set in layout.sets):
        return EmptySourceError(
            f"no images in {count_of(count, 'archives')} of {root}",
            where=str(root),
            why="; ".join(note.detail for note in notes[:3]) or "they hold no members or rows",
            fix="name the column of images, or in tars the end of their names, with --image-column",
        )
    videos = CLIP_EXTENSIONS.intersection(extension for folder in inventory.below() for extension in folder.counts)
    why = f"looked for {' '.join(sorted(IMAGE_EXTENSIONS - videos))}; found {inventory.contents}"
    if any(note.reason == "cache-folder" for note in notes) or (root / "CURRENT").is_file():
        why += "; there is a cache in it, which is not read as data"
    fix: str = "give the folder that holds the images: `latentcache build FOLDER`"
    if videos:
        fix = "give --frames, and the VAE of a video model as --model"
    return EmptySourceError(f"no images in {root}", where=str(root), why=why, fix=fix)
