import json

import pytest
from bench_build import main
from build_data import Counts, draw_data, small_vae
from build_systems import PURE, SYSTEMS, bench_for


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("bench")
    draw_data(made / "data", Counts(jpegs=4, large=0, pngs=1, odd=4))
    small_vae(made / "vae")
    return made


@pytest.mark.slow
def test_it_measures_every_system(tmp_path):
    main(["--jpegs", "6", "--rounds", "1", "--encoders", "sim2,vae", "--json", str(tmp_path / "times.json")])
    found = json.loads((tmp_path / "times.json").read_text())
    assert [result["encoder"] for result in found["results"]] == ["sim2", "vae"]
    for result in found["results"]:
        assert set(result["seconds"]["wall"]) == set(SYSTEMS)
        assert set(result["memory_bytes"]) == set(SYSTEMS) - {PURE}
        assert result["command"]["counts"]["encoded"] == 6
    assert set(found["again"]) == {"young", "touched", "old"}
    assert len(found["stored"]) == 3


@pytest.mark.parametrize("system", ["latentcache", "latentcache, Pillow only", "DataLoader, large files"])
def test_a_system_encodes_every_image(system, folder):
    bench = bench_for("sim0", folder)
    bench.clear()
    SYSTEMS[system](bench)  # exits with an error if one is missing
    assert len(bench.plan) == sum(map(len, bench.batches)) == 9
