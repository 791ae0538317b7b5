"""Bad input and its exact error: slug, what, where, why and fix.

``{tmp}`` is the folder of the test; the data folder is ``{tmp}/data``, the cache ``{tmp}/cache``.
"""

import json
import shlex

import pytest
from small_cache import SMALL, as_nobody, draw

from latentcache.cli.app import main

IMAGES = ".avif .bmp .gif .heic .heif .jfif .jpe .jpeg .jpg .jxl .mkv .mov .mp4 .png .svg .tif .tiff .webm .webp"


def error(slug, what, where, why, fix):
    return {"slug": slug, "what": what, "where": where, "why": why, "fix": fix}


NOTHING = "no images in {tmp}/empty", "{tmp}/empty", f"looked for {IMAGES}; found no files"
INSIDE = "data folders are only read; a cache inside one would be taken for data"
MODELS = "check the path; --model takes a VAE or pipeline folder, a .safetensors file, a hub id, or demo"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("empty",), ("source-empty", *NOTHING, "give the folder that holds the images: `latentcache build FOLDER`")),
        (("none",), ("source-not-found", "no such file or folder: {tmp}/none", "{tmp}/none", "", "check the path")),
        (
            ("data", "--out", "data/sub/../deep/cache"),
            (
                "usage",
                "--out={tmp}/data/sub/../deep/cache: the cache would be inside the data folder",
                "{tmp}/data/sub/../deep/cache",
                INSIDE,
                "use --out={tmp}/data.latentcache",
            ),
        ),
        (
            ("data", "--out", "thesis"),
            (
                "usage",
                "--out={tmp}/thesis: the folder is not empty and holds no cache",
                "{tmp}/thesis",
                "a cache is never mixed with other files",
                "give an empty or a new folder",
            ),
        ),
        (
            ("data", "--model", "/no/such/model"),
            ("model-not-found", "--model=/no/such/model: no such file or folder", "/no/such/model", "", MODELS),
        ),
    ],
)
def test_a_build_that_fails_early_writes_nothing(run, tmp_path, words, expected):
    draw(tmp_path / "data" / "a.png")
    (tmp_path / "empty").mkdir()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    paths = [
        tmp_path / word if number in (0, 2) and word[0] not in "-/" else word for number, word in enumerate(words)
    ]
    done = run("build", *paths, "--json")
    shown = {name: text.replace(str(tmp_path), "{tmp}") for name, text in done.error.items()}
    assert (done.status, shown) == (2, error(*expected))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_manifest_that_may_not_be_read_is_not_set_aside(open_folder, tmp_path):
    draw(open_folder / "data" / "a.png")
    cache = open_folder / "cache"
    words = ["build", open_folder / "data", "--out", cache, *SMALL, "--json"]
    assert main([*map(str, words)]) == 0
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    manifest = cache / "snapshots" / "000001" / "manifest.json"
    manifest.chmod(0o600)
    done = as_nobody([*words, "--out", tmp_path / "c"], words)
    assert (done.status, done.error["slug"]) == (3, "store")
    assert done.error["what"] == "manifest.json cannot be read"
    assert done.error["fix"].startswith(f"chmod -R u+rX {manifest.parent}, then run again")
    assert manifest.exists()
    assert (cache / "CURRENT").read_text() == "000001\n"


def with_version(cache, version):
    manifest = cache / "snapshots" / "000001" / "manifest.json"
    value = json.loads(manifest.read_text())
    value["format"]["version"] = version
    manifest.write_text(json.dumps(value))
    return str(manifest.parent)


def test_a_cache_of_a_newer_format(run, cache, data):
    folder = with_version(cache, 4)
    for words in (["build", data, "--out", cache], ["verify", cache], ["info", cache]):
        done = run(*words, "--json")
        assert (done.status, done.error) == (
            3,
            error(
                "cache-format",
                "this cache has format 4; this version of latentcache reads format 2",
                folder,
                "it was written by a newer version",
                "upgrade with `pip install -U latentcache`, or build into another folder with --out",
            ),
        )


def test_a_cache_of_an_older_format_is_built_again(run, cache, data):
    with_version(cache, 1)
    for words in (["build", data, "--out", cache], ["verify", cache], ["info", cache]):
        done = run(*words, "--json")
        assert (done.status, done.error["slug"]) == (3, "cache-format")
        assert done.error["why"] == "it was written by an older version"
    moved, build = done.error["fix"].split(": ", 1)[1].split(" && ")
    assert moved == f"mv {cache} {cache}.format-1"
    cache.rename(f"{cache}.format-1")
    assert run(*build.split()[1:], *SMALL).status == 0
    assert run("verify", cache).status == 0


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("verify", "{}", "--yes"), "latentcache verify {} --repair --yes"),
        (("verify", "{}", "--repair", "--yes", "--sample", "1/2"), "latentcache verify {} --repair"),
        (("plan", "{}", "--batch-size", "2", "--pack", "8", "--pad", "8"), "plan {} --batch-size 2 --pack 8"),
        (("info", "{}"), "--out {}"),
    ],
)
def test_fixes_repeat_the_arguments(run, tmp_path, words, fix):
    cache = tmp_path / "a cache"
    done = run(*(cache if word == "{}" else word for word in words), "--json")
    assert fix.replace("{}", shlex.quote(str(cache))) in done.error["fix"]
    assert done.status in (2, 3)
