"""Images in a folder, in tars, in parquet files and in a saved data set behave alike."""

from __future__ import annotations

import os
import shutil
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands import build_here, entries, look, state_of
from made_archives import FORMS, as_folder, as_tars, png, rows_of, some_images, write_tar

from latentcache import open_cache

COUNT = 6


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(form: str, tmp_path: Path) -> Path:
    FORMS[form](tmp_path / "data", some_images(COUNT))
    return tmp_path / "data"


def age(data: Path) -> None:
    """Make files old, so that a build trusts their stat."""
    for path in data.rglob("*"):
        os.utime(path, (time.time() - 100, time.time() - 100))


def counts(done) -> dict[str, int]:
    numbers = done.json["counts"]
    return {name: number for name, number in numbers.items() if number}


def payloads(cache: Path) -> dict[str, str]:
    return {key: checksum for key, (checksum, _) in entries(cache).items()}


def read_samples(cache: Path) -> list[tuple[str, bytes, list[int]]]:
    """Read captions, latents and original sizes as a training process does."""
    samples = []
    for batch in open_cache(cache).loader(batch_size=1, seed=0, remainder="partial"):
        latents = np.asarray(batch["latents"])
        samples.append((batch["captions"][0], latents.tobytes(), np.asarray(batch["original_size"]).tolist()))
    return sorted(samples)


def test_every_form_gives_the_same_cache(form: str, data: Path, tmp_path: Path) -> None:
    before, cache = state_of(data), tmp_path / "cache"
    assert counts(build_here(data, cache)) == {"samples": COUNT, "encoded": COUNT, "no_caption": 1}
    as_folder(tmp_path / "folder", some_images(COUNT))
    build_here(tmp_path / "folder", tmp_path / "same")
    assert payloads(cache) == payloads(tmp_path / "same")
    assert read_samples(cache) == read_samples(tmp_path / "same")
    assert counts(build_here(data, cache)) == {"samples": COUNT, "cached": COUNT, "no_caption": 1}
    for mode in ((), ("--full",)):
        assert counts(look("verify", cache, *mode, "--json")) == {"ok": COUNT}
    assert look("verify", cache, "--reencode", COUNT, "--json").status == 0
    assert state_of(data) == before


def test_one_more_image_encodes_one(form: str, data: Path, tmp_path: Path) -> None:
    """Rewritten archives with equal content encode nothing."""
    cache = tmp_path / "cache"
    assert build_here(data, cache).status == 0
    age(data)
    build_here(data, cache)
    images = some_images(COUNT)
    images["0001"] = (png(200, 64, 96), images["0001"][1])
    images["0003"] = (images["0003"][0], "another caption")
    shutil.rmtree(data)
    FORMS[form](data, images)
    checked = look("verify", cache, "--json")
    assert checked.status == 1
    left = COUNT - 2
    assert {name: n for name, n in counts(checked).items() if name != "ok"} in (
        {"stale": 2},
        {"stale": 2, "touched": left},
    )
    reasons = {item["reason"] for item in checked.json["items"] if item["category"] == "stale"}
    assert reasons == {"source-changed", "caption-changed"}
    assert counts(build_here(data, cache)) == {"samples": COUNT, "encoded": 1, "cached": COUNT - 1, "no_caption": 1}
    assert counts(look("verify", cache, "--full", "--json")) == {"ok": COUNT}


def bad_tar(root: Path) -> None:
    """A shard with two faults, a truncated one, a compressed one and a good one."""
    images = some_images(5)
    as_tars(root, images, each=5)
    write_tar(
        root / "shard-001.tar",
        [
            ("a.png", images["0000"][0]), ("a.webp", images["0001"][0]), ("b.png", b"no image"),
            ("c.png", images["0002"][0]), ("c.txt", b"\xff\xfe\xfd"), ("d.png", b""), ("e.txt", b"nobody's"),
            ("f.cls", b"7"), ("g.png", images["0003"][0]), ("g.json", b'{"prompt": "from json"}'),
        ],
    )  # fmt: skip
    write_tar(root / "shard-002.tar", [(f"{stem}.png", data) for stem, (data, _) in images.items()])
    whole = (root / "shard-002.tar").read_bytes()
    (root / "shard-002.tar").write_bytes(whole[:1100])
    with tarfile.open(root / "shard-003.tar.gz", "w:gz") as tar:
        tar.add(root / "shard-000.tar", "x.png")


