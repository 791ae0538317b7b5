"""Collect what a check finds: one category per sample, counts, one finding per cause, and the command that mends it.

Findings are kept in columns until the report is made. A cause that hits more than ``EACH`` samples becomes one
finding with a count and the first names. So a touched file of ten million records costs one array.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from latentcache.fields.table import Rejected, SampleTable
from latentcache.sources.causes import hint_for
from latentcache.value import Value

CATEGORIES = ("corrupt", "unverifiable", "drift", "missing", "stale", "quarantined", "touched", "ok")
"""Most severe first: a sample is in the first that fits."""
PROBLEMS = frozenset({"corrupt", "unverifiable", "drift", "missing", "stale"})
"""Categories that make a cache unfit for training as it is."""
#: Samples up to which a cause gets one finding for each, and names that a finding for more of them shows.
EACH, NAMES = 100, 10

_OK = len(CATEGORIES) - 1
#: Category -> its meaning, in one line.
HINTS = {
    "corrupt": "the stored bytes are not the bytes that were written",
    "unverifiable": "it could not be read, so its state is unknown",
    "drift": "encoding the input again gives another result than the stored one",
    "stale": "the entry is intact but out of date",
    "missing": "the cache has no entry for it",
    "quarantined": "the build rejected this input; the cache leaves it out",
    "touched": "metadata-only change: the input was written or moved, and its bytes are the same",
}
#: A text for all samples of a finding, or what gives the text of the n-th one.
Text = str | Callable[[int], str]


class Finding(Value):
    """One cause, and the sample or the samples that it hits."""

    category: str
    reason: str
    path: str = ""
    """Relative to DATA; empty if ``count`` is above 1 and the samples are in several files."""
    line: int = 0
    key: str = ""
    """Key of the entry or item, in hex."""
    field: str = ""
    file: str = ""
    """Relative to the cache: the damaged file."""
    expected: str = ""
    found: str = ""
    hint: str = ""
    fix: str = ""
    count: int = 1
    names: tuple[str, ...] = ()
    """The first samples, if it stands for several."""
    target: str = ""
    """Field of the cache that rejects it; in JSON if ``field`` is empty."""

    @classmethod
    def of_rejected(cls, category: str, item: Rejected) -> Finding:
        """A rejected input, or a note."""
        return cls(
            category=category,
            reason=item.reason,
            path=item.name,
            line=item.line,
            field=item.field,
            target=item.target,
            found=item.detail,
            hint=item.hint or hint_for(item.reason),
            count=item.count,
        )

    def as_json(self) -> dict[str, Any]:
        """The item of the JSON contract; parts that are empty are left out."""
        item = {"category": self.category, "reason": self.reason, **path_json(self.path), "hint": self.hint}
        names = ("line", "key", "file", "expected", "found", "fix")
        more: dict[str, Any] = {name: getattr(self, name) for name in names}
        more |= {"field": self.field or self.target, "count": self.count if self.count > 1 else 0}
        more["names"] = [shown_text(name) for name in self.names]
        return item | {
            name: shown_text(value) if isinstance(value, str) else value for name, value in more.items() if value
        }


class RecipeChange(Value):
    """One setting in which the recipe of a field differs from the one that was asked for."""

    field: str
    setting: str
    cached: Any
    requested: Any


class Reencoded(Value):
    """Result of encoding samples again."""

    asked: int = 0
    seed: int = 0
    samples: int = 0
    """Encoded again, with all their entries."""
    entries: int = 0
    drifted: int = 0
    """Entries."""
    device: str = ""
    largest: float = 0.0
    """Largest difference, in the unit of the kind."""
    mean: float = 0.0
    """Largest mean difference of an entry."""
    confidence: str = ""
    """Conclusion from clean samples about all; empty if one was not clean."""

    def as_json(self) -> dict[str, Any]:
        """JSON form; a difference that is not finite is null."""
        finite = {name: vars(self)[name] for name in ("largest", "mean")}
        return vars(self) | {name: value if value < float("inf") else None for name, value in finite.items()}


class VerifyReport(Value):
    """Result of a check."""

    mode: str
    snapshot: int
    counts: dict[str, int]
    """Samples of each category, and ``unreferenced``: entries that no snapshot needs."""
    findings: tuple[Finding, ...]
    """Everything but ``ok``, most severe first."""
    samples: int
    """Usable and rejected ones of the snapshot."""
    checked: Mapping[str, int] = field(default_factory=dict)
    not_looked_at: int = 0
    """Samples that were not chosen, or for which there was no time: in no category."""
    not_compared: tuple[str, ...] = ()
    """Models that are not here, by field and with their path; fields whose kind is not installed."""
    recipe_diff: tuple[RecipeChange, ...] = ()
    confidence: str = ""
    reencoded: Reencoded | None = None
    recipe_ids: Mapping[str, str] = field(default_factory=dict)
    """Field -> recipe id in hex."""
    allow_failed: str = "0"
    """Rejected inputs that the build tolerated: a number, or a part such as ``2%``."""
    part: str = ""
    """``i/n`` if the cache is one of n parts of its data."""
    building: bool = False
    """True if a build was started here that has not ended."""
    complete: bool = True
    elapsed_s: float = 0.0

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {name}" for name, number in self.counts.items() if number) or "no samples"
        return f"VerifyReport({self.mode} check of snapshot {self.snapshot}: {counts})"

    def exit_code(self, allowed_failed: int = 0) -> int:
        """0 if the cache can be trained on as it is, else 1."""
        return int(any(self.counts[name] for name in PROBLEMS) or self.counts["quarantined"] > allowed_failed)

    def as_json(self) -> dict[str, Any]:
        """Payload of ``verify --json``."""
        data = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "findings"}
        return data | {
            "recipe_diff": [vars(change) for change in self.recipe_diff],
            "reencoded": None if self.reencoded is None else self.reencoded.as_json(),
            "elapsed_s": round(self.elapsed_s, 3),
            "items": [finding.as_json() for finding in self.findings],
        }


class _Batch(NamedTuple):
    samples: NDArray[np.int64]
    keys: NDArray[np.uint8] | None
    expected: Text
    found: Text
    hint: str


class Findings:
    """Findings of one check, in columns."""

    def __init__(self, table: SampleTable) -> None:
        self.table = table
        self.rank = np.full(len(table), _OK, dtype=np.uint8)
        """(S,) position of each sample's category in ``CATEGORIES``."""
        self.others: list[Finding] = []
        """Findings about no sample of the snapshot."""
        self._causes: dict[tuple[int, str, str, str], list[_Batch]] = {}

    def add(
        self,
        category: str,
        reason: str,
        samples: NDArray[np.integer],
        *,
        field: str = "",
        file: str = "",
        keys: NDArray[np.uint8] | None = None,
        expected: Text = "",
        found: Text = "",
        hint: str = "",
    ) -> None:
        """Note n samples (n,) with a cause; ``keys`` (n, 32) of their items."""
        if not len(samples):
            return
        rank = CATEGORIES.index(category)
        wide = samples.astype(np.int64)
        np.minimum.at(self.rank, wide, rank)
        self._causes.setdefault((rank, reason, field, file), []).append(_Batch(wide, keys, expected, found, hint))

    def of(self, *categories: str) -> NDArray[np.bool_]:
        """(S,) samples that are in one of these categories."""
        return np.array([name in categories for name in CATEGORIES])[self.rank]

    def counts(self, looked: NDArray[np.bool_]) -> dict[str, int]:
        """Samples per category; of those not looked at only the ones with a finding that must be mended."""
        seen = np.bincount(self.rank[looked | self.of(*PROBLEMS)], minlength=len(CATEGORIES)).tolist()
        counts = dict(zip(CATEGORIES, seen, strict=True))
        for finding in self.others:
            counts[finding.category] += finding.count
        return counts

    def result(self, looked: NDArray[np.bool_]) -> tuple[Finding, ...]:
        """One finding per cause, or per sample of causes that hit few; only those that decide a sample's category."""
        findings = list(self.others)
        done: dict[tuple[int, str], NDArray[np.bool_]] = {}
        for (rank, reason, field_name, file), batches in sorted(self._causes.items(), key=lambda item: item[0][0]):
            category = CATEGORIES[rank]
            shown = done.setdefault((rank, field_name), np.zeros(len(self.rank), dtype=np.bool_))
            kept = []
            for batch in batches:
                wanted = (self.rank[batch.samples] == rank) & ~shown[batch.samples]
                if category not in PROBLEMS:
                    wanted &= looked[batch.samples]
                _, first = np.unique(batch.samples, return_index=True)
                positions = first[wanted[first]]
                shown[batch.samples[positions]] = True
                kept.append((batch, positions))
            cause = Finding(category=category, reason=reason, field=field_name, file=file, hint=HINTS[category])
            findings += self._of_cause(cause, [pair for pair in kept if len(pair[1])])
        return tuple(sorted(findings, key=lambda finding: CATEGORIES.index(finding.category)))

    def _of_cause(self, cause: Finding, kept: list[tuple[_Batch, NDArray[np.intp]]]) -> list[Finding]:
        total = sum(len(chosen) for _, chosen in kept)
        findings = list[Finding]()
        if total > EACH:
            samples = np.concatenate([batch.samples[chosen] for batch, chosen in kept])
            only = kept[0][0] if len(kept) == 1 else _Batch(samples, None, "", "", "")
            names = tuple(self.table.names.take(samples[:NAMES]))
            expected, actual = (text if isinstance(text, str) else "" for text in (only.expected, only.found))
            about: dict[str, Any] = {"expected": expected, "found": actual, "hint": only.hint or cause.hint}
            return [replace(cause, path=self._file(samples), count=total, names=names, **about)]
        for batch, position in ((batch, int(position)) for batch, positions in kept for position in positions):
            path, line = self.table.where(int(batch.samples[position]))
            key = "" if batch.keys is None else batch.keys[position].tobytes().hex()
            texts = batch.expected, batch.found
            expected, actual = (text if isinstance(text, str) else text(position) for text in texts)
            about = {"expected": expected, "found": actual, "hint": batch.hint or cause.hint, "key": key}
            findings.append(replace(cause, path=path, line=line, **about))
        return findings

    def _file(self, samples: NDArray[np.int64]) -> str:
        """The file that holds all these samples; empty if they are in several."""
        first = next(iter(self.table.inputs.values()), None)
        if first is None or first.line is None:
            return ""
        files = np.unique(np.asarray(first.file)[samples])
        return str(self.table.files.names[int(files[0])]) if len(files) == 1 else ""


