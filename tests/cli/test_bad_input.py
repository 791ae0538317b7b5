"""Every bad input that people bring, and the words it gets: slug, what, where, why and fix, exactly.

``{tmp}`` stands for the folder of the test; the data folder is ``{tmp}/data``, the cache ``{tmp}/cache``.
"""

import json
import os
import shlex
import subprocess

import pytest
from small_cache import SMALL, as_nobody, counts, draw

from latentcache.store.snapshot import open_snapshot

IMAGES = ".avif .bmp .gif .heic .heif .jfif .jpe .jpeg .jpg .jxl .mkv .mov .mp4 .png .svg .tif .tiff .webm .webp"


@pytest.fixture
def rejected(run, tmp_path):
    """The error of a build that does not start, with the folder of the test written as {tmp}; nothing was made."""

    def build(data="data", *words, status=2, out="cache"):
        done = run("build", tmp_path / data, "--out", tmp_path / out, *words, "--json")
        assert done.status == status
        return {name: text.replace(str(tmp_path), "{tmp}") for name, text in done.error.items() if name != "holder"}

    return build


def error(slug, what, where, why, fix):
    return {"slug": slug, "what": what, "where": where, "why": why, "fix": fix}


@pytest.fixture
def one(tmp_path):
    """A data folder with one image."""
    draw(tmp_path / "data" / "a.png")
    return tmp_path / "data"


# the data folder


def test_an_empty_folder(rejected, tmp_path):
    (tmp_path / "data").mkdir()
    assert rejected() == error(
        "source-empty",
        "no images in {tmp}/data",
        "{tmp}/data",
        f"looked for {IMAGES}; found no files",
        "give the folder that holds the images: `latentcache build FOLDER`",
    )
    assert not (tmp_path / "cache").exists()


def test_data_that_is_not_there(rejected):
    assert rejected() == error(
        "source-not-found",
        "no such file or folder: {tmp}/data",
        "{tmp}/data",
        "",
        "check the path",
    )


# the cache folder


@pytest.mark.parametrize("out", ["data/cache", "data", "data/sub/../deep/cache"])
def test_a_cache_inside_the_data(rejected, one, out):
    assert rejected(out=out) == error(
        "usage",
        f"--out={{tmp}}/{out}: the cache would be inside the data folder",
        f"{{tmp}}/{out}",
        "data folders are only read; a cache inside one would be taken for data",
        "use --out {tmp}/data.latentcache",
    )
    assert [path.name for path in one.iterdir()] == ["a.png"]


def test_a_cache_folder_that_holds_something_else(rejected, one, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "thesis.tex").write_text("x")
    assert rejected() == error(
        "usage",
        "--out={tmp}/cache: the folder is not empty and holds no cache",
        "{tmp}/cache",
        "a cache is never mixed with other files",
        "give an empty or a new folder",
    )
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["thesis.tex"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to become")
def test_a_cache_folder_that_cannot_be_written(open_folder, tmp_path):
    draw(open_folder / "data" / "a.png")
    words = ["build", open_folder / "data", *SMALL, "--json"]
    done = as_nobody([*words, "--out", tmp_path / "c"], words)
    assert (done.status, done.error) == (
        3,
        error(
            "read-only",
            f"the cache folder cannot be written: {open_folder}/data.latentcache",
            f"{open_folder}/data.latentcache",
            f"read-only: [Errno 13] Permission denied: '{open_folder}/data.latentcache'",
            "change its permissions or mount it for writing; or build into another folder with --out",
        ),
    )


def test_a_cache_of_a_newer_format(run, cache, data):
    manifest = cache / "snapshots" / "000001" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["format"]["version"] = 4
    manifest.write_text(json.dumps(value))
    for words in (["build", data, "--out", cache], ["verify", cache], ["info", cache]):
        done = run(*words, "--json")
        assert (done.status, done.error) == (
            3,
            error(
                "cache-format",
                "this cache has format 4; this version of latentcache reads up to 1",
                str(manifest.parent),
                "it was written by a newer version",
                "upgrade with `pip install -U latentcache`, or build into another folder with --out",
            ),
        )


def test_a_path_to_no_model(rejected, one):
    assert rejected("data", "--model", "/no/such/model") == error(
        "model-not-found",
        "--model /no/such/model: no such file or folder",
        "/no/such/model",
        "",
        "check the path; --model takes a VAE or pipeline folder, a .safetensors file, a hub id, or demo",
    )


def test_the_words_of_damage_lead_out_of_it(run, cache, data):
    """A manifest that is damaged: nothing can be said of single samples, and nothing is encoded again either."""
    manifest = cache / "snapshots" / "000001" / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b"snapshot", b"Generation", 1))
    done = run("verify", cache, "--json")
    assert (done.status, done.error["slug"]) == (3, "cache-damaged")
    assert done.error["where"].startswith(str(cache / "snapshots" / "000001"))
    command = done.error["fix"].split(",")[0]
    assert command == f"rm {cache}/CURRENT"
    subprocess.run(shlex.split(command), check=True)
    assert run("build", data, *SMALL, "--out", cache, "--json").json["counts"] == counts(4, 0, 4)
    assert run("verify", cache, "--full").status == 0
    assert open_snapshot(cache).number > 1


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("verify", "{}", "--yes"), "latentcache verify {} --repair --yes"),
        (("verify", "{}", "--repair", "--yes", "--sample", "2"), "latentcache verify {} --repair"),
        (("plan", "{}", "--batch-size", "2", "--pack", "8", "--pad", "8"), "plan {} --batch-size 2 --pack 8"),
        (("info", "{}"), "--out {}"),
    ],
)
def test_fixes_carry_the_arguments(run, tmp_path, words, fix):
    cache = tmp_path / "a cache"
    done = run(*(cache if word == "{}" else word for word in words), "--json")
    assert fix.replace("{}", shlex.quote(str(cache))) in done.error["fix"]
    assert done.status in (2, 3)
