import json

import pytest

from latentcache.errors import CacheDamagedError, CacheNotFoundError
from latentcache.export.exported import check_export, export_command, file_checksum


@pytest.fixture
def rows(run, tmp_path):
    """An export in ``rows`` of a cache in ``cache``, made from ``data.jsonl``."""
    write(tmp_path, [f"text {number}" for number in range(12)])
    assert run("build", tmp_path / "data.jsonl", "--tokenizer", "stub", "--out", tmp_path / "cache").status == 0
    words = ("--pad", 16, "--validation", 0.4, "--overflow", "drop")
    assert run("export", tmp_path / "cache", tmp_path / "rows", *words).status == 0
    return tmp_path / "rows"


def write(folder, texts):
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def test_rows_of_the_documents_of_today(rows):
    found = check_export(rows, full=True)
    assert (found.report.exit_code(), found.report.counts["ok"], found.report.snapshot) == (0, 2, 1)
    assert found.report.checked["payload_bytes"] == sum(file.stat().st_size for file in rows.glob("*/*.arrow"))


@pytest.mark.parametrize("texts", [[f"text {number}" for number in range(11)], [f"text {12 - n}" for n in range(12)]])
def test_rows_are_older_than_their_cache(run, rows, texts):
    """Also where as many documents are there as before."""
    write(rows.parent, texts)
    assert run("build", rows.parent / "data.jsonl", "--out", rows.parent / "cache").status == 0
    report = check_export(rows).report
    assert (report.exit_code(), report.counts["stale"], report.findings[0].reason) == (1, 2, "cache-changed")
    assert report.findings[0].expected.startswith("snapshot 2")
    assert report.findings[0].expected.endswith(f"{len(texts)} documents")
    assert "--overflow drop --validation 0.4" in report.findings[0].fix


def test_another_recipe_is_named(run, rows):
    assert run("build", rows.parent / "data.jsonl", "--out", rows.parent / "cache", "--no-add-eos").status == 0
    report = check_export(rows).report
    assert (report.findings[0].reason, report.findings[0].expected, report.findings[0].found) == (
        "recipe:input_ids.add_eos", "false", "true",
    )  # fmt: skip
    (change,) = report.recipe_diff
    assert (change.field, change.setting, change.cached, change.requested) == ("input_ids", "add_eos", True, False)


def test_a_snapshot_of_the_same_documents_changes_nothing(run, rows):
    write(rows.parent, [f"text {number}" for number in range(13)])
    assert run("build", rows.parent / "data.jsonl", "--out", rows.parent / "cache").status == 0
    write(rows.parent, [f"text {number}" for number in range(12)])
    assert run("build", rows.parent / "data.jsonl", "--out", rows.parent / "cache").status == 0
    assert check_export(rows).report.exit_code() == 0


def test_both_may_move_together(rows, tmp_path):
    (tmp_path / "new").mkdir()
    for name in ("cache", "rows"):
        (tmp_path / name).rename(tmp_path / "new" / name)
    moved = tmp_path / "new" / "rows"
    assert check_export(moved).report.exit_code() == 0
    (tmp_path / "new" / "cache").rename(tmp_path / "elsewhere")
    with pytest.raises(CacheNotFoundError, match="is not at") as caught:
        check_export(moved)
    assert caught.value.fix.endswith("--data CACHE")
    found = check_export(moved, cache=tmp_path / "elsewhere")
    assert found.report.exit_code() == 0
    assert export_command(found.cache, moved, found.facts).startswith(f"latentcache export {tmp_path / 'elsewhere'}")


def test_files_that_are_not_what_was_written(rows):
    train, held = rows / "train/data-00000-of-00001.arrow", rows / "validation/data-00000-of-00001.arrow"
    whole = train.read_bytes()
    train.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert check_export(rows).report.exit_code() == 0, "a look at sizes cannot see this"
    assert [finding.reason for finding in check_export(rows, full=True).report.findings] == ["file-changed"]
    train.write_bytes(whole[:-1])
    held.unlink()
    report = check_export(rows).report
    assert [(finding.category, finding.file) for finding in report.findings] == [
        ("corrupt", "train/data-00000-of-00001.arrow"), ("missing", "validation/data-00000-of-00001.arrow"),
    ]  # fmt: skip
    assert (report.counts["corrupt"], report.counts["missing"], report.samples) == (1, 1, 2)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"cache": 5}'])
def test_facts_that_cannot_be_read(rows, text):
    (rows / "latentcache.json").write_text(text)
    with pytest.raises(CacheDamagedError, match="cannot be read"):
        check_export(rows)


def test_a_format_of_a_later_release(rows):
    facts = json.loads((rows / "latentcache.json").read_text())
    (rows / "latentcache.json").write_text(json.dumps(facts | {"format": "stone"}))
    with pytest.raises(CacheDamagedError) as caught:
        check_export(rows)
    assert "unknown format 'stone'" in caught.value.why


@pytest.mark.parametrize("name", ["length", "layout", "trainer", "files", "bytes", "format", "field"])
def test_facts_without_which_it_cannot_be_made_again(rows, name):
    facts = json.loads((rows / "latentcache.json").read_text())
    del facts[name]
    (rows / "latentcache.json").write_text(json.dumps(facts))
    with pytest.raises(CacheDamagedError) as caught:
        check_export(rows)
    assert name in caught.value.why


def test_a_checksum_goes_over_all_pieces(tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 << 20) + b"end")
    first = file_checksum(tmp_path / "file")
    (tmp_path / "file").write_bytes(bytes(3 << 20) + b"enD")
    assert file_checksum(tmp_path / "file") != first