def path_json(name: str) -> dict[str, Any]:
    """``path``, and ``path_b64`` if the name is not UTF-8."""
    path = shown_text(name)
    raw = name.encode("utf-8", "surrogateescape")
    return {"path": path} if path == name else {"path": path, "path_b64": base64.b64encode(raw).decode("ascii")}


def shown_text(value: str) -> str:
    """A text that JSON and pages can carry: bytes that are not UTF-8 become replacement characters."""
    return value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class Commands(Value):
    """Adds the command that mends a finding, with the flags that the user gave."""

    common: str = ""
    """Flags that every later command needs too: ``--field package.module:Kind``."""
    recipe: str = ""
    """Recipe flags as given."""
    run: str = ""
    """Flags of a run: ``--device cpu``."""
    allow_failed: str | None = None
    """``--allow-failed`` as given; None: as the snapshot has it. The parts below are those of the check."""
    cache: Path = Path()
    root: Path | None = None
    """The data; None: not looked for."""
    data: str = ""
    """``--data`` as given."""
    reencode: str = ""
    """Flags that draw the same samples again."""

    def __call__(self, finding: Finding) -> Finding:
        """The finding with its command; a finding that needs none stays as it is."""
        needed = finding.category in PROBLEMS and not finding.fix
        return replace(finding, fix=self._command(finding)) if needed else finding

    def _command(self, finding: Finding) -> str:
        again = self.reencode, self.common, self.recipe
        build = self.build()
        match finding.category, finding.reason:
            case "unverifiable", "permission":
                folder = self.cache if finding.file or self.root is None else self.root
                return f"chmod -R u+rX {shlex.quote(str(folder))}"
            case "unverifiable", "not-encoded":
                return self._verify(*again, "--device cpu")
            case "unverifiable", _:
                return self._verify(self.common)
            case "drift", _:
                return f"{self._verify(*again, self.run, '--repair --yes')}; {build}"
            case "corrupt", _:
                return f"{self._verify(self.common, '--repair --yes')}; {build}"
        return build

    def build(self) -> str:
        """The build that makes the cache true for its data."""
        root = "DATA" if self.root is None else shlex.quote(str(self.root))
        allowed = f"--allow-failed {shlex.quote(self.allow_failed)}" if self.allow_failed not in (None, "0") else ""
        flags = allowed, self.common, self.recipe, self.run
        return _joined("latentcache build", root, "--out", shlex.quote(str(self.cache)), *flags)

    def _verify(self, *flags: str) -> str:
        return _joined("latentcache verify", shlex.quote(str(self.cache)), self.data, *flags)


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def grouped(findings: Iterable[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Yield the findings of one category and reason together, each file or record once with all its fields."""
    groups = dict[tuple[str, str], dict[tuple[object, ...], Finding]]()
    for finding in findings:
        group = groups.setdefault((finding.category, finding.reason), {})
        label = (finding.path, finding.line, finding.file, finding.key)
        before = group.get(label)
        if before is not None:
            names = {*(before.field or before.target).split(", "), finding.field or finding.target}
            finding = replace(before, field=", ".join(sorted(filter(None, names))))
        group[label] = finding
    rejected = {reason for category, reason in groups if category == "quarantined"}
    for (category, reason), group in groups.items():
        if category != "note" or reason not in rejected:  # said of the rejected samples already
            yield tuple(group.values())
