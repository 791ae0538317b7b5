"""The committed format vectors: the reader opens them, the writer reproduces them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import make_format_vectors
import numpy as np
import pytest
from damaged import flip

from latentcache.fields import registry
from latentcache.identity.content import checksum
from latentcache.store.catalog import load_catalog, stored_entries
from latentcache.store.columns import ColumnFile
from latentcache.store.entry import read_header
from latentcache.store.paths import CachePaths
from latentcache.store.reader import EntryReader
from latentcache.store.shard import load_index
from latentcache.store.snapshot import open_snapshot

sys.path.insert(0, str(Path(__file__).parent.parent / "store"))
import made_entries

FOLDER = make_format_vectors.FOLDER
EXPECTED = json.loads((FOLDER / "expected.json").read_bytes())
KINDS = {kind.name: kind for kind, _, _ in make_format_vectors.FIELDS}


@pytest.fixture(scope="module")
def paths():
    return CachePaths(FOLDER / "cache")


def known(monkeypatch):
    recipes = {kind.name: make_format_vectors.recipe_of(kind, spec) for kind, spec, _ in make_format_vectors.FIELDS}
    for name, kind in KINDS.items():
        recipe = SimpleNamespace(from_json=lambda data, name=name: recipes[name])
        monkeypatch.setattr(kind, "recipe", recipe, raising=False)
    monkeypatch.setattr(registry, "field_kinds", lambda: KINDS)


@pytest.mark.parametrize("installed", [True, False])
def test_the_current_reader_opens_them(paths, monkeypatch, installed):
    if installed:
        known(monkeypatch)
    snapshot = open_snapshot(paths.root)
    reader = EntryReader(paths, snapshot)
    rows = [(field, row) for field in snapshot.fields.values() for row in range(len(field))]
    for (field, row), item in zip(rows, EXPECTED["items"], strict=True):
        array = reader.read(field.name, row)
        assert (field.name, field.spec.dtype, list(array.shape)) == (item["field"], item["dtype"], item["shape"])
        assert f"{checksum(array.tobytes()):016x}" == item["checksum"]
        assert os.fsencode(snapshot.samples.names[int(field.sample[row])]).hex() == item["name_hex"]
        for name, values in field.columns.items():
            np.testing.assert_array_equal(values[row], item["columns"][name])
        for ends, values in field.ragged_columns.values():
            begin = int(ends[row - 1]) if row else 0
            np.testing.assert_array_equal(values[begin : int(ends[row])], np.reshape(item["spans"], (-1, 2)))
        if installed or field.packing == "entry":
            assert field.row_keys(np.array([row]))[0].tobytes().hex() == item["key"]
        assert (field.kind is not None) == installed
    assert [one.name for one in snapshot.rejected] == ["d/broken.png"]
    reader.close()


def test_the_current_writer_makes_the_same_bytes(tmp_path, paths):
    assert make_format_vectors.make_vectors(tmp_path) == EXPECTED
    for kept in sorted(path for path in paths.root.rglob("*") if path.is_file()):
        made = tmp_path / "cache" / kept.relative_to(paths.root)
        if kept.name != "data.mdb":  # whose meta pages hold the address of a map
            assert made.read_bytes() == kept.read_bytes(), kept
    made, kept = (load_catalog(one).keys() for one in (CachePaths(tmp_path / "cache"), paths))
    np.testing.assert_array_equal(made, kept)


def test_entry_heads_are_pinned(paths):
    heads = {entry["key"]: bytes.fromhex(entry["head"]) for entry in EXPECTED["entries"]}
    for folder in paths.sealed_shards():
        index, data = load_index(folder), (folder / "data.mdb").read_bytes()
        for entry, key in enumerate(np.asarray(index.key)):
            offset, head = int(index.offset[entry]), int(index.head[entry])
            assert data[offset - head : offset] == heads.pop(key.tobytes().hex())
    assert not heads


def test_the_vectors_cover_every_feature(paths):
    headers = [read_header(bytes.fromhex(entry["head"])) for entry in EXPECTED["entries"]]
    assert {(header.packed, header.ragged) for header in headers} == {(False, False), (True, False), (True, True)}
    assert any(header.payload_bytes < 1000 for header in headers)
    assert any(header.payload_bytes > 4096 for header in headers)
    assert any(header.ragged_columns for header in headers)
    header = _header(paths)
    forms = json.loads(header["__metadata__"]["columns"])
    assert any("alias" in form for form in forms.values())
    assert any(header[name]["shape"] != form["shape"] for name, form in forms.items() if "shape" in form)
    with pytest.raises(UnicodeDecodeError):
        bytes.fromhex(EXPECTED["items"][3]["name_hex"]).decode("utf-8")


def _header(paths):
    data = (paths.snapshot(1) / "columns.safetensors").read_bytes()
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


# The reader of docs/format/second-reader.md.


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    page = (FOLDER.parent / "second-reader.md").read_text("utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    assert len(code.splitlines()) < 80
    assert max(map(len, code.splitlines())) <= 120
    assert "import latentcache" not in code
    path = tmp_path_factory.mktemp("second") / "second_reader.py"
    path.write_text(code, encoding="utf-8")
    return path


def listed(program, cache):
    found = subprocess.run([sys.executable, program, cache], capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_the_second_reader_reads_the_vectors(program, tmp_path):
    lines = listed(program, shutil.copytree(FOLDER / "cache", tmp_path / "cache"))
    for line, item in zip(lines, EXPECTED["items"], strict=True):
        name = os.fsdecode(bytes.fromhex(item["name_hex"]))
        dtype = {"bfloat16": "uint16"}.get(item["dtype"], item["dtype"])
        assert line == f"{item['field']} {item['key']} {dtype} {item['shape']} {item['checksum']} {name!a}"


@pytest.mark.parametrize("count", [12, 400])
def test_the_second_reader_reads_every_kind(program, tmp_path, monkeypatch, count):
    made_entries.install(monkeypatch)
    paths = made_entries.make_cache(tmp_path / "cache", range(count), shards=3)
    lines = [line.split(" ") for line in listed(program, paths.root)]
    stored = {one.key.hex(): f"{one.checksum:016x}" for one in stored_entries(load_catalog(paths, open_shards=True))}
    assert len(lines) == 3 * count
    for line in lines:
        assert stored[line[1]] == line[-2]
    for name in made_entries.KINDS:
        keys = [item.key.hex() for item in made_entries.items_of(name, range(count))]
        assert [line[1] for line in lines if line[0] == name] == keys


def test_the_second_reader_reads_starts_that_do_not_follow(program, tmp_path, monkeypatch):
    made_entries.install(monkeypatch)
    paths = made_entries.make_cache(tmp_path / "cache", range(40), shards=1)
    made_entries.publish(paths, [39, 3, 4, 7, 0])
    assert "fields/words/start" in ColumnFile(paths.snapshot(2) / "columns.safetensors")
    words = [line.split(" ") for line in listed(program, paths.root) if line.startswith("words")]
    items = made_entries.items_of("words", [39, 3, 4, 7, 0])
    assert [line[1] for line in words] == [item.key.hex() for item in items]
    assert [line[-2] for line in words] == [f"{checksum(item.array.tobytes()):016x}" for item in items]


def test_the_second_reader_rejects_damage(program, tmp_path):
    cache = shutil.copytree(FOLDER / "cache", tmp_path / "cache")
    index = load_index(cache / "shards" / "second")
    flip(index.folder / "data.mdb", int(np.asarray(index.offset)[0]) + 10)
    done = subprocess.run([sys.executable, program, cache], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: payload checksum" in done.stderr
