"""Images in parquet and Arrow rows, and members of tars, also of damaged ones."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_archives import write_tar

from latentcache.errors import UnusableSampleError
from latentcache.sources.formats import archives
from latentcache.sources.formats.archives import (
    PARQUET,
    Member,
    close_tables,
    open_rows,
    read_row,
    tar_members,
)

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    close_tables()


def images(count: int) -> list[bytes]:
    return [PNG + bytes([number % 251]) * (number % 7 * 100) for number in range(count)]


def table(count: int = 20, **more: Any) -> pa.Table:
    structs = [{"bytes": data, "path": None} for data in images(count)]
    columns = {"image": pa.array(structs, pa.struct([("bytes", pa.binary()), ("path", pa.string())]))}
    return pa.table({**columns, "text": [f"caption {number}" for number in range(count)], **more})


def images_of(path: Path, kind: str = PARQUET) -> list[str]:
    with open_rows(path, kind) as table:
        return table.images()


def as_parquet(path: Path, data: pa.Table, **how: Any) -> Path:
    pq.write_table(data, path, **how)
    return path


def as_arrow(path: Path, data: pa.Table, rows_each: int = 7, compression: str | None = None) -> Path:
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=rows_each)
    return path


def test_the_first_values_show_which_columns_hold_images(tmp_path: Path) -> None:
    sound, late = [b"RIFF....WAVE"] * 20, [None, b"damaged", *images(18)]
    path = as_parquet(tmp_path / "a.parquet", table(sound=sound, late=late))
    assert images_of(path) == ["image", "late"]
    assert images_of(as_arrow(tmp_path / "a.arrow", table(sound=sound, late=late)), "arrow") == ["image", "late"]


@pytest.mark.parametrize("how", [{}, {"row_group_size": 3}, {"compression": "zstd", "row_group_size": 5}], ids=str)
def test_rows_of_parquet_in_any_order(tmp_path: Path, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_BLOCK_BYTES", 1000)
    path, expected = as_parquet(tmp_path / "a.parquet", table(), **how), images(20)
    for row in [*range(1, 21), 20, 1, 13, 2, 7, 19]:
        data, memo = read_row(path, row, 0)
        assert data == expected[row - 1]
        assert memo.size == path.stat().st_size
        assert memo.seen_ns


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_of_arrow_in_any_order(tmp_path: Path, compression: str | None) -> None:
    path, expected = as_arrow(tmp_path / "a.arrow", table(), compression=compression), images(20)
    for row in 13, 20, 1, 2, 7, 19, 8:
        data, memo = read_row(path, row, 0)
        assert (data, memo.size) == (expected[row - 1], path.stat().st_size)


def test_rows_of_arrow_without_an_image_are_rejected(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.large_binary()), ("path", pa.string())])
    whole, elsewhere = {"bytes": PNG, "path": None}, {"bytes": None, "path": "/elsewhere.png"}
    values = [whole, None, elsewhere, {"bytes": b"", "path": ""}]
    path = as_arrow(tmp_path / "a.arrow", pa.table({"image": pa.array(values, kind)}))
    assert read_row(path, 1, 0)[0] == PNG
    for row in 2, 3, 4:
        with pytest.raises(UnusableSampleError) as error:
            read_row(path, row, 0)
        assert error.value.slug == "no-image"


def test_a_file_that_was_replaced_is_opened_again(tmp_path: Path) -> None:
    path = as_parquet(tmp_path / "a.parquet", table(5))
    assert read_row(path, 3, 0)[0] == images(5)[2]
    as_parquet(path, table(5).slice(2))
    assert read_row(path, 1, 0)[0] == images(5)[2]
    with pytest.raises(UnusableSampleError) as error:
        read_row(path, 5, 0)
    assert error.value.slug == "changing"


# tars


LONG = "a" * 90 + "/" + "b" * 50 + "/" + "c" * 60 + ".jpg"


def read(path: Path) -> list[Member]:
    with path.open("rb") as file:
        return list(tar_members(file))


def until_fault(path: Path) -> tuple[list[str], UnusableSampleError]:
    names: list[str] = []
    with path.open("rb") as file, pytest.raises(UnusableSampleError) as error:
        names.extend(member.name for member in tar_members(file))
    return names, error.value


@pytest.mark.parametrize(
    ("cut", "left", "words"),
    [(900, [], "member 1 (a.jpg) ends at byte"), (1600, ["a.jpg"], "is cut short"), (2100, ["a.jpg"], "(b.jpg)")],
)
def test_a_truncated_tar_gives_its_complete_members(tmp_path: Path, cut: int, left: list[str], words: str) -> None:
    path = write_tar(tmp_path / "some.tar", [("a.jpg", bytes(600)), ("b.jpg", bytes(600)), ("c.jpg", b"c")])
    path.write_bytes(path.read_bytes()[:cut])
    names, error = until_fault(path)
    assert names == left
    assert error.slug == "tar-truncated"
    assert words in error.what
    assert error.fix


def test_a_tar_without_end_blocks_is_complete(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "some.tar", [("a.jpg", b"a")])
    path.write_bytes(path.read_bytes()[:1024])
    assert [member.name for member in read(path)] == ["a.jpg"]


@given(st.binary(max_size=4096), st.integers(0, 3))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_members_or_a_reason(tmp_path: Path, noise: bytes, at: int) -> None:
    path = write_tar(tmp_path / "some.tar", [("a.jpg", bytes(300)), (LONG, b"b")], tarfile.PAX_FORMAT)
    data = bytearray(path.read_bytes())
    data[at * 512 : at * 512 + len(noise)] = noise
    path.write_bytes(data)
    cause = ""
    try:
        read(path)
    except UnusableSampleError as error:
        cause = error.slug
    assert cause in {"", "tar-damaged", "tar-truncated"}
