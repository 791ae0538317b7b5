import os
import shutil

import pytest
from PIL import Image
from small_cache import as_nobody, build, draw, draw_four

from latentcache.errors import TableError
from latentcache.sources.resolve import scan
from latentcache.store.generation import load_generation
from latentcache.verify import sources
from latentcache.verify.findings import CATEGORIES
from latentcache.verify.run import verify_cache


def found(cache, **more):
    """path -> (category, reason), and a check that the counts are right."""
    report = verify_cache(cache, **more)
    paths = [item.path for item in report.findings if item.path]
    assert len(paths) == len(set(paths)), "one finding per sample"
    return {item.path: (item.category, item.reason) for item in report.findings}


def counts(cache, **more):
    return {name: number for name, number in verify_cache(cache, **more).counts.items() if number}


@pytest.mark.parametrize("full", [False, True])
def test_a_file_that_is_gone(cache, data, full):
    (data / "p1.png").unlink()
    assert found(cache, full=full) == {"p1.png": ("stale", "source-removed")}
    (finding,) = verify_cache(cache).findings
    assert (finding.expected, finding.found) == ("the file", "no such file")


@pytest.mark.parametrize("full", [False, True])
def test_a_file_with_other_bytes(cache, data, full):
    before = load_generation(cache).samples.content[0].tobytes().hex()
    draw(data / "p0.png", seed=99)
    assert found(cache, full=full) == {"p0.png": ("stale", "source-changed")}
    (finding,) = verify_cache(cache).findings
    assert finding.expected == before
    assert len(finding.found) == 32


