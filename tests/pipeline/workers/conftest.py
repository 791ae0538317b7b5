"""Runs of toy kinds: see ``toy_kinds``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from latentcache.fields import registry
from latentcache.fields.protocol import Job, Output
from latentcache.identity.content import content_hash
from latentcache.pipeline.workers import local
from latentcache.pipeline.workers.engine import RunResult, Task
from latentcache.pipeline.workers.local import LocalEngine
from latentcache.pipeline.workers.scheduler import Run, StopSignal
from latentcache.store.catalog import load_catalog
from latentcache.store.paths import CachePaths

TOYS = tuple(f"tests.pipeline.workers.toy_kinds:{name}" for name in ("Squares", "Words", "Lines"))


@dataclasses.dataclass
class Toy:
    """One toy kind with folders for its data, cache and marks."""

    name: str
    folder: Path
    warnings: list[str] = dataclasses.field(default_factory=list)
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)

    @property
    def kind(self):
        return registry.field_kinds()[self.name]

    @property
    def paths(self) -> CachePaths:
        return CachePaths(self.folder / "cache")

    def jobs(self, texts: list[str], *, costs: dict[int, int] | None = None) -> list[Job]:
        """A job per text: a file for ``squares``, text for the other kinds."""
        variants = 2 if self.name == "squares" else 1
        jobs = []
        for number, text in enumerate(texts):
            outputs = tuple(
                Output(item=variants * number + variant, group=0, variant=variant) for variant in range(variants)
            )
            inputs: dict[str, Any] = {"record": {"text": text}}
            if self.name == "squares":
                inputs = {"image": {"path": f"{number:03}.txt"}}
                (self.folder / "data").mkdir(exist_ok=True)
                (self.folder / "data" / f"{number:03}.txt").write_text(text)
            content = b"" if self.name == "squares" else content_hash(text.encode())
            cost = (costs or {}).get(number, len(text))
            jobs.append(Job(sample=number, name=text, inputs=inputs, content=content, outputs=outputs, cost=cost))
        return jobs

    def task(self, **changes: Any) -> Task:
        (self.folder / "marks").mkdir(exist_ok=True)
        self.paths.shards.mkdir(parents=True, exist_ok=True)
        settings: dict[str, Any] = {
            "field": self.name,
            "recipe": self.kind.recipe().as_json(),
            "producer": {"marks": str(self.folder / "marks"), **changes.pop("producer", {})},
            "groups": self.kind.groups,
            "root": str(self.folder / "data"),
            "cache": str(self.paths.root),
            "device": "cpu*1",
            "workers": 1,
        }
        return Task(**{**settings, **changes})

    def run(self, texts: list[str] | list[Job], **changes: Any) -> RunResult:
        jobs = self.jobs(texts) if texts and isinstance(texts[0], str) else list(texts)
        advanced = changes.pop("progress", lambda progress: None)
        options = {name: changes.pop(name) for name in ("engine", "good") if name in changes}
        cost, events = sum(job.cost for job in jobs), changes.pop("events", None)
        options["results"] = RunResult(self.name, len(jobs), cost, events)
        options |= {"total": len(jobs), "total_cost": cost, "warn": self.warnings.append}
        with LocalEngine() as engine:
            return Run(self.task(**changes), iter(jobs), stop=self.stop, **{"engine": engine, **options}).run(
                advanced
            )

    def times(self, stage: str, word: str) -> int:
        path = self.folder / "marks" / f"{stage}-{word}"
        return path.stat().st_size if path.exists() else 0

    def stored(self) -> dict[bytes, bytes]:
        """Read all committed items: key -> bytes."""
        catalog = load_catalog(self.paths)
        items = [catalog.item(number) for number in catalog.all_items()]
        return {item.key: item.array.tobytes() for item in items}


@pytest.fixture(autouse=True)
def toy_kinds(toy_kind):
    """Register the toy kinds, too."""
    registry.register(TOYS)


@pytest.fixture(params=["squares", "words"])
def toy(request, tmp_path) -> Toy:
    return Toy(request.param, tmp_path)


@pytest.fixture
def squares(tmp_path) -> Toy:
    return Toy("squares", tmp_path)


@pytest.fixture
def words(tmp_path) -> Toy:
    return Toy("words", tmp_path)


@pytest.fixture
def short_deadline(monkeypatch):
    monkeypatch.setenv(local.VARIABLE, "1")


@pytest.fixture
def lines(tmp_path) -> Toy:
    return Toy("lines", tmp_path)
