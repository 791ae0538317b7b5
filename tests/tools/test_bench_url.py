import json

import pytest

pytest.importorskip("obstore")


@pytest.mark.slow
def test_the_loader_moves_little_more_than_the_payload(tmp_path, capsys):
    import bench_url

    bench_url.main(["--samples", "1024", "--rounds", "1", "--json", str(tmp_path / "url.json")])
    found = json.loads((tmp_path / "url.json").read_text())["latentcache"]
    assert found["cold"] > 0
    assert found["warm"] > 0
    assert 1 <= found["moved"] <= 1.05
    assert "| latentcache |" in capsys.readouterr().out
