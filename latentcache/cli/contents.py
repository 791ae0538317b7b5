"""The contents of DATA and of one field of a snapshot, for ``inspect``, ``info`` and ``build``: JSON and text.

Cost: one pass over the columns of the rows; payloads are not read.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from latentcache.cli.console import SHOWN, counted, human_bytes, out, path_fields, show_table
from latentcache.errors import RecipeError

if TYPE_CHECKING:
    from latentcache.fields.table import Rejected, SampleTable
    from latentcache.sources.scan import Listing
    from latentcache.store.snapshot import FieldRows, Snapshot

#: ``Record.form`` of a conversation.
_CHAT = 1
#: Records whose roles are counted.
_ROLES_OF = 200


def field_contents(rows: FieldRows) -> dict[str, Any]:
    """The JSON form of a field."""
    import numpy as np

    counts = np.bincount(np.asarray(rows.group), minlength=len(rows.groups)).tolist()
    found: dict[str, Any] = {
        "installed": rows.kind is not None,
        "recipe_id": rows.recipe_id.hex(),
        "recipe": dict(rows.recipe_json),
        "provenance": dict(rows.provenance),
        "dtype": rows.spec.dtype,
        "items": len(rows),
        "entries": rows.entries,
        "bytes": int(np.asarray(rows.bytes).sum(dtype=np.int64)),
        "shared": _shared(rows),
        "trimmed_bytes": _trimmed(rows),
        "groups": [
            {"label": group.label, "shape": list(group.shape), "items": count}
            for group, count in zip(rows.groups, counts, strict=True)
        ],
    }
    if rows.kind is not None and rows.recipe is not None:
        found["about"] = dict(rows.kind.describe(rows.recipe, rows.provenance))
        found["numbers"] = dict(rows.kind.numbers(rows.recipe, _columns(rows)))
    if rows.spec.ragged:
        lengths = np.asarray(rows.length)
        low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
        found["lengths"] = {"total": int(lengths.sum(dtype=np.int64)), "shortest": low, "longest": high}
    return found


def _shared(rows: FieldRows) -> dict[str, int]:
    """Items that share the bytes of an equal one, and how many bytes this saves."""
    import numpy as np

    from latentcache.fields.dtypes import DTYPES

    entry = np.asarray(rows.entry).astype(np.int64)
    if rows.packing == "block":
        _, first = np.unique(entry << 32 | np.asarray(rows.start), return_index=True)
        again = np.ones(len(rows), dtype=np.bool_)
        again[first] = False
        each = np.array([np.abs(np.prod(group.shape)) for group in rows.groups])[np.asarray(rows.group)[again]]
        each = each * np.asarray(rows.length)[again] if rows.spec.ragged else each
        return {"items": int(again.sum()), "bytes": int(each.sum()) * DTYPES[rows.spec.dtype][1]}
    sizes = np.asarray(rows.bytes).astype(np.int64)
    return {"items": len(rows) - rows.entries, "bytes": int(sizes[entry].sum() - sizes.sum())}


def _trimmed(rows: FieldRows) -> int:
    """Bytes of padding that is not stored: of each distinct item up to the length that a batch has."""
    import numpy as np

    from latentcache.fields.dtypes import DTYPES

    if not rows.spec.length or not len(rows):
        return 0
    _, first = np.unique(np.asarray(rows.entry).astype(np.int64) << 32 | np.asarray(rows.start), return_index=True)
    row = int(np.prod(rows.groups[0].shape[1:])) * DTYPES[rows.spec.dtype][1]
    return int((rows.spec.length - np.asarray(rows.length)[first].astype(np.int64)).sum()) * row


def sample_repeats(snapshot: Snapshot) -> list[dict[str, int]]:
    """How many samples an epoch serves how often."""
    import numpy as np

    from latentcache.plan.samples import times_counted

    column = snapshot.samples.columns.get("repeats")
    counts = times_counted(None if column is None else np.asarray(column), len(snapshot.samples))
    return [{"times": times, "samples": count} for times, count in counts.items()]


def without_caption(snapshot: Snapshot) -> dict[str, Any]:
    """Number of samples without a caption, and the first; none if they are empty by choice."""
    held = None if snapshot.empty_by_choice else snapshot.samples.inputs.get("caption")
    count, first = held.text.empty() if held is not None and held.text is not None else (0, -1)
    return {"count": count, "first": snapshot.samples.names[first] if count else ""}


def begun_contents(name: str, recipe: Mapping[str, Any], provenance: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON form of a field whose first build has not ended."""
    from latentcache.fields.registry import field_kind

    kind = field_kind(name)
    found: dict[str, Any] = {"installed": kind is not None, "recipe": recipe, "provenance": provenance}
    if kind is not None:
        with contextlib.suppress(RecipeError):
            found["about"] = dict(kind.describe(kind.recipe_from_json(recipe), provenance))
    return found