def test_a_change_is_found_also_when_size_and_time_were_put_back(cache, data):
    picture = data / "p0.png"
    stat = picture.stat()
    raw = bytearray(picture.read_bytes())
    raw[-20] ^= 1
    picture.write_bytes(raw)
    os.utime(picture, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (picture.stat().st_size, picture.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert found(cache) == {"p0.png": ("stale", "source-changed")}


@pytest.mark.parametrize(
    ("content", "hint"),
    [(b"", "no bytes"), (b"<html>", None), (b"\x89PNG\r\n\x1a\n", None)],
)
def test_a_file_that_is_no_picture_any_more(cache, data, content, hint):
    (data / "p0.png").write_bytes(content)
    assert found(cache) == {"p0.png": ("stale", "source-changed")}
    if hint:
        assert hint in verify_cache(cache).findings[0].hint


def test_a_file_that_became_a_pipe_or_a_folder(cache, data):
    for name, make in (("p0.png", os.mkfifo), ("p1.png", os.mkdir)):
        (data / name).unlink()
        make(data / name)
    assert found(cache)["p0.png"] == ("stale", "source-changed")
    assert found(cache)["p1.png"][0] == "stale"


def test_only_the_caption(cache, data):
    (data / "p0.txt").write_text("something else")
    assert found(cache) == {"p0.png": ("stale", "caption-changed")}
    (finding,) = verify_cache(cache).findings
    assert (finding.expected, finding.found) == ("caption 0", "something else")
    assert "latents are not touched" in finding.hint


@pytest.mark.parametrize("change", ["remove", "add", "spoil"])
def test_a_caption_that_comes_goes_or_breaks(cache, data, change):
    if change == "remove":
        (data / "p0.txt").unlink()
    elif change == "add":
        (data / "p3.txt").write_text("new")
    else:
        (data / "p0.txt").write_bytes(b"caf\xe9")
    name = "p3.png" if change == "add" else "p0.png"
    assert found(cache) == {name: ("stale", "caption-changed")}
    (finding,) = verify_cache(cache).findings
    assert finding.found


def test_picture_and_caption_together_are_one_finding(cache, data):
    draw(data / "p0.png", seed=99)
    (data / "p0.txt").write_text("something else")
    assert found(cache) == {"p0.png": ("stale", "source-changed")}


@pytest.mark.parametrize("full", [False, True])
def test_a_touched_file_is_fine(cache, data, full):
    os.utime(data / "p0.png", (1, 1))
    shutil.copy2(data / "p1.png", data / "copy")
    (data / "copy").replace(data / "p1.png")
    assert found(cache, full=full) == dict.fromkeys(("p0.png", "p1.png"), ("touched", "stat-changed"))
    assert verify_cache(cache).exit_code() == 0


def test_touched_and_another_caption_is_stale(cache, data):
    os.utime(data / "p0.png", (1, 1))
    (data / "p0.txt").write_text("something else")
    assert found(cache) == {"p0.png": ("stale", "caption-changed")}


def test_a_new_file(cache, data):
    draw(data / "deep" / "new.png")
    assert found(cache) == {"deep/new.png": ("missing", "not-built")}


def test_a_rename_is_one_stale_and_one_missing_and_encodes_nothing(cache, data):
    (data / "p0.png").rename(data / "renamed.png")
    assert found(cache) == {"p0.png": ("stale", "source-removed"), "renamed.png": ("missing", "not-built")}
    assert counts(cache) == {"stale": 1, "missing": 1, "ok": 3}
    assert build(data, cache).encoded == 0
    assert counts(cache) == {"ok": 4}


def test_a_build_makes_every_change_clean_again(cache, data):
    draw(data / "p0.png", seed=50)
    (data / "p1.txt").write_text("other")
    (data / "p2.png").unlink()
    draw(data / "new.png", seed=51)
    assert counts(cache) == {"stale": 3, "missing": 1, "ok": 1}
    assert build(data, cache).encoded == 2
    assert counts(cache, full=True) == {"ok": 4, "orphan": 2}


def metadata_edit(picture):
    """The same pixels in other bytes."""
    image = Image.open(picture)
    image.load()
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("Comment", "edited")
    image.save(picture, pnginfo=info)


def test_a_metadata_edit_is_stale_and_then_clean(cache, data):
    metadata_edit(data / "p0.png")
    assert found(cache) == {"p0.png": ("stale", "source-changed")}
    report = build(data, cache)
    assert (report.encoded, report.cached) == (0, 4)
    assert counts(cache, full=True) == {"ok": 4, "orphan": 1}


# refused files


@pytest.fixture
def refusing(data, tmp_path):
    """A cache of four good pictures and three that were refused."""
    (data / "zero.png").write_bytes(b"")
    (data / "html.png").write_bytes(b"<html>")
    draw(data / "words.png", seed=8)
    (data / "words.txt").write_bytes(b"caf\xe9")
    build(data, tmp_path / "cache")
    return tmp_path / "cache"


REFUSED = {
    "zero.png": ("quarantined", "empty"),
    "html.png": ("quarantined", "html"),
    "words.png": ("quarantined", "caption-encoding"),
}


@pytest.mark.parametrize("full", [False, True])
def test_a_refused_file_stays_quarantined(refusing, data, full):
    assert found(refusing, full=full) == REFUSED
    for name in REFUSED:
        os.utime(data / name, (1, 1))
    assert found(refusing, full=full) == REFUSED
    assert all(finding.hint for finding in verify_cache(refusing).findings)
    report = verify_cache(refusing)
    assert (report.exit_code(), report.exit_code(2), report.exit_code(3), report.samples) == (1, 1, 0, 7)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", ["zero.png", "html.png"])
def test_until_its_bytes_change(refusing, data, name, full):
    draw(data / name, seed=40)
    assert found(refusing, full=full) == {**REFUSED, name: ("stale", "source-changed")}


def test_until_its_caption_can_be_read(refusing, data):
    (data / "words.txt").write_text("café")
    assert found(refusing) == {**REFUSED, "words.png": ("stale", "caption-changed")}


def test_a_refused_file_that_was_removed(refusing, data):
    (data / "html.png").unlink()
    assert found(refusing) == {**REFUSED, "html.png": ("stale", "source-removed")}


def test_a_build_mends_all_of_it(refusing, data):
    draw(data / "zero.png", seed=41)
    (data / "html.png").unlink()
    (data / "words.txt").write_text("café")
    assert build(data, refusing).encoded == 2
    assert counts(refusing) == {"ok": 6}


def test_a_row_of_a_table_whose_file_comes_later(data, tmp_path):
    (data / "metadata.csv").write_text("file_name,text\np0.png,a\nlater.png,b\n")
    cache = tmp_path / "cache"
    build(data, cache)
    assert found(cache) == {"later.png": ("quarantined", "not-found")}
    draw(data / "later.png", seed=12)
    assert found(cache) == {"later.png": ("missing", "not-built")}


def test_a_picture_whose_row_was_removed(data, tmp_path):
    (data / "metadata.csv").write_text("file_name,text\np0.png,a\np1.png,b\n")
    cache = tmp_path / "cache"
    build(data, cache)
    (data / "metadata.csv").write_text("file_name,text\np0.png,a\n")
    assert found(cache) == {"p1.png": ("stale", "source-removed")}
    assert verify_cache(cache).findings[0].found == "metadata.csv has no row for it"


def test_a_table_that_breaks_is_an_error_with_its_line(cache, data):
    (data / "metadata.csv").write_text("file_name,text\np0.png\n")
    with pytest.raises(TableError) as caught:
        verify_cache(cache)
    assert caught.value.where.endswith("metadata.csv:2")


# what cannot be looked at


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
def test_what_a_user_may_not_read_is_unverifiable(open_folder, tmp_path):
    """A file, a folder and a shard without permission are neither gone nor damaged."""
    data, cache = draw_four(open_folder / "data"), open_folder / "cache"
    draw(data / "sub" / "deep.png", seed=9)
    build(data, cache)
    os.utime(data / "p0.png", (1, 1))
    (data / "p0.png").chmod(0)
    (data / "sub").chmod(0)
    words = ["verify", cache, "--json"]
    done = as_nobody(words, words)
    assert done.status == 1
    where = {
        item["path"]: (item["category"], item["reason"]) for item in done.json["items"] if item["path"] != "sub/"
    }
    assert where == dict.fromkeys(("p0.png", "sub/deep.png"), ("unverifiable", "permission"))
    assert done.json["counts"]["ok"] == 3
    fixes = {item["fix"] for item in done.json["items"] if item["category"] == "unverifiable"}
    assert fixes == {f"chmod -R u+rX {data}"}
    for shard in (cache / "shards").glob("*/data.mdb"):
        shard.chmod(0)
    done = as_nobody(words, words)
    assert done.json["counts"]["unverifiable"] == 5
    assert done.json["counts"]["corrupt"] == 0


# geometry


def test_the_geometry_of_two_resolutions_is_one_answer(data, tmp_path):
    build(data, tmp_path / "cache", resolutions=(64, 128))
    assert found(tmp_path / "cache", full=True) == {}


# sums


def test_every_sample_is_in_exactly_one_category(refusing, data):
    """Of the generation, or now in the folder: 4 good and 3 refused, and 2 new ones of which one is broken."""
    draw(data / "p0.png", seed=60)
    (data / "p1.png").unlink()
    os.utime(data / "p2.png", (1, 1))
    draw(data / "new.png", seed=61)
    (data / "other.png").write_bytes(b"")
    report = verify_cache(refusing)
    of_samples = set(CATEGORIES) - {"orphan", "provenance"}
    assert sum(report.counts[name] for name in of_samples) == 9
    assert counts(refusing) == {"stale": 1 + 1, "touched": 1, "quarantined": 3, "missing": 2, "ok": 1}


def test_it_says_what_the_folder_says(cache, data):
    checked = sources.check_sources(load_generation(cache), scan(data), full=True)
    assert (checked.by_sample, checked.others, checked.stats, checked.hashed) == ({}, [], 4, 4)
