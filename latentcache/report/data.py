"""What is understood of DATA: layout, captions, sizes, records, and a few samples as a build would use them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.fields.captions import BETWEEN
from latentcache.fields.clips import CLIP
from latentcache.pipeline.report import quarantined
from latentcache.value import Value
from latentcache.verify.findings import path_json

if TYPE_CHECKING:
    from latentcache.fields.table import SampleTable
    from latentcache.pipeline.report import BuildPlan
    from latentcache.sources.records import Record
    from latentcache.sources.scan import Listing

#: ``Record.form`` of a conversation.
_CHAT = 1
#: Records whose roles are counted, and files of records that are named.
_LOOKED_AT, _FILES = 200, 10
#: Samples that are shown, and characters of a text.
_SHOWN, _EXCERPT = 3, 200
#: Parts of a record that are counted.
_RECORD_FIELDS = ("text", "begin", "messages", "tools", "options")


class ShownSample(Value):
    """One sample as it was understood."""

    path: str
    set_name: str = ""
    """Folder or name of its set, if there are several."""
    split: str = ""
    caption: str | None = None
    """None: the data has no captions."""
    caption_file: str = ""
    """File of the caption, or the table; empty: the caption has none."""
    paired: Mapping[str, str] = field(default_factory=dict)
    """Mask and control images: input -> file."""
    buckets: Mapping[str, str] = field(default_factory=dict)
    """Field -> bucket."""
    turns: Sequence[tuple[str, str]] = ()
    """(Role, beginning of the text) of a record; the role of a plain text is ``text``."""

    def as_json(self) -> dict[str, Any]:
        """One element of ``samples``."""
        texts = {"set": self.set_name, "split": self.split, "caption_file": self.caption_file}
        shown: dict[str, Any] = {name: text for name, text in texts.items() if text}
        shown |= {} if self.caption is None else {"caption": self.caption}
        more = {"paired": dict(self.paired), "buckets": dict(self.buckets)}
        shown |= {name: value for name, value in more.items() if value}
        shown |= {"turns": [{"role": role, "text": text} for role, text in self.turns]} if self.turns else {}
        return {**path_json(self.path), **shown}


class DataReport(Value):
    """The contents of DATA."""

    data_kind: str
    samples: int
    """Usable and rejected."""
    no_caption: int
    layout: Mapping[str, Any] = field(default_factory=dict)
    """``word``, ``why`` and ``sets``; empty for records."""
    captions: Mapping[str, int] | None = None
    """Origin -> number of samples; None for records."""
    first_without_caption: str = ""
    several_captions: int = 0
    further: Mapping[str, int] = field(default_factory=dict)
    """Masks and control images: input -> number of samples that have one."""
    sizes: Mapping[str, Any] | None = None
    """``read``, and the ``smallest`` and ``largest`` image of those."""
    clips: Mapping[str, int] = field(default_factory=dict)
    """``samples``, ``shortest`` and ``longest`` in frames."""
    records: Mapping[str, Any] = field(default_factory=dict)
    """Forms, lengths, files and roles."""
    duplicates: int = 0
    """Samples with the content of an earlier one, as far as contents are known."""
    first_duplicate: str = ""

    def as_json(self) -> dict[str, Any]:
        """Keys of ``inspect``."""
        found: dict[str, Any] = {"data_kind": self.data_kind}
        if self.captions is not None:
            found |= {"layout": dict(self.layout), "captions": dict(self.captions)}
            found["first_without_caption"] = self.first_without_caption
            found |= {"several_captions": self.several_captions, "further": dict(self.further)}
        found |= {} if self.sizes is None else {"sizes": dict(self.sizes)}
        found |= {name: dict(value) for name in ("clips", "records") if (value := getattr(self, name))}
        found["duplicates"] = {"known": self.duplicates, "first": self.first_duplicate}
        return found | {"counts": {"samples": self.samples, "no_caption": self.no_caption}}


def describe_data(listing: Listing) -> DataReport:
    """Describe DATA by its listing; records are opened for their roles alone."""
    samples, layout, images = listing.samples, listing.layout, listing.images
    count, first = _duplicates(samples)
    facts: dict[str, Any] = {"duplicates": count, "first_duplicate": first}
    if layout is not None and images is not None:
        numbers = zip(layout.sets, images.set_samples, strict=False)
        sets = [{**part.as_json(), "samples": number} for part, number in numbers]
        facts["layout"] = {"word": layout.word, "why": layout.why, "sets": sets}
        facts |= {"captions": images.captions, "first_without_caption": images.first_without}
        facts["several_captions"] = images.several
        further = {name: part for name, part in samples.inputs.items() if name not in ("image", "caption")}
        facts["further"] = {name: int((part.file >= 0).sum()) for name, part in further.items()}
    if listing.data_kind == "records":
        facts["records"] = _records(listing)
    return DataReport(
        data_kind=listing.data_kind,
        samples=len(samples) + quarantined(listing.rejected),
        no_caption=listing.no_caption,
        sizes=_sizes(samples),
        clips=_clips(samples),
        **facts,
    )


def _sizes(samples: SampleTable) -> dict[str, Any] | None:
    """The smallest and the largest image of those whose header was read."""
    sizes = samples.columns.get("original_size")
    if sizes is None:
        return None
    area = np.asarray(sizes).astype(np.int64).prod(axis=1)
    read = np.flatnonzero(area)
    found: dict[str, Any] = {"read": len(read)}
    for name, choose in (("smallest", np.argmin), ("largest", np.argmax)) if len(read) else ():
        row = int(read[choose(area[read])])
        height, width = map(int, sizes[row])
        found[name] = {"height": height, "width": width, **path_json(samples.names[row])}
    return found


def _clips(samples: SampleTable) -> dict[str, int]:
    clips = samples.columns.get(CLIP)
    if clips is None or not clips.any():
        return {}
    frames = clips[clips[:, 0] > 0, 0]
    return {"samples": len(frames), "shortest": int(frames.min()), "longest": int(frames.max())}


def _duplicates(samples: SampleTable) -> tuple[int, str]:
    """Samples of equal content, and the first one; contents are known as far as files were hashed."""
    content = np.ascontiguousarray(samples.first_input.content)
    known = np.flatnonzero(content.any(axis=1))
    _, first = np.unique(content[known].view("V16").reshape(-1), return_index=True)
    again = known[np.setdiff1d(np.arange(len(known)), first)]
    return len(again), samples.names[int(again[0])] if len(again) else ""


def _records(listing: Listing) -> dict[str, Any]:
    """Forms, lengths, files and roles of records; roles of the first ones only."""
    samples = listing.samples
    chat = int(np.count_nonzero(np.asarray(samples.columns["form"]) == _CHAT))
    files = np.bincount(np.asarray(samples.inputs["record"].file), minlength=len(samples.files))
    named = [int(number) for number in np.flatnonzero(files)[:_FILES]]
    found: dict[str, Any] = {"conversations": chat, "texts": len(samples) - chat}
    found["files"] = [{**path_json(samples.files.names[at]), "records": int(files[at])} for at in named]
    characters = np.asarray(samples.columns["characters"])
    if len(characters):
        found["characters"] = {"shortest": int(characters.min()), "longest": int(characters.max())}
    roles, fields = Counter[str](), Counter[str]()
    looked = np.arange(min(len(samples), _LOOKED_AT))
    for _, inputs in listing.job_inputs(looked, ("record",), strict=False):
        record: Record | None = inputs["record"]
        if record is not None:
            fields.update(name for name in _RECORD_FIELDS if getattr(record, name))
            roles.update(message.role for message in record.messages or ())
    return found | {"roles": dict(roles), "fields": dict(fields), "looked_at": len(looked)}


def shown_samples(listing: Listing, plan: BuildPlan | None) -> tuple[ShownSample, ...]:
    """The first sample, the last, and one between, as they were understood; ``plan`` gives their buckets."""
    samples = listing.samples if plan is None or plan.listing is None else plan.listing.samples
    rows = sorted({0, len(samples) // 2, len(samples) - 1}) if len(samples) else []
    if listing.data_kind == "records":
        return tuple(
            ShownSample(path=samples.names[row], turns=_turns(inputs["record"]))
            for row, inputs in listing.job_inputs(rows[:_SHOWN], ("record",), strict=False)
        )
    return tuple(_shown_image(listing, samples, row, plan) for row in rows)


def _turns(record: Record | None) -> tuple[tuple[str, str], ...]:
    """Roles and beginnings of the texts of a record."""
    if record is None or record.messages is None:
        return (("text", _excerpt((record and record.text) or "")),)
    return tuple((message.role, _excerpt(message.content)) for message in record.messages)


def _excerpt(text: object) -> str:
    words = text if isinstance(text, str) else str(text)
    return words if len(words) <= _EXCERPT else f"{words[:_EXCERPT]}..."


def _shown_image(listing: Listing, samples: SampleTable, row: int, plan: BuildPlan | None) -> ShownSample:
    held, caption = samples.inputs, samples.inputs.get("caption")
    text = None
    if caption is not None and caption.text is not None:
        text = _excerpt(caption.text[row].replace(BETWEEN, " | "))
    places = {name: int(part.file[row]) for name, part in held.items()}
    files = {name: samples.files.names[number] for name, number in places.items() if number >= 0}
    buckets = {}
    for name, work in plan.fields.items() if plan else ():
        items = np.flatnonzero(work.plan.sample == row)
        if len(items) and (label := work.plan.groups[int(work.plan.group[items[0]])].label):
            buckets[name] = label
    layout, name = listing.layout, samples.names[row]
    sets = layout.sets if layout is not None else ()
    inside = (part for part in sets if not part.folder or name.startswith(f"{part.folder}/"))
    own = max(inside, key=lambda part: len(part.folder), default=None)
    return ShownSample(
        path=name,
        set_name=own.label if own is not None and len(sets) > 1 else "",
        split=(own.split if own is not None else "") or (layout.split if layout is not None else ""),
        caption=text,
        caption_file=files.get("caption", ""),
        paired={name: file for name, file in files.items() if name not in ("image", "caption")},
        buckets=buckets,
    )
