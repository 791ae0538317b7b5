"""The benchmark of large caches runs with few rows, and every part finds what was written."""

import json

import pytest
from bench_scale import PARTS, main, table


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


def test_a_part_that_needs_more_memory_does_not_run(tmp_path, capsys):
    main(["--rows", "1000000", "--parts", "make", "--folder", str(tmp_path), "--most-gib", "0.1"])
    assert "not run: not enough memory free" in capsys.readouterr().out


def test_a_new_image_is_compared_with_a_listing():
    rows = [
        {"part": "listing", "rows": 1000, "seconds": 1.0, "cpu_s": 1.0, "peak_mib": 0.0},
        {"part": "new image", "rows": 1000, "seconds": 3.0, "cpu_s": 2.5, "peak_mib": 1.0},
    ]
    last = table(rows).splitlines()[-1]
    assert last == "| new image, beyond the listing | 1,000 | 2.00 | 1.50 | 2000.00 | 1 | 1049 |"
