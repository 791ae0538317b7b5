"""The benchmark of many entries runs with few, and every part finds what was written."""

import json

from bench_scale import PARTS, main, table


def test_every_part_runs_in_a_process_of_its_own(tmp_path, capsys):
    main(["--entries", "300", "--folder", str(tmp_path), "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["part"] for row in rows] == list(PARTS)
    assert not [row for row in rows if "not run" in row]
    assert all(row["peak_mib"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == [tmp_path / "rows.json"], "the caches are removed"
    assert "| resume | 300 |" in capsys.readouterr().out


def test_a_part_that_needs_more_memory_is_not_run(tmp_path, capsys):
    main(["--entries", "1000000", "--parts", "make", "--folder", str(tmp_path), "--most-gib", "0.1"])
    assert "not run: not enough memory free" in capsys.readouterr().out


def test_a_slope_is_time_over_size():
    rows = [
        {"part": "open", "entries": 100, "seconds": 1.0, "peak_mib": 10.0},
        {"part": "open", "entries": 1000, "seconds": 20.0, "peak_mib": 50.0},
    ]
    assert table(rows).splitlines()[-1] == "| open | 1,000 | 20.00 | 50 | 52429 | 2.00 |"
