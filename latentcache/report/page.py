"""``report``: one self-contained page of a cache. Facts come from the modules beside this one, markup from templates.

Guarantee: names, captions and texts of a cache never become markup: every value is escaped by the templates, and the
page's own policy runs no script but the one it was made with. A part that cannot be made is missing with its reason.
Facts have names as they are; bytes that are not UTF-8 become replacement characters in markup.
Cost: figures are over all samples; about a hundred samples become images, worst first.
"""

from __future__ import annotations

import base64
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from latentcache._version import __version__
from latentcache.errors import CacheNotFoundError, LatentcacheError, count_of
from latentcache.fields.settings import flat_settings
from latentcache.loader.cache import Cache, open_cache
from latentcache.plan.batching import PlanReport
from latentcache.plan.numbers import human_bytes
from latentcache.report.cache import describe_cache
from latentcache.report.figures import (
    Stored,
    audit,
    caption_facts,
    crop_facts,
    crops_of,
    remark_facts,
    set_facts,
)
from latentcache.report.sample import row_facts, text_decoder, token_facts
from latentcache.report.sheet import sheet_facts
from latentcache.store.snapshot import FieldRows, Snapshot, open_leased
from latentcache.verify.compare import find_data
from latentcache.verify.entries import Depth
from latentcache.verify.findings import Finding, grouped, shown_text
from latentcache.verify.verify import check_cache

if TYPE_CHECKING:
    import jinja2

_TEMPLATES = Path(__file__).parent / "templates"
#: Findings and rejected files of one reason that are listed, and characters of a setting.
_LISTED, _SETTING = 50, 60
#: Parts of a page that may be missing.
_PARTS = ("cache", "compare", "verify", "sheet", "plan", "crops", "captions", "remarks", "sets", "tokens", "audit",
          "rejected", "recipes")  # fmt: skip


