import errno
import os
import subprocess
import sys
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_entries import entries_of, flat_entry, open_shard

from latentcache.errors import CacheReadOnlyError, DiskFullError, StoreError
from latentcache.identity.content import checksum
from latentcache.store import shard as shard_module
from latentcache.store.catalog import recover_shard
from latentcache.store.entry import read_header
from latentcache.store.paths import CachePaths
from latentcache.store.shard import ShardWriter, load_index, read_meta


def stored(folder):
    """Read every value of a sealed shard by key, with checks."""
    index, values = load_index(folder), {}
    data = (folder / "data.mdb").read_bytes()
    spans = zip(
        np.asarray(index.offset).tolist(), np.asarray(index.head).tolist(), np.asarray(index.key), strict=True
    )
    for offset, head, key in spans:
        header = read_header(data[offset - head : offset], key.tobytes())
        payload = data[offset : offset + header.payload_bytes]
        assert checksum(payload) == header.payload_checksum
        values[key.tobytes()] = data[offset - head : offset] + payload
    return values


def new_entry(number):
    return entries_of("plane", [number])[0]


def expected(entries):
    return {entry.key: bytes(entry.value) for entry in entries}


@settings(max_examples=10)
@given(st.lists(st.lists(st.integers(100, 300_000), min_size=1, max_size=6), min_size=1, max_size=6))
def test_written_items_are_found(tmp_path_factory, batches):
    folder = tmp_path_factory.mktemp("shard")
    writer, entries = ShardWriter(folder / "one.open", map_bytes=1 << 20), []
    for sizes in batches:
        batch = [flat_entry(len(entries) + n, size) for n, size in enumerate(sizes)]
        writer.write(batch)
        entries += batch
    assert stored(writer.seal()) == expected(entries)


def test_a_key_that_is_there_keeps_its_entry(tmp_path):
    writer = ShardWriter(tmp_path / "one.open")
    writer.write([new_entry(1), new_entry(2), new_entry(2)])
    writer.write([new_entry(2), new_entry(3)])
    assert stored(writer.seal()) == expected([new_entry(1), new_entry(2), new_entry(3)])


def test_the_file_format_does_not_follow_the_environment(tmp_path):
    code = (
        "from made_entries import *; import sys, pathlib; "
        "make_shard(pathlib.Path(sys.argv[1]), entries_of('plane', [1]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "one")]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, env=os.environ | {"LMDB_DEFAULT_LIB_VERSION": "1", "PYTHONPATH": paths})
    assert read_meta(tmp_path / "one" / "data.mdb").transaction
    with lmdb.open(str(tmp_path / "one"), readonly=True, lock=False) as environment:
        assert environment.lib_version()[:2] == (0, 9)
    assert stored(tmp_path / "one") == expected([new_entry(1)])


@pytest.mark.parametrize("place", ["file/one.open", "file"])
def test_an_unwritable_folder_is_a_package_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheReadOnlyError, match="cannot be written"):
        ShardWriter(tmp_path / place)


def test_other_disk_errors_are_not_disk_full(tmp_path):
    (tmp_path / "data.mdb").write_bytes(b"")
    for code, expected in ((errno.EIO, StoreError), (errno.ENOSPC, DiskFullError)):
        error = lmdb.Error("mdb_txn_commit", code)
        error.code = code
        with pytest.raises(expected) as caught, shard_module._storing(tmp_path):
            raise error
        assert caught.type is expected


def test_a_read_error_is_not_damage(tmp_path, monkeypatch):
    data = open_shard(tmp_path / "one.open", [flat_entry(1, 3000)])

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StoreError, match=r"data\.mdb cannot be read") as caught:
        recover_shard(CachePaths(tmp_path), tmp_path / "one.open")
    assert type(caught.value) is StoreError
    assert data.exists()