def test_faults_of_tars_are_named_and_the_rest_is_built(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    bad_tar(data)
    done = build_here(data, cache)
    assert done.status == 1
    reasons = {(item["category"], item["path"]): item["reason"] for item in done.json["items"]}
    assert reasons == {
        ("quarantined", "shard-001.tar/a.png"): "two-images",
        ("quarantined", "shard-001.tar/b.png"): "unknown",
        ("quarantined", "shard-001.tar/c.png"): "caption-encoding",
        ("quarantined", "shard-001.tar/d.png"): "empty",
        ("quarantined", "shard-002.tar"): "tar-truncated",
        ("quarantined", "shard-003.tar.gz"): "compressed",
        ("note", "shard-001.tar/e.txt"): "caption-unused",
        ("note", "shard-001.tar/f.cls"): "member-unused",
        ("note", "shard-000.tar/0002.png"): "no-caption",
    }
    assert all(item["hint"] for item in done.json["items"])
    assert "from json" in {text for text, *_ in read_samples(cache)}
    again = build_here(data, cache)
    assert (again.status, again.json["counts"]["encoded"]) == (1, 0)
    assert {(item["category"], item["path"]): item["reason"] for item in again.json["items"]} == reasons
    checked = look("verify", cache, "--full", "--json")
    assert checked.json["counts"]["quarantined"] == 6
    assert checked.json["counts"]["stale"] == checked.json["counts"]["missing"] == 0
    for path in data.glob("*.tar"):
        path.unlink()
    (alone,) = build_here(data, tmp_path / "other").json["items"]
    assert (alone["category"], alone["path"], alone["reason"]) == ("quarantined", "shard-003.tar.gz", "compressed")


def test_faults_of_rows_are_named_and_the_rest_is_built(tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    data.mkdir()
    table = rows_of(some_images(4))
    rows = table.to_pylist()
    rows[1]["image"]["bytes"], rows[2]["image"]["bytes"] = None, b"no image"
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), data / "a.parquet")
    pq.write_table(table.select(["text"]), data / "b.parquet")
    (data / "c.parquet").write_bytes((data / "a.parquet").read_bytes()[:100])
    done = build_here(data, cache)
    assert done.status == 1
    items = [item for item in done.json["items"] if item["category"] == "quarantined"]
    assert {(item["path"], item.get("line", 0)): item["reason"] for item in items} == {
        ("a.parquet", 2): "no-image",
        ("a.parquet", 3): "unknown",
        ("b.parquet", 0): "no-image-column",
        ("c.parquet", 0): "rows-damaged",
    }
    assert sorted(text for text, *_ in read_samples(cache)) == ["caption 0", "caption 3"]
    again = build_here(data, cache)
    assert (again.status, again.json["counts"]["encoded"]) == (1, 0)
    assert counts(look("verify", cache, "--full", "--json")) == {"ok": 2, "quarantined": 4}


def test_images_beside_tars_are_an_ambiguity(tmp_path: Path) -> None:
    data = tmp_path / "data"
    as_tars(data, some_images(3))
    (data / "loose.png").write_bytes(png(3))
    done = build_here(data, tmp_path / "cache")
    assert (done.status, done.json["error"]["slug"]) == (2, "source-ambiguous")
    assert counts(build_here(data, tmp_path / "tars", "--layout", "webdataset"))["encoded"] == 3
    assert counts(build_here(data, tmp_path / "loose", "--layout", "folder"))["encoded"] == 1


@pytest.mark.parametrize("name", ["one.tar", "one.parquet"])
def test_one_archive_as_data(name: str, tmp_path: Path) -> None:
    images = some_images(COUNT)
    (tmp_path / "archives").mkdir()
    archive = tmp_path / "archives" / name
    if name.endswith("tar"):
        as_tars(tmp_path / "made", images, each=COUNT)
        shutil.move(next((tmp_path / "made").rglob("*.tar")), archive)
    else:
        pq.write_table(rows_of(images), archive)
    (tmp_path / "archives/beside.txt").write_text("not of the archive")
    done = build_here(archive, tmp_path / "alone")
    assert counts(done) == {"samples": COUNT, "encoded": COUNT, "no_caption": 1}
    assert [item["reason"] for item in done.json["items"]] == ["no-caption"]
    age(tmp_path)
    assert counts(build_here(archive, tmp_path / "alone")) == {"samples": COUNT, "cached": COUNT, "no_caption": 1}
    assert counts(look("verify", tmp_path / "alone", "--full", "--json")) == {"ok": COUNT}
    for number in range(2):
        build_here(archive, tmp_path / f"part{number}", "--part", f"{number}/2")
    assert look("merge", tmp_path / "part0", tmp_path / "part1", "--out", tmp_path / "both").status == 0
    assert payloads(tmp_path / "both") == payloads(tmp_path / "alone")
    assert read_samples(tmp_path / "both") == read_samples(tmp_path / "alone")
