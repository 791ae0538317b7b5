"""Sources that change during a build are detected by their bytes."""

from commands import acknowledged, build, draw_folder, entries, finished, look, noise, start_build, wait_for


def test_a_file_edited_during_the_build_is_what_was_read_of_it(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, "--decode-threads", 1, "--host-memory", 100_000, delay_ms=60, events=events)
    wait_for(lambda: acknowledged(events), process)
    for number in range(30):
        (data / f"{number:04}.png").write_bytes(noise(500 + number))
    assert finished(process).status in (0, 1)
    stale = look("verify", cache, "--full", "--json").json
    assert stale["counts"]["stale"] > 0  # read before the edit
    again = build(data, cache)
    assert again.json["counts"]["encoded"] == 30 - again.json["counts"]["cached"]
    assert again.json["counts"]["cached"] > 0  # read after the edit, stored with the new content
    assert look("verify", cache, "--full", "--json").status == 0
    assert build(data, tmp_path / "other").status == 0
    current = {name: key for key, (_, names) in entries(cache).items() for name in names}
    assert current == {name: key for key, (_, names) in entries(tmp_path / "other").items() for name in names}


def test_a_file_deleted_during_the_build_is_named_and_the_others_are_there(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, "--decode-threads", 1, "--host-memory", 100_000, delay_ms=60, events=events)
    wait_for(lambda: acknowledged(events), process)
    for number in range(30):
        (data / f"{number:04}.png").unlink()
    done = finished(process)
    assert done.status == 1
    assert {item["reason"] for item in done.json["items"] if item["category"] == "quarantined"} == {"not-found"}
    assert done.json["counts"]["samples"] == 30
    assert done.json["counts"]["quarantined"] + done.json["counts"]["encoded"] == 30
