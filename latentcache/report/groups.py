"""Findings by cause: what a person reads first, while JSON lists every file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from latentcache.verify.findings import Finding


def _joined(before: Finding, after: Finding) -> str:
    """The fields of both."""
    fields = {*(before.field or before.target).split(", "), after.field or after.target}
    return ", ".join(sorted(filter(None, fields)))


def grouped(findings: Iterable[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Yield the findings of one category and reason together, each file or record once with all its fields."""
    groups = dict[tuple[str, str], dict[tuple[object, ...], Finding]]()
    for finding in findings:
        group = groups.setdefault((finding.category, finding.reason), {})
        label = (finding.path, finding.line, finding.file, finding.key)
        before = group.get(label)
        group[label] = finding if before is None else replace(before, field=_joined(before, finding))
    rejected = {reason for category, reason in groups if category == "quarantined"}
    for (category, reason), group in groups.items():
        if category != "note" or reason not in rejected:  # said of the rejected samples already
            yield tuple(group.values())
