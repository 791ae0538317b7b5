"""Tar headers compared with Python's reader, and damaged tars."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_archives import write_tar

from latentcache.errors import UnusableSampleError
from latentcache.sources.formats.tar import Member, tar_members

LONG = "a" * 90 + "/" + "b" * 50 + "/" + "c" * 60 + ".jpg"


def read(path: Path) -> list[Member]:
    with path.open("rb") as file:
        return list(tar_members(file))


def until_fault(path: Path) -> tuple[list[str], UnusableSampleError]:
    found: list[str] = []
    with path.open("rb") as file, pytest.raises(UnusableSampleError) as error:
        found.extend(member.name for member in tar_members(file))
    return found, error.value


def test_what_is_no_plain_file_has_no_size(tmp_path: Path) -> None:
    path = tmp_path / "some.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (("d", tarfile.DIRTYPE), ("l", tarfile.SYMTYPE), ("h", tarfile.LNKTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.jpg"
            tar.addfile(info)
        info = tarfile.TarInfo("a.jpg")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"abc"))
    assert [(one.number, one.name, one.size) for one in read(path)] == [(2, "l", -1), (3, "h", -1), (4, "a.jpg", 3)]


@pytest.mark.parametrize(
    ("cut", "left", "words"),
    [(900, [], "member 1 (a.jpg) ends at byte"), (1600, ["a.jpg"], "is cut short"), (2100, ["a.jpg"], "(b.jpg)")],
)
def test_a_truncated_tar_gives_its_complete_members(tmp_path: Path, cut: int, left: list[str], words: str) -> None:
    path = write_tar(tmp_path / "some.tar", [("a.jpg", bytes(600)), ("b.jpg", bytes(600)), ("c.jpg", b"c")])
    path.write_bytes(path.read_bytes()[:cut])
    found, error = until_fault(path)
    assert found == left
    assert error.slug == "tar-truncated"
    assert words in error.what
    assert error.fix


def test_a_tar_without_end_blocks_is_complete(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "some.tar", [("a.jpg", b"a")])
    path.write_bytes(path.read_bytes()[:1024])
    assert [one.name for one in read(path)] == ["a.jpg"]


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
