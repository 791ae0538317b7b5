"""What a build lets its workers have; what they make of it is tested by ``test_pipeline_run.py``."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_builds import RECIPE, Talk, folder_of, recipe_of, within

from latentcache.encoders.describe import describe_model
from latentcache.pipeline.announcing import Announcer
from latentcache.pipeline.interrupt import StopSignal
from latentcache.pipeline.making import low_water, make_entries
from latentcache.pipeline.settings import BuildSettings
from latentcache.pipeline.staff import Reception, Task
from latentcache.pipeline.survey import Memory, survey
from latentcache.sources.resolve import scan
from latentcache.store.catalog import Catalog, load_catalog
from latentcache.store.layout import CacheLayout


@pytest.mark.parametrize("device", ["cpu", "cpu*2"])
def test_what_is_to_do_is_made_and_what_it_took_is_said(tmp_path, device):
    data, recipe, layout = folder_of(tmp_path / "data", 9), recipe_of(), CacheLayout(tmp_path / "cache")
    layout.shards.mkdir(parents=True)
    found = scan(data)
    work = survey(found, recipe, Catalog([]), Memory({}, {}), max_pixels=10**8)
    with StopSignal() as stop, Announcer() as followers:
        result = within(
            60,
            lambda: make_entries(
                Task(
                    settings=BuildSettings(data=data, recipe=RECIPE, device=device),
                    root=found.root,
                    layout=layout,
                    recipe=recipe,
                    description=describe_model("stub"),
                ),
                work,
                reception=Reception(device),
                catalog=Catalog([]),
                followers=followers,
                stop=stop,
                observer=Talk(),
            ),
        )
    assert result.encoded == set(load_catalog(layout).keys())
    assert len(result.encoded) == result.clock.pictures.total() == 9
    assert 1 <= result.clock.loops <= 2
    assert result.written_bytes > 0


@given(st.integers(1, 64), st.integers(1, 64), st.integers(0, 10_000), st.integers(1, 16))
def test_no_worker_is_kept_further_ahead_than_its_share(largest, threads, total, workers):
    found = low_water(largest, threads, total=total, workers=workers)
    assert 1 <= found <= 2 * max(largest, threads)
    assert found * workers < total + workers or found == 1
    if total >= workers * 128:
        assert found == 2 * max(largest, threads)