def _columns(rows: FieldRows) -> dict[str, Any]:
    """What ``kind.numbers`` counts from."""
    return {**rows.columns, **rows.ragged_columns, "length": rows.length}


# DATA


def data_contents(listing: Listing, samples: SampleTable) -> dict[str, Any]:
    """What a listing says of DATA, as JSON values."""
    from latentcache.fields.clips import CLIP
    from latentcache.pipeline.report import quarantined

    found: dict[str, Any] = {"data_kind": listing.data_kind}
    counts = {
        "samples": len(samples) + quarantined(listing.rejected),
        "no_caption": listing.no_caption,
    }
    if listing.layout is not None and listing.images is not None:
        sets = zip(listing.layout.sets, listing.images.set_samples, strict=False)
        found["layout"] = {
            "word": listing.layout.word,
            "why": listing.layout.why,
            "sets": [{**one.as_json(), "samples": count} for one, count in sets],
        }
        found["captions"] = dict(listing.images.captions)
        found["first_without_caption"] = listing.images.first_without
        found["several_captions"] = listing.images.several
        counts |= {name: getattr(listing.images, name) for name in ("masks", "controls", "orphans", "outside")}
    sizes = samples.columns.get("original_size")
    if sizes is not None:
        found["sizes"] = _sizes(samples, sizes)
    clips = samples.columns.get(CLIP)
    if clips is not None and clips.any():
        frames = clips[clips[:, 0] > 0, 0]
        found["clips"] = {"samples": len(frames), "shortest": int(frames.min()), "longest": int(frames.max())}
    if listing.data_kind == "records":
        found["records"] = _records(listing, samples)
    duplicates, first = _duplicates(samples)
    found["duplicates"] = {"known": duplicates, "first": first}
    return {**found, "counts": counts}


def _sizes(samples: SampleTable, sizes: Any) -> dict[str, Any]:
    """Smallest and largest image by area."""
    import numpy as np

    area = np.asarray(sizes).astype(np.int64).prod(axis=1)
    read = np.flatnonzero(area)
    if not len(read):
        return {"read": 0}
    ends = {"smallest": read[int(area[read].argmin())], "largest": read[int(area[read].argmax())]}
    return {"read": len(read)} | {
        name: {"height": int(sizes[row][0]), "width": int(sizes[row][1]), **path_fields(samples.names[row])}
        for name, row in ((name, int(row)) for name, row in ends.items())
    }


def _records(listing: Listing, samples: SampleTable) -> dict[str, Any]:
    """Forms, lengths, files and roles of records; roles of the first ones only."""
    import numpy as np

    chat = int(np.count_nonzero(np.asarray(samples.columns["form"]) == _CHAT))
    files = np.bincount(np.asarray(samples.inputs["record"].file), minlength=len(samples.files))
    found: dict[str, Any] = {
        "conversations": chat,
        "texts": len(samples) - chat,
        "files": [
            {**path_fields(samples.files.names[int(one)]), "records": int(files[one])}
            for one in np.flatnonzero(files)[:SHOWN]
        ],
    }
    characters = samples.columns.get("characters")
    if characters is not None and len(characters):
        found["characters"] = {"shortest": int(characters.min()), "longest": int(characters.max())}
    roles, fields = Counter[str](), Counter[str]()
    some = np.arange(min(len(samples), _ROLES_OF))
    for _, inputs in listing.job_inputs(some, ("record",), strict=False):
        record = {} if inputs["record"] is None else inputs["record"].as_json()
        fields.update(name for name in record if name not in ("source", "line"))
        roles.update(role for role, *_ in record.get("messages") or ())
    return found | {"roles": dict(roles), "fields": dict(fields), "looked_at": len(some)}


def _duplicates(samples: SampleTable) -> tuple[int, str]:
    """Samples whose content an earlier one has, as far as contents are known, and the first of them."""
    import numpy as np

    content = np.ascontiguousarray(next(iter(samples.inputs.values())).content)
    known = np.flatnonzero(content.any(axis=1))
    _, first = np.unique(content[known].view("V16").reshape(-1), return_index=True)
    again = np.setdiff1d(np.arange(len(known)), first)
    return len(again), samples.names[int(known[again[0]])] if len(again) else ""