def report_facts(
    cache_folder: Path,
    *,
    batch_size: int = 4,
    images: int = 100,
    decode: int = 0,
    verify: bool = True,
    layout: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Collect all facts of a page about a cache, as JSON values.

    Args:
        cache_folder: The cache.
        batch_size: Samples of a batch, for the bucket map.
        images: Samples that become images; 0: none, for a page to share.
        decode: Samples whose latents are decoded by the model.
        verify: Compare the cache with its sources, quickly.
        layout: Rows of tokens, as arguments of ``cache.rows``.

    Raises:
        CacheNotFoundError: There is no cache.
    """
    missing = list[dict[str, str]]()
    part = partial(_part, missing)
    facts: dict[str, Any] = dict.fromkeys(_PARTS)
    facts |= {
        "title": cache_folder.absolute().name.removesuffix(".latentcache"),
        "made": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        "version": __version__,
        "missing": missing,
        "batch_size": batch_size,
        "cache": part("The contents", lambda: describe_cache(cache_folder)),
    }
    opened: Cache | None = part("The snapshot", lambda: _opened(cache_folder))
    if opened is None:
        return facts
    (snapshot,) = opened.snapshots
    stored = Stored(snapshot)
    crops = part("Sizes", lambda: crops_of(snapshot))
    facts["recipes"] = [_recipe(name, rows) for name, rows in snapshot.fields.items()]
    if opened.buckets:
        plan = part("The bucket map", lambda: opened.plan(batch_size=batch_size).as_json())
        facts["plan"] = plan and plan | {"excluded": opened.excluded}
    facts["crops"] = part("Crops", lambda: crop_facts(crops, snapshot) if crops is not None else None)
    facts["captions"] = part("Captions", lambda: caption_facts(snapshot))
    facts["remarks"] = part("Remarks", lambda: remark_facts(snapshot)) or []
    facts["sets"] = part("Sets", lambda: set_facts(snapshot)) or []
    facts["tokens"] = part("Rows of tokens", lambda: token_facts(opened, layout)) or []
    facts["audit"] = part("The audit", lambda: audit(snapshot, stored)) or []
    facts["rejected"] = part("Rejected files", lambda: _rejected(snapshot)) or []
    facts["verify"] = part("Findings", lambda: _verified(cache_folder)) if verify else None
    if crops is not None and images:
        root = part("Images", lambda: find_data(cache_folder, snapshot.source, None))
        findings = facts["verify"]["groups"] if facts["verify"] else []
        make = partial(sheet_facts, snapshot, crops, stored, root, findings, images, decode)
        facts["sheet"] = part("The contact sheet", make)
    stored.close()
    return facts


def _part(missing: list[dict[str, str]], name: str, make: Callable[[], Any]) -> Any:
    """Make facts; after an error they are None, and the reason joins ``missing``."""
    try:
        return make()
    except LatentcacheError as error:
        if isinstance(error, CacheNotFoundError) and error.slug != "cache-unfinished":
            raise
        reason = error
    why = f"{reason.what}{f' ({reason.why})' if reason.why else ''}"
    missing.append({"part": name, "why": why, "fix": reason.fix})
    return None


def _opened(folder: Path) -> Cache:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the page says it
        return open_cache(folder, allow_partial=True)


def cache_of(path: Path) -> Path:
    """The cache that a path names: itself, or the one of a snapshot's folder."""
    return path.parent.parent if path.parent.name == "snapshots" and path.name.isdecimal() else path


def snapshot_at(path: Path) -> Snapshot:
    """The current snapshot of a cache, or the one whose folder is given: ``CACHE/snapshots/000002``."""
    cache = cache_of(path)
    return open_leased(cache, None if cache == path else int(path.name))


def _recipe(name: str, rows: FieldRows) -> dict[str, Any]:
    """The settings of a field, and where its values are from."""
    provenance = rows.provenance
    libraries = ", ".join(f"{library} {version}" for library, version in (provenance.get("libraries") or {}).items())
    origin = {
        "model": provenance.get("label") or provenance.get("model") or provenance.get("tokenizer"),
        "machine": provenance.get("machine"),
    }
    return {
        "field": name,
        "recipe_id": rows.recipe_id.hex()[:8],
        "settings": [(setting, _short(value)) for setting, value in flat_settings(rows.recipe_json).items()],
        "origin": [(key, _short(value)) for key, value in (origin | {"libraries": libraries}).items() if value],
    }


def _short(value: Any) -> str:
    """A setting as text; a hash is cut to eight digits."""
    text = str(value)
    if isinstance(value, str) and len(value) in (32, 64) and set(value) <= set("0123456789abcdef"):
        return value[:8]
    return text if len(text) <= _SETTING else f"{text[:_SETTING]}..."


def _verified(folder: Path) -> dict[str, Any]:
    report, _ = check_cache(folder, Depth())
    return {
        "counts": {name: number for name, number in report.counts.items() if number and name != "unreferenced"},
        "samples": report.samples,
        "not_compared": list(report.not_compared),
        "groups": list(_groups(report.findings)),
    }


def _rejected(snapshot: Snapshot) -> list[dict[str, Any]]:
    findings = [Finding.of_rejected("quarantined", rejected) for rejected in snapshot.rejected]
    findings += [Finding.of_rejected("note", note) for note in snapshot.notes]
    return list(_groups(findings))


def _groups(findings: Sequence[Finding]) -> Iterator[dict[str, Any]]:
    """Findings of one category and reason together, with what to do."""
    for group in grouped(findings):
        items = [_finding(finding) for finding in group[:_LISTED]]
        yield {
            "category": "rejected" if group[0].category == "quarantined" else group[0].category,
            "reason": group[0].reason,
            "count": sum(finding.count for finding in group),
            "items": items,
            "hints": list(dict.fromkeys(item["hint"] for item in items if item["hint"])),
            "fixes": list(dict.fromkeys(finding.fix for finding in group if finding.fix))[:3],
        }


def _finding(finding: Finding) -> dict[str, Any]:
    name = finding.path or finding.file or finding.key
    expected = f"expected {finding.expected}, found {finding.found}"
    return {
        "name": f"{name}:{finding.line}" if finding.line else name,
        "field": finding.field,
        "text": expected if finding.expected else finding.found,
        "names": list(finding.names),
        "hint": finding.hint,
    }


# markup


def render(facts: Mapping[str, Any]) -> str:
    """Render facts as one self-contained HTML document."""
    script = (_TEMPLATES / "report.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    page = _environment().get_template("report.html")
    return shown_text(page.render(facts=facts, style=_style(), script=script, digest=digest))


def fragment(name: str, facts: Mapping[str, Any]) -> str:
    """Render a part of the page for a notebook: ``plan``, ``sample``, ``overview`` or ``rows``."""
    parts = _environment().get_template("parts.html").module
    make = getattr(parts, f"part_{name}")
    return shown_text(f'<style>{_style()}</style><div class="lc lc-inline">{make(facts)}</div>')


def html_of(shown: Any) -> str:
    """Show a cache, rows of tokens, a loader or a plan in a notebook."""
    if isinstance(shown, Cache):
        return "".join(
            fragment("overview", {"cache": describe_cache(snapshot.paths.root)}) for snapshot in shown.snapshots
        )
    report = getattr(shown, "report", shown)
    if isinstance(report, PlanReport):
        return fragment("plan", report.as_json())
    documents = shown.parts[0].documents
    decode, why = text_decoder(documents.snapshot.fields[documents.field])
    return fragment("rows", {"field": documents.field, "undecoded": why, **row_facts(shown, decode)})


def _style() -> str:
    return (_TEMPLATES / "report.css").read_text("utf-8")


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = lambda value: f"{value:,}"
    environment.filters["percent"] = lambda value, digits=0: f"{100 * value:.{digits}f}%"
    environment.filters["counted"] = count_of
    environment.filters["bytes"] = human_bytes
    return environment
