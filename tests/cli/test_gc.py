from small_cache import build, draw


def rebuild(cache, data):
    for number in range(4):
        draw(data / f"p{number}.png", seed=40 + number)
    build(data, cache)


def test_text_output(run, cache, data):
    rebuild(cache, data)
    lines = run("gc", cache, "--keep", 1).out.splitlines()
    assert lines[0].startswith("removable snapshots/000001 [superseded] ")
    assert lines[-2].endswith(" can be freed, 0 B kept")
    assert lines[-1] == "fix: run the same command with --apply"
    assert run("gc", cache, "--apply", "--keep", 1).out.splitlines()[-1].startswith("freed ")
    assert run("gc", cache).out == "0 B can be freed, 0 B kept\n"


def test_invalid_calls_are_rejected(run, cache, tmp_path):
    assert run("gc", cache, "--keep", 0, "--json").status == 2
    assert run("gc", tmp_path / "none", "--json").error["slug"] == "cache-not-found"
    (cache / "CURRENT").unlink()
    assert run("gc", cache, "--json").error["why"] == "CURRENT is missing"
