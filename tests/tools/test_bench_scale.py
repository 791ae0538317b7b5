import json

import pytest
from bench_scale import PARTS, main


@pytest.mark.slow
def test_every_part_runs_in_a_process_of_its_own(tmp_path, capsys):
    main(["--rows", "300", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["part"] for row in rows] == list(PARTS)
    assert not [row for row in rows if "not run" in row]
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"], "the caches are removed"
    printed = capsys.readouterr().out
    assert "| plan, resume | 300 |" in printed
    assert "| new image, beyond the listing | 300 |" in printed
