import json
from dataclasses import replace
from pathlib import Path

import pytest
from small_builds import RECIPE, recipe_of

from latentcache import errors
from latentcache.encoders.describe import ModelDescription
from latentcache.errors import CacheLockedError, DiskFullError, InterruptedBuildError, LatentcacheError
from latentcache.geometry.sizes import Size
from latentcache.identity.stat import StatMemo
from latentcache.pipeline import forms
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.survey import placements_for
from latentcache.pipeline.work import Planned, refuse
from latentcache.sources.sample import Sample

STAT = StatMemo(size=5, mtime_ns=-3, ctime_ns=1 << 60, inode=(1 << 64) - 1, device=2, seen_ns=9)
RECIPE_MADE = recipe_of()


def travelled(form):
    return json.loads(json.dumps(form))


@pytest.mark.parametrize("name", ["a.png", "odd\udcff name.png", 'ä "x"\n.jpg'])
def test_a_plan_travels_without_its_caption(name):
    tables, size = RECIPE_MADE.geometry.tables(), Size(100, 300)
    sample = Sample(name=name, caption="a caption", stat=STAT)
    planned = Planned(index=1 << 40, sample=sample, size=size, placements=placements_for(size, tables))
    found = forms.as_planned(travelled(forms.planned_form(planned)), tables)
    assert found == replace(planned, sample=replace(sample, caption=""))


@pytest.mark.parametrize("stat", [None, STAT])
def test_a_refusal_travels(stat):
    sample = Sample(name="odd\udcff", caption="", stat=STAT)
    refusal = refuse(sample, "truncated", "cut short", stat=stat, content=b"0123456789abcdef")
    assert forms.as_refusal(travelled(forms.refusal_form(refusal))) == refusal


def test_settings_travel_but_for_the_recipe():
    settings = BuildSettings(
        data=Path("/data"), recipe=RECIPE, device="cpu*2", batch_size=3, max_pixels=7, fold=False, out=Path("/out")
    )
    found = forms.as_settings(travelled(forms.settings_form(settings)))
    assert (found.batch_size, found.max_pixels, found.fold, found.data) == (3, 7, False, settings.data)


def test_a_description_travels():
    spec = RECIPE_MADE.encoder
    description = ModelDescription(
        label="x", kind="diffusers", spec=spec, weights=(Path("/a"), Path("/b")), config_path=Path("/c"), delay_ms=4
    )
    assert forms.as_description(travelled(forms.description_form(description))) == description


@pytest.mark.parametrize(
    "error",
    [
        DiskFullError("the disk is full", where="/x", why="no room"),
        CacheLockedError("held", holder={"pid": 1}, fix="wait"),
        InterruptedBuildError("stopped", signal_number=15),
        *(getattr(errors, name)("it broke", slug="odd") for name in ("EncoderError", "DeviceMemoryError")),
    ],
)
def test_an_error_keeps_its_class_and_its_words(error):
    found = forms.as_error(travelled(forms.error_form(error)))
    assert type(found) is type(error)
    assert isinstance(found, LatentcacheError)
    for name in ("what", "where", "why", "fix", "slug", "exit_code"):
        assert getattr(found, name) == getattr(error, name)
    assert found.as_json() == error.as_json()


def test_errors_of_the_system_and_faults_of_our_own_travel_too():
    system = forms.as_error(travelled(forms.error_form(PermissionError(13, "Permission denied", "/x"))))
    assert (type(system), system.errno, system.filename) == (PermissionError, 13, "/x")
    assert type(forms.as_error(travelled(forms.error_form(MemoryError("no"))))) is MemoryError
    try:
        raise ZeroDivisionError("a fault")
    except ZeroDivisionError as error:
        bug = forms.as_error(travelled(forms.error_form(error)))
    assert isinstance(bug, RuntimeError)
    assert "ZeroDivisionError: a fault" in str(bug)
    assert "test_forms.py" in bug.__notes__[0]


def test_no_other_class_is_made_from_a_message():
    assert type(forms.as_error({"class": "Mapping", "what": "x", "trace": ""})) is RuntimeError
