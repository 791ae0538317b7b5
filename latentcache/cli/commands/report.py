"""``latentcache report``: a page that shows a cache, or what changed between two."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from latentcache.cli import flags
from latentcache.cli.console import Result, as_shown
from latentcache.cli.flags import argument, option
from latentcache.errors import UsageError, count_of
from latentcache.plan.numbers import human_bytes


def report(
    cache: flags.CacheOrUrl,
    other: Path | None = argument("[OTHER]", "A second cache, or CACHE/snapshots/N.", default=None),
    *,
    out: Path = option(Path("report.html"), "--out -o FILE", "The page. [default: report.html]"),
    batch_size: int = option(4, "--batch-size N", "Samples per batch, for the bucket map. [default: 4]", min=1),
    images: int = option(100, "--images N", "Samples shown as images, worst first. [default: 100]", min=1),
    no_images: bool = option(False, "--no-images", "Show no images, for a page to share."),
    decode: int = option(0, "--decode N", "Decode N latents with the model, which is loaded.", min=0),
    no_verify: bool = option(False, "--no-verify", "Skip the quick check."),
    pack: flags.Pack = None,
    pad: flags.Pad = None,
    chunk: flags.Chunk = None,
    overflow: flags.Overflow = None,
    open_page: bool = option(False, "--open", "Open the page in a browser."),
    field: flags.Kinds = None,
) -> Result:
    """Write a page that shows a cache: images, crops, captions, tokens, findings. With OTHER: the changes to it.

    Examples:
        latentcache report images.latentcache -o report.html
        latentcache report images.latentcache -o report.html --no-images
        latentcache report old.latentcache new.latentcache -o changes.html
    """
    from latentcache.report.figures import compare_facts
    from latentcache.report.page import cache_of, render, report_facts, snapshot_at

    lengths = {name: value for name, value in (("pack", pack), ("pad", pad), ("chunk", chunk)) if value is not None}
    if len(lengths) > 1 or (overflow is not None and not lengths):
        fix = f"latentcache report {shlex.quote(str(cache))} --pack 4096"
        raise UsageError("--pack, --pad, --chunk: give one of them", fix=fix)
    if cache_of(cache) != cache and other is None:
        whole = shlex.quote(str(cache_of(cache)))
        raise UsageError(
            f"{cache}: a snapshot is shown beside another one only",
            fix=f"latentcache report {whole}; or latentcache report {shlex.quote(str(cache))} {whole}",
        )
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise UsageError(f"--out={out}: not a place for a file", fix="give a file name, such as --out report.html")
    layout = {**lengths, **({} if overflow is None else {"overflow": overflow})}
    facts = report_facts(
        cache_of(cache),
        batch_size=batch_size,
        images=0 if no_images or other is not None else images,
        decode=decode,
        verify=not no_verify and other is None,
        layout=layout,
    )
    if other is not None:
        facts["compare"] = compare_facts(snapshot_at(cache), snapshot_at(other))
    page = as_shown(render(facts))
    out.write_text(page, "utf-8", "xmlcharrefreplace")
    if open_page:
        import webbrowser

        webbrowser.open(out.absolute().as_uri())
    payload = {"out": str(out), "bytes": out.stat().st_size, "facts": _facts_alone(facts)}
    return Result(payload, _lines(out, facts))


def _facts_alone(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a page without its images."""
    from latentcache.verify.findings import shown_text

    kept = dict(facts)
    if facts["sheet"]:
        cards = [card | {"original": "", "stored": []} for card in facts["sheet"]["cards"]]
        kept["sheet"] = {**facts["sheet"], "cards": cards}
    values: dict[str, Any] = json.loads(shown_text(json.dumps(kept, ensure_ascii=False)))
    return values


def _lines(out: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    for part in facts["missing"]:
        yield f"{part['part']} cannot be shown: {part['why']}"
    if about := facts["cache"]:
        yield f"{count_of(about['counts']['samples'], 'samples')} in {', '.join(about['fields'])}"
    if (checked := facts.get("verify")) is not None:
        counts = ", ".join(f"{number} {name}" for name, number in checked["counts"].items())
        yield f"quick check: {counts}"
    for field in facts.get("audit") or ():
        kinds = ("constant", "copies", "damaged")
        counts = ", ".join(f"{field[f'{kind}_count']} {kind}" for kind in kinds if field[f"{kind}_count"])
        if field["unusual"]:
            spread = f"values spread by {field['overall']:.2f} after scaling, models expect about 1"
            counts = f"{counts}, {spread}" if counts else spread
        yield f"audit of {field['field']}: {counts or 'nothing unusual'}"
    yield f"{out}: {human_bytes(out.stat().st_size)}, open it in a browser"
