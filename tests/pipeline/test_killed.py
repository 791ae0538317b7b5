"""A build that is killed with SIGKILL is continued by the same command; acknowledged keys are never encoded again."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from small_builds import Talk, built, rows_of

from latentcache.pipeline.build import plan_build
from latentcache.store.paths import CachePaths

SAMPLES = 60
CHILD = """
import sys
from dataclasses import replace
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from small_builds import CASES, settings
from latentcache.fields.registry import field_kind, register
from latentcache.pipeline.build import build_cache
register(["tests.fields.edge_map:EdgeMap"])
case = CASES[sys.argv[3]]
kind = field_kind(case.field)
type(kind).work = replace(kind.work, unit_jobs=4, batch_items=4)
slow = {name: f"{value}:delay_ms=20" for name, value in case.settings.items() if value == "stub"}
few = {"workers": 0, "batch_size": 2, "commit_every": 2}
build_cache(settings(case, Path(sys.argv[4]), recipe=slow, events=Path(sys.argv[5]), **few))
"""


def acknowledged(events):
    lines = events.read_bytes().splitlines() if events.exists() else []
    return [key for line in lines for key in json.loads(line)["keys"]]


def test_a_killed_build_is_continued(case, tmp_path):
    data, events = case.data(tmp_path / "data", SAMPLES), tmp_path / "events"
    here = Path(__file__).parent
    words = [sys.executable, "-c", CHILD, str(here), str(here.parents[1]), case.field, str(data), str(events)]
    child = subprocess.Popen(words, env=os.environ | {"DELAY_MS": "20"}, stderr=subprocess.PIPE)
    until = time.monotonic() + 30
    while len(acknowledged(events)) < 5 and child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    child.kill()
    _, said = child.communicate(timeout=15)
    done = acknowledged(events)
    assert 5 <= len(done) < SAMPLES, said.decode()
    planned = plan_build_of(case, data)
    assert len(done) <= planned.cached < SAMPLES
    talk = Talk()
    report = built(case, data, talk=talk, fields={}, events=events)
    assert len(set(acknowledged(events))) == len(acknowledged(events))
    assert set(done) <= {key.hex() for keys in rows_of(report.cache, case.field).values() for key in keys}
    assert (report.encoded + report.cached, report.cached) == (SAMPLES, planned.cached)
    assert talk.plans[0].cached == planned.cached
    assert not CachePaths(report.cache).open_shards()


def plan_build_of(case, data):
    from small_builds import settings

    return plan_build(settings(case, data, fields={}))
