"""The benchmark of plans runs, and its drawing is well formed."""

import json
import xml.etree.ElementTree as ET

import bench_plan
import draw_plan


def test_planned_buckets_lose_least_and_are_drawn(tmp_path, capsys):
    words = ["--sizes", "8", "--most", "10000", "--json", str(tmp_path / "plan.json")]
    bench_plan.main(words)
    assert capsys.readouterr().out.startswith("| images | batch | buckets |")
    found = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    for by_batch in found["sets"].values():
        rows = {row["name"]: row for row in by_batch["8"]}
        planned = rows["planned, crops up to 25 %"]
        assert (planned["dropped"], planned["unfilled"], planned["repeated_above"]) == (0, 0, 0)
        assert rows["as given"]["repeated_above"] >= rows["planned, crops up to 8 %"]["repeated_above"]
    assert set(found["seconds"]) == {"10000"}
    draw_plan.main([str(tmp_path / "plan.json"), str(tmp_path / "plan.svg")])
    texts = {text.text for text in ET.parse(tmp_path / "plan.svg").getroot().iter("{http://www.w3.org/2000/svg}text")}
    assert {"LoRA, 54 images", "kohya", "as given"} <= texts
