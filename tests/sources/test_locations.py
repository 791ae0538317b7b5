"""Whole files, byte ranges and rows give the same bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from latentcache.errors import UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable
from latentcache.sources.formats.archives import close_tables, open_rows
from latentcache.sources.locations import SPAN, locations, open_image, read_image

DATA = bytes(range(256)) * 10


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(DATA)
    (tmp_path / "b.tar").write_bytes(b"before" + DATA + b"behind")
    pq.write_table(pa.table({"n": [1, 2], "jpg": [b"other", DATA]}), tmp_path / "c.parquet")
    return tmp_path


def samples() -> SampleTable:
    nothing = np.zeros((3, 16), dtype=np.uint8)
    names = Strings.of(["a.png", "b.tar", "c.parquet"])
    held = Input(
        content=nothing,
        file=np.arange(3, dtype=np.int32),
        line=np.array([0, 4, 2], dtype=np.uint32),
    )
    spans = np.array([(0, 0), (6, len(DATA)), (1, 0)], dtype=np.uint64)
    return SampleTable(
        names=Strings.of(["a.png", "b.tar/x.png", "c.parquet:2"]),
        files=Files(names=names, stat=np.zeros((3, 6), dtype=np.uint64), content=nothing),
        inputs={"image": held},
        columns={SPAN: spans},
    )


def test_every_archive_gives_the_same_bytes(root: Path) -> None:
    for location in locations(samples(), [0, 1, 2]):
        data, memo = read_image(root, location)
        assert data == DATA
        assert memo.size == (root / location["path"]).stat().st_size
        with open_image(root, location) as file:
            assert file.read(5) == DATA[:5]
            assert file.seek(-4, 2) == len(DATA) - 4
            assert file.read() == DATA[-4:]
            assert file.read() == b""
            assert file.seek(300) == 300
            assert file.read(3) == DATA[300:303]
    close_tables()


@pytest.mark.parametrize(
    ("location", "cause"),
    [
        ({"path": "b.tar", "offset": 6, "bytes": len(DATA) + 100}, "changing"),
        ({"path": "gone.tar", "offset": 0, "bytes": 5}, "not-found"),
        ({"path": "gone.parquet", "row": 1, "column": 0}, "not-found"),
        ({"path": ".", "offset": 0, "bytes": 5}, "not-regular"),
    ],
)
def test_missing_members(root: Path, location: dict[str, object], cause: str) -> None:
    with pytest.raises(UnusableSampleError) as error:
        read_image(root, location)
    assert error.value.slug == cause


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_name_that_pyarrow_does_not_take_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"\udcff.{kind}"
    path.write_bytes(DATA)
    with pytest.raises(UnusableSampleError, match="its path is not UTF-8"), open_rows(path, kind):
        pass
