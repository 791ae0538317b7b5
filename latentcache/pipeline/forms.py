"""How plans, facts and errors travel between a build and its workers: as JSON, and back again.

Guarantee: what comes out equals what went in; an error keeps its class, its words and its exit status. Names that are
not UTF-8 travel as the surrogate escapes that they are.
"""

from __future__ import annotations

import traceback
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from latentcache import errors
from latentcache.encoders.describe import ModelDescription
from latentcache.errors import CacheLockedError, InterruptedBuildError, LatentcacheError
from latentcache.geometry.buckets import BucketTable
from latentcache.geometry.sizes import Size
from latentcache.identity.key import EntryKey
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.survey import placements_for
from latentcache.pipeline.work import Planned
from latentcache.recipe import EncoderSpec
from latentcache.sources.sample import Refusal, Sample
from latentcache.store.catalog import Located
from latentcache.store.entry import pack_facts, pack_header, unpack_facts, unpack_header
from latentcache.store.generation import pack_memo, unpack_memo

Form = dict[str, Any]
_PARTS = ("what", "where", "why", "fix", "slug")


def planned_form(planned: Planned) -> list[Any]:
    """What a worker has to know of a sample; its caption is not among it, its placements follow from its size."""
    return [
        planned.index,
        planned.sample.name,
        planned.size.height,
        planned.size.width,
        pack_memo(planned.sample.stat),
    ]


def as_planned(form: list[Any], tables: tuple[BucketTable, ...]) -> Planned:
    """Inverse of :func:`planned_form`, but for the caption."""
    index, name, height, width, stat = form
    size = Size(height, width)
    sample = Sample(name=name, caption="", stat=unpack_memo(stat))
    return Planned(index=index, sample=sample, size=size, placements=placements_for(size, tables))


def refusal_form(refusal: Refusal) -> Form:
    """A refusal."""
    form: Form = {name: getattr(refusal, name) for name in ("name", "cause", "detail", "hint")}
    stat = None if refusal.stat is None else pack_memo(refusal.stat)
    return form | {"content": refusal.content.hex(), "stat": stat}


def as_refusal(form: Form) -> Refusal:
    """Inverse of :func:`refusal_form`."""
    stat = None if form["stat"] is None else unpack_memo(form["stat"])
    return Refusal(**{**form, "content": bytes.fromhex(form["content"]), "stat": stat})


def located_form(entry: Located) -> Form:
    """An entry and where it lies."""
    header, facts = pack_header(entry.header, entry.key), pack_facts(entry.facts)
    return {
        "key": entry.key.hex(),
        "shard": entry.shard,
        "offset": entry.offset,
        "header": header.hex(),
        "facts": facts.hex(),
    }


def as_located(form: Form) -> Located:
    """Inverse of :func:`located_form`."""
    key = bytes.fromhex(form["key"])
    return Located(
        key=key,
        shard=form["shard"],
        offset=form["offset"],
        header=unpack_header(bytes.fromhex(form["header"]), key),
        facts=unpack_facts(bytes.fromhex(form["facts"]), EntryKey.unpack(key).bucket),
    )


def settings_form(settings: BuildSettings) -> Form:
    """Everything of a build's settings that is a plain value; the recipe travels by itself."""
    simple = (str, int, float, bool, type(None))
    values = {item.name: getattr(settings, item.name) for item in fields(settings)}
    return {name: value for name, value in values.items() if isinstance(value, simple)} | {"data": str(settings.data)}


def as_settings(form: Form) -> BuildSettings:
    """Inverse of :func:`settings_form`, as far as a worker has use for it."""
    return BuildSettings(**{**form, "data": Path(form["data"])})


def description_form(description: ModelDescription) -> Form:
    """A model."""
    values = {item.name: getattr(description, item.name) for item in fields(description)}
    paths = {"weights": [str(path) for path in description.weights]}
    spec = {"spec": asdict(description.spec)}
    return values | paths | spec | {"config_path": description.config_path and str(description.config_path)}


def as_description(form: Form) -> ModelDescription:
    """Inverse of :func:`description_form`."""
    paths = {
        "weights": tuple(map(Path, form["weights"])),
        "config_path": form["config_path"] and Path(form["config_path"]),
    }
    return ModelDescription(**{**form, **paths, "spec": EncoderSpec.from_json(form["spec"])})


def error_form(error: BaseException) -> Form:
    """Any error."""
    name = type(error).__name__
    if isinstance(error, LatentcacheError):
        return {"class": name, "exit_code": error.exit_code, **error.as_json()}
    if isinstance(error, MemoryError):
        return {"class": "MemoryError", "what": str(error)}
    if isinstance(error, OSError):
        return {
            "class": "OSError",
            "errno": error.errno,
            "what": error.strerror or str(error),
            "file": error.filename,
        }
    trace = "".join(traceback.format_exception(error))
    return {"class": "bug", "what": f"{name}: {error}" if name != "RuntimeError" else str(error), "trace": trace}


def as_error(form: Form) -> BaseException:
    """Inverse of :func:`error_form`; an error that is a fault of our own is a ``RuntimeError`` with its trace."""
    known = getattr(errors, form["class"], None)
    if isinstance(known, type) and issubclass(known, LatentcacheError):
        more: Form = {}
        if known is CacheLockedError:
            more = {"holder": form.get("holder", {})}
        elif known is InterruptedBuildError:
            more = {"signal_number": form["exit_code"] - 128}
        error: LatentcacheError = known(**{part: form[part] for part in _PARTS}, **more)
        error.exit_code = form["exit_code"]
        return error
    if form["class"] == "MemoryError":
        return MemoryError(form["what"])
    if form["class"] == "OSError":
        return OSError(form["errno"], form["what"], form["file"])
    found = RuntimeError(form["what"])
    found.add_note(form["trace"])
    return found
