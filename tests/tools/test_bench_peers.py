"""The benchmark runs to its end on a few batches, warm and cold, and says what it measured and what it left out."""

import json

import bench_peers
import pytest
import read_peers


def test_a_plan_has_every_row_of_full_batches_once():
    for order in bench_peers.ORDERS:
        plan = bench_peers.plan_of(70, order, 1)
        assert [len(rows) for rows in plan] == [bench_peers.BATCH] * 2
        assert len({row for rows in plan for row in rows}) == 64
        assert read_peers.is_sequential(plan) == (order == "sequential")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of libraries that are measured
@pytest.mark.parametrize("mode", [[], ["--cold"]])
def test_it_measures_every_candidate(tmp_path, capsys, mode):
    file = tmp_path / "times.json"
    bench_peers.main(["--kib", "32", "--megabytes", "4", "--rounds", "1", "--json", str(file), *mode])
    results = json.loads(file.read_text())["results"]["32"]
    found = results if mode else results["shuffled"]
    assert set(found) >= {"loader()", "LMDB get and copy", "npz files, 2 workers"}
    out = capsys.readouterr().out
    assert "| safetensors files, 0 workers |" in out
    assert all(f"left out: {name}" in out for name in read_peers.left_out())
