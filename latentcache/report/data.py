"""What is understood of DATA: layout, captions, sizes, records, and a few samples as a build would use them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from latentcache.fields.captions import BETWEEN
from latentcache.fields.clips import CLIP
from latentcache.pipeline.publish import quarantined
from latentcache.verify.findings import path_json

if TYPE_CHECKING:
    from latentcache.fields.table import SampleTable
    from latentcache.pipeline.publish import BuildPlan
    from latentcache.sources.records import Record
    from latentcache.sources.scan import Listing

#: ``Record.form`` of a conversation.
_CHAT = 1
#: Records whose roles are counted, and files of records that are named.
_LOOKED_AT, _FILES = 200, 10
#: Characters of a text that is shown.
_EXCERPT = 200
#: Parts of a record that are counted.
_RECORD_FIELDS = ("text", "begin", "messages", "tools", "options")


def describe_data(listing: Listing) -> dict[str, Any]:
    """Describe DATA by its listing, as keys of ``inspect``; records are opened for their roles alone."""
    samples, layout, images = listing.samples, listing.layout, listing.images
    about: dict[str, Any] = {"data_kind": listing.data_kind, "duplicates": _duplicates(samples)}
    if layout is not None and images is not None:
        numbers = zip(layout.sets, images.set_samples, strict=False)
        sets = [{**part.as_json(), "samples": number} for part, number in numbers]
        about["layout"] = {"word": layout.word, "why": layout.why, "sets": sets}
        about |= {"captions": images.captions, "first_without_caption": images.first_without}
        about["several_captions"] = images.several
        further = {name: part for name, part in samples.inputs.items() if name not in ("image", "caption")}
        about["further"] = {name: int((part.file >= 0).sum()) for name, part in further.items()}
    if listing.data_kind == "records":
        about["records"] = _records(listing)
    if "original_size" in samples.columns:
        about["sizes"] = _sizes(samples)
    if CLIP in samples.columns and samples.columns[CLIP].any():
        about["clips"] = _clips(samples)
    count = len(samples) + quarantined(listing.rejected)
    return about | {"counts": {"samples": count, "no_caption": listing.no_caption}}


def _sizes(samples: SampleTable) -> dict[str, Any]:
    """The smallest and the largest image of those whose header was read."""
    sizes = samples.columns["original_size"]
    area = np.asarray(sizes).astype(np.int64).prod(axis=1)
    read = np.flatnonzero(area)
    about: dict[str, Any] = {"read": len(read)}
    for name, choose in (("smallest", np.argmin), ("largest", np.argmax)) if len(read) else ():
        row = int(read[choose(area[read])])
        height, width = map(int, sizes[row])
        about[name] = {"height": height, "width": width, **path_json(samples.names[row])}
    return about


def _clips(samples: SampleTable) -> dict[str, int]:
    """The number of videos, and their lengths in frames."""
    clips = samples.columns[CLIP]
    frames = clips[clips[:, 0] > 0, 0]
    return {"samples": len(frames), "shortest": int(frames.min()), "longest": int(frames.max())}


def _duplicates(samples: SampleTable) -> dict[str, Any]:
    """Count samples with the content of an earlier one, as far as files were hashed, and name the first."""
    content = np.ascontiguousarray(samples.first_input.content)
    known = np.flatnonzero(content.any(axis=1))
    _, first = np.unique(content[known].view("V16").reshape(-1), return_index=True)
    again = known[np.setdiff1d(np.arange(len(known)), first)]
    return {"known": len(again), "first": samples.names[int(again[0])] if len(again) else ""}


def _records(listing: Listing) -> dict[str, Any]:
    """Describe forms, lengths and files of records, and roles of the first ones."""
    samples = listing.samples
    chat = int(np.count_nonzero(np.asarray(samples.columns["form"]) == _CHAT))
    files = np.bincount(np.asarray(samples.inputs["record"].file), minlength=len(samples.files))
    named = [int(number) for number in np.flatnonzero(files)[:_FILES]]
    about: dict[str, Any] = {"conversations": chat, "texts": len(samples) - chat}
    about["files"] = [{**path_json(samples.files.names[at]), "records": int(files[at])} for at in named]
    characters = np.asarray(samples.columns["characters"])
    if len(characters):
        about["characters"] = {"shortest": int(characters.min()), "longest": int(characters.max())}
    roles, fields = Counter[str](), Counter[str]()
    looked = np.arange(min(len(samples), _LOOKED_AT))
    for _, inputs in listing.job_inputs(looked, ("record",), strict=False):
        record: Record | None = inputs["record"]
        if record is not None:
            fields.update(name for name in _RECORD_FIELDS if getattr(record, name))
            roles.update(message.role for message in record.messages or ())
    return about | {"roles": dict(roles), "fields": dict(fields), "looked_at": len(looked)}


def shown_samples(listing: Listing, plan: BuildPlan | None) -> list[dict[str, Any]]:
    """Show how the first, a middle and the last sample were understood; ``plan`` gives their buckets."""
    samples = listing.samples
    rows = sorted({0, len(samples) // 2, len(samples) - 1}) if len(samples) else []
    if listing.data_kind == "records":
        return [
            {**path_json(samples.names[row]), "turns": _turns(inputs["record"])}
            for row, inputs in listing.job_inputs(rows, ("record",), strict=False)
        ]
    return [_shown_image(listing, row, plan) for row in rows]


def _turns(record: Record | None) -> list[dict[str, str]]:
    """Roles and beginnings of the texts of a record; the role of a plain text is ``text``."""
    if record is None or record.messages is None:
        return [{"role": "text", "text": _excerpt((record and record.text) or "")}]
    return [{"role": message.role, "text": _excerpt(message.content)} for message in record.messages]


def _excerpt(text: str) -> str:
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _shown_image(listing: Listing, row: int, plan: BuildPlan | None) -> dict[str, Any]:
    samples, layout = listing.samples, listing.layout
    assert layout is not None  # of images
    name = samples.names[row]
    inside = (part for part in layout.sets if not part.folder or name.startswith(f"{part.folder}/"))
    owner = max(inside, key=lambda part: len(part.folder), default=None)
    numbers = {role: int(part.file[row]) for role, part in samples.inputs.items()}
    files = {role: samples.files.names[number] for role, number in numbers.items() if number >= 0}
    buckets = {}
    for field, work in plan.fields.items() if plan else ():
        items = np.flatnonzero(work.plan.sample == row)
        if len(items) and (label := work.plan.groups[int(work.plan.group[items[0]])].label):
            buckets[field] = label
    shown: dict[str, Any] = {
        "set": owner.label if owner is not None and len(layout.sets) > 1 else "",
        "split": (owner.split if owner is not None else "") or layout.split,
        "caption_file": files.get("caption", ""),
        "paired": {role: file for role, file in files.items() if role not in ("image", "caption")},
        "buckets": buckets,
    }
    shown = {key: value for key, value in shown.items() if value}
    captions = samples.inputs["caption"].text if "caption" in samples.inputs else None
    if captions is not None:
        shown["caption"] = _excerpt(captions[row].replace(BETWEEN, " | "))
    return path_json(name) | shown
