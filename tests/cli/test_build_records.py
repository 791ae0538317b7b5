from small_cache import counts


def test_a_record_too_large_for_memory_is_quarantined_and_retried(run, tmp_path):
    """4 000 000 characters at 320 bytes each are more than 1 GB."""
    data = tmp_path / "a.jsonl"
    data.write_text('{"text": "fine"}\n{"text": "' + "x" * 4_000_000 + '"}\n{"text": "too"}\n')
    done = run("build", data, "--tokenizer", "stub", "--host-memory", str(1 << 30), "--json")
    value = done.json
    assert (done.status, value["counts"]["encoded"], value["counts"]["quarantined"]) == (1, 2, 1)
    (item,) = value["items"]
    assert (item["reason"], item["path"], item["line"]) == ("out-of-memory", "a.jsonl", 2)
    assert "4,000,00" in item["found"]
    assert "1,073,741,824" in item["found"]
    assert "--host-memory" in item["hint"]
    cache = tmp_path / "a.jsonl.latentcache"
    assert run("verify", cache, "--json").json["counts"]["quarantined"] == 1
    value = run("build", data, "--tokenizer", "stub", "--host-memory", str(2 << 30), "--json").json
    assert (value["exit_code"], value["counts"]["encoded"], value["counts"]["cached"]) == (0, 1, 2)


def test_rejected_records_that_are_only_counted(run, tmp_path, monkeypatch):
    monkeypatch.setattr("latentcache.sources.records._LISTED", 3)
    data, cache = tmp_path / "a.jsonl", tmp_path / "c"
    data.write_text('{"text": "one"}\n' + "{bad\n" * 10)
    for encoded in 1, 0:
        value = run("build", data, "--out", cache, "--tokenizer", "stub", "--json").json
        assert value["counts"] == counts(11, encoded, 1 - encoded, 10, no_caption=0)
        assert sum(item.get("count", 1) for item in value["items"]) == 10
    assert run("info", cache, "--json").json["counts"]["quarantined"] == 10
    report = run("verify", cache, "--json").json
    assert (report["counts"]["ok"], report["counts"]["quarantined"], report["exit_code"]) == (1, 10, 1)
    assert run("build", data, "--out", cache, "--tokenizer", "stub", "--allow-failed", "10").status == 0
