"""The committed vectors of the format: today's reader opens them, today's writer makes the same entries."""

import json
import os
import re
import shutil
import subprocess
import sys

import make_format_vectors
import numpy as np
import pytest
from make_pictures import make_pictures

from latentcache.identity.content import checksum
from latentcache.store.entry import HEADER_BYTES, unpack_header
from latentcache.store.generation import load_generation
from latentcache.store.index import collect_rows, load_index
from latentcache.store.inventory import stored_entries
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader

FOLDER = make_format_vectors.FOLDER
EXPECTED = json.loads((FOLDER / "expected.json").read_bytes())


@pytest.fixture(scope="module")
def layout():
    return CacheLayout(FOLDER / "cache")


def test_the_vectors_are_small():
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 300_000
    assert not {"lock.mdb", "builder.lock", "BUILDING"} & {path.name for path in files}


def test_todays_reader_opens_them(layout):
    generation = load_generation(layout.root)
    reader = EntryReader(layout, generation)
    assert generation.recipe.recipe_id.hex() == EXPECTED["recipe_id"]
    assert [item["name"] for item in generation.refused] == EXPECTED["refused"]
    assert len(generation.rows.shard) == len(EXPECTED["entries"])
    for row, entry in enumerate(EXPECTED["entries"]):
        header, payload = reader.read(row)
        assert header == unpack_header(bytes.fromhex(entry["header"]), bytes.fromhex(entry["key"]))
        assert (header.dtype, list(header.shape)) == (entry["dtype"], entry["shape"])
        assert f"{header.payload_checksum:016x}" == entry["payload_checksum"]
        assert payload.reshape(-1)[:8].tolist() == entry["first_values"]
        assert generation.rows.key[row].tobytes().hex() == entry["key"]
        assert os.fsencode(reader.sample_name(row)).hex() == entry["name_hex"]
        assert generation.samples.captions[row] == entry["caption"]
    reader.close()


def test_their_indexes_are_those_of_their_pages(layout):
    for folder in layout.sealed_shards():
        index = load_index(folder)
        np.testing.assert_array_equal(collect_rows(index.data), index.rows)
        for row, key in zip(index.rows, index.keys(), strict=True):
            (entry,) = [entry for entry in EXPECTED["entries"] if entry["key"] == key.hex()]
            assert (row["header"].tobytes().hex(), row["facts"].tobytes().hex()) == (entry["header"], entry["facts"])


def test_todays_writer_makes_the_same_entries(tmp_path, layout):
    assert make_format_vectors.make_vectors(tmp_path) == EXPECTED
    made, kept = (load_generation(root) for root in (tmp_path / "cache", layout.root))
    for name in ("key", "shard", "bucket", "sample", "crop", "resize", "pixel_hash"):
        np.testing.assert_array_equal(getattr(made.rows, name), getattr(kept.rows, name))
    assert (made.recipe, made.buckets, made.shards) == (kept.recipe, kept.buckets, kept.shards)
    assert (made.refused, made.notes) == (kept.refused, kept.notes)


def test_the_vectors_cover_what_they_say(layout):
    header = [unpack_header(bytes.fromhex(e["header"]), bytes.fromhex(e["key"])) for e in EXPECTED["entries"]]
    assert any(h.payload_bytes < 2000 for h in header)
    assert any(h.payload_bytes > 4096 for h in header)
    crops = load_generation(layout.root).rows.crop
    assert crops[:, 0].any()
    assert crops[:, 1].any()
    with pytest.raises(UnicodeDecodeError):
        bytes.fromhex(EXPECTED["entries"][-1]["name_hex"]).decode("utf-8")


# The reader of docs/format/second-reader.md.


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    page = (FOLDER.parent / "second-reader.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    assert len(code.splitlines()) <= 60
    assert "import latentcache" not in code
    path = tmp_path_factory.mktemp("second") / "second_reader.py"
    path.write_text(code, encoding="utf-8")
    return path


def listed(program, cache):
    found = subprocess.run([sys.executable, program, cache], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_the_second_reader_reads_the_vectors(program, tmp_path):
    lines = listed(program, shutil.copytree(FOLDER / "cache", tmp_path / "cache"))
    wanted = []
    for entry in EXPECTED["entries"]:
        name = os.fsdecode(bytes.fromhex(entry["name_hex"]))
        wanted.append(f"{entry['key']} float16 {entry['shape']} {name!a} {entry['caption']!a}")
    assert lines == wanted


def test_the_second_reader_reads_a_fresh_cache(program, tmp_path):
    paths = make_pictures(tmp_path / "pictures", 8, side=96)
    places = [tmp_path / "pictures", "--out", tmp_path / "cache"]
    command = [sys.executable, "-m", "latentcache", "build", *places, "--model", "stub", "--resolution", "128"]
    subprocess.run(command, check=True, capture_output=True)
    lines = listed(program, tmp_path / "cache")
    keys = {stored.key.hex() for stored in stored_entries(tmp_path / "cache", payloads=True) if stored.intact}
    assert {line.split()[0] for line in lines} == keys
    for line, path in zip(lines, sorted(paths), strict=True):
        caption = path.with_suffix(".txt").read_text("utf-8").strip()
        assert line.endswith(f"{path.name!a} {caption!a}")


def test_the_second_reader_lists_mirror_images_behind_their_pictures(program, tmp_path):
    make_pictures(tmp_path / "pictures", 3, side=96)
    places = [tmp_path / "pictures", "--out", tmp_path / "cache"]
    more = ["--model", "stub", "--resolution", "128", "--flip"]
    subprocess.run([sys.executable, "-m", "latentcache", "build", *places, *more], check=True, capture_output=True)
    lines = [line.split(maxsplit=1) for line in listed(program, tmp_path / "cache")]
    assert [key[2:4] for key, _ in lines] == ["00"] * 3 + ["01"] * 3
    assert [rest for _, rest in lines[:3]] == [rest for _, rest in lines[3:]]


def test_the_second_reader_refuses_damage(program, tmp_path):
    cache = shutil.copytree(FOLDER / "cache", tmp_path / "cache")
    index = load_index(cache / "shards" / "large")
    data = bytearray(index.data.read_bytes())
    at = int(index.rows["offset"][0]) + HEADER_BYTES + 100
    assert checksum(bytes(data[at - 100 : at - 100 + 6144])) == int(EXPECTED["entries"][-1]["payload_checksum"], 16)
    data[at] ^= 1
    index.data.chmod(0o644)
    index.data.write_bytes(data)
    done = subprocess.run([sys.executable, program, cache], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: payload checksum" in done.stderr