def set_text(one: Mapping[str, Any]) -> str:
    """A set of images as text."""
    words = [f"{one['name']}: {counted(one['samples'], 'sample')}"]
    words += [f"{one['repeats']} repeats"] if one["repeats"] != 1 else []
    words += [f'class words "{one["class_words"]}"'] if one.get("class_words") else []
    words += ["regularization"] if one.get("is_reg") else []
    words += [f"split {one['split']}"] if one.get("split") else []
    return ", ".join(words)


def captions_text(captions: Mapping[str, int], first_without: str, several: int) -> str:
    """Where captions are from, how many images have several, and the first image without one."""
    told = ", ".join(f"{word} {count}" for word, count in captions.items()) or "none"
    told += f", {counted(several, 'sample')} with several" if several else ""
    return f"{told} (the first without a caption is {first_without})" if first_without else told


def data_lines(listing: Listing, notes: Sequence[Rejected]) -> list[tuple[str, str]]:
    """(label, text): what was recognized, for the plan of a build; in a few lines."""
    layout, images, counts = listing.layout, listing.images, Counter[str]()
    read = f"{listing.data_kind}, layout {layout.word}: {layout.why}" if layout else listing.data_kind
    lines = [("data", read)]
    if images is not None:
        lines.append(("captions", captions_text(images.captions, images.first_without, images.several)))
        lines += further_lines(listing)
    for note in notes:
        counts[note.reason] += note.count
    if counts:
        lines.append(("notes", ", ".join(f"{count} {reason}" for reason, count in counts.most_common())))
    return lines


def further_lines(listing: Listing) -> list[tuple[str, str]]:
    """(label, text) of the masks and control images of samples."""
    from latentcache.sources.layouts.partners import INPUTS

    options = {name: option for option, names in INPUTS.items() for name in names}
    return [
        (name, f"{int((one.file >= 0).sum())} of {len(one.file)} samples (--{options[name]} none leaves them out)")
        for name, one in listing.samples.inputs.items()
        if name in options
    ]


# text


def show_field(name: str, field: Mapping[str, Any], *, demo: bool = False) -> None:
    """A field as text."""
    recipe = field.get("recipe_id", "")[:8]
    state = "" if field.get("installed", True) else ", kind not installed"
    size = f": {counted(field['items'], 'item')}, {human_bytes(field['bytes'])}" if "items" in field else ""
    out(f"{name}{f' (recipe {recipe})' if recipe else ''}{size}{state}{'  (demo: not for training)' if demo else ''}")
    for label, text in field.get("about", {}).items():
        out(f"  {label:9} {text}")
    if field.get("shared", {}).get("items"):
        shared = field["shared"]
        out(f"  shared    {counted(shared['items'], 'item')} of equal inputs, {human_bytes(shared['bytes'])} saved")
    if field.get("trimmed_bytes"):
        out(f"  trimmed   padding is not stored, {human_bytes(field['trimmed_bytes'])} saved")
    groups = [("bucket", "items"), *((one["label"], one["items"]) for one in field.get("groups", ()) if one["label"])]
    if len(groups) > 1:
        show_table(groups)
    show_lengths(field)


def show_captions(without: Mapping[str, Any], samples: int) -> None:
    """Samples without a caption, if there are any."""
    if without["count"]:
        every = without["count"] == samples
        more = "" if every else f", the first is {without['first']}"
        out(f"captions: {'none' if every else counted(without['count'], 'sample') + ' without one'}{more}")


def show_repeats(repeats: Sequence[Mapping[str, int]]) -> None:
    """How often an epoch serves the samples, if it serves some of them more than once."""
    if any(one["times"] != 1 for one in repeats):
        out("repeats: " + ", ".join(f"{counted(one['samples'], 'sample')} {one['times']} times" for one in repeats)
            + " per epoch")  # fmt: skip


def show_lengths(field: Mapping[str, Any]) -> None:
    """Lengths, numbers and sources of a ragged field as text."""
    lengths, numbers = field.get("lengths"), field.get("numbers", {})
    if numbers:
        out("  " + ", ".join(f"{label.replace('_', ' ')} {number:,}" for label, number in numbers.items()))
    if lengths and field["items"]:
        mean = lengths["total"] / field["items"]
        out(f"  length {lengths['shortest']} to {lengths['longest']}, mean {mean:.0f}, total {lengths['total']:,}")
