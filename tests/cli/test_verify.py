import shlex

import pytest
from small_cache import SMALL, build, draw, draw_four


def test_text_is_ordered_by_severity_and_ends_with_the_command(run, cache, data):
    (data / "p1.txt").write_text("other")
    draw(data / "new.png")
    (data / "p0.png").unlink()
    done = run("verify", cache)
    assert done.out.splitlines() == [
        "new new.png: not in the cache yet",
        "stale p1.png [caption-changed]: expected caption 1, found other",
        "removed p0.png: in the cache, but its file is gone",
        "1 missing, 2 stale, 2 ok (quick check; --full reads everything)",
        f"fix: latentcache build {data} --out {cache}",
    ]


@pytest.fixture(scope="module")
def cache_with_rejected(tmp_path_factory):
    """A cache of four usable images and one that was rejected."""
    folder = tmp_path_factory.mktemp("with_bad")
    (draw_four(folder / "data") / "bad.png").write_bytes(b"")
    build(folder / "data", folder / "cache")
    return folder / "cache"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--resolution", "128"], "geometry.resolutions"),
        (["--bucket", "64x64"], "geometry.buckets"),
        (["--bucket-step", "16"], "geometry.multiple"),
        (["--min-side", "32"], "geometry.min_side"),
        (["--max-side", "96"], "geometry.max_side"),
        (["--storage-dtype", "float32"], "encoder.storage_dtype"),
        (["--resample", "lanczos-u8"], "pixels.resample"),
        (["--model", "demo"], "encoder.family"),
    ],
)
def test_recipe_flags_that_differ_make_every_usable_sample_stale(run, cache_with_rejected, words, field):
    cache = cache_with_rejected
    done = run("verify", cache, *words, "--json")
    assert done.status == 1
    stale = [item for item in done.json["items"] if item["category"] == "stale"]
    assert [item["reason"] for item in stale] == [f"recipe:{field}"] * 4
    assert stale[0]["expected"] != stale[0]["found"]
    assert stale[0]["fix"].endswith(f"--out {cache} {' '.join(shlex.quote(word) for word in words)}")
    assert done.json["counts"]["quarantined"] == 1


# depths


def test_untrusted_mode_reads_no_data_and_rejects_links(run, cache, data):
    data.rename(data.with_name("gone"))
    assert run("verify", cache, "--untrusted", "--full").status == 0
    (cache / "shards" / "link").symlink_to("/")
    done = run("verify", cache, "--untrusted", "--json")
    assert (done.status, done.error["why"]) == (3, "it is a link to /")


def test_verify_uses_allow_failed_of_the_build(run, data, tmp_path):
    (data / "bad.png").write_bytes(b"")
    cache = tmp_path / "c"
    assert run("build", data, *SMALL, "--out", cache).status == 1
    assert run("verify", cache).status == 1
    done = run("build", data, "--out", cache, "--allow-failed", "20%", "--json")
    assert (done.status, done.json["allow_failed"], done.json["counts"]["encoded"]) == (0, "20%", 0)
    assert run("verify", cache, "--json").json["allow_failed"] == "20%"
    assert run("verify", cache).status == 0
    assert run("verify", cache, "--allow-failed", "0").status == 1
    (data / "worse.png").write_bytes(b"")
    assert run("build", data, "--out", cache, "--allow-failed", "20%").status == 1
    assert run("verify", cache).status == 1
    assert run("build", data, "--out", cache, "--allow-failed", "2").status == 0
    assert run("build", data, "--out", cache).status == 0, "a build follows the cache"
    assert run("build", data, "--out", cache, "--allow-failed", "1").status == 1
    assert run("verify", cache).status == 1
    assert run("build", data, "--out", cache, "--allow-failed", "2").status == 0
