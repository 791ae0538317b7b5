"""Sources are only read, whatever happens to a build; what changes under it is told apart by its bytes."""

import io
import os
import socket
import struct
import time
import zlib

import numpy as np
import pytest
from commands import acknowledged, build, draw_folder, entries, finished, look, noise, start_build, state_of, wait_for
from PIL import Image


def test_sources_are_as_they_were_after_everything(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    (data / "bad.png").write_bytes(noise(1)[:-100])
    (data / "link.png").symlink_to("0001.png")
    before = state_of(data)
    process = start_build(data, cache, delay_ms=30, events=events)
    wait_for(lambda: acknowledged(events), process)
    process.terminate()
    finished(process)
    assert build(data, cache, "--allow-failed", "1").status == 0
    assert build(data, cache, "--retry-failed", "--resolution", "96", "--allow-failed", "0").status == 1
    for words in (["info", cache, "--entries"], ["verify", cache, "--full"], ["plan", cache, "--batch-size", "4"]):
        look(*words, "--json")
    assert state_of(data) == before


def test_a_file_edited_during_the_build_is_what_was_read_of_it(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, "--decode-threads", 1, "--host-memory", 100_000, delay_ms=60, events=events)
    wait_for(lambda: acknowledged(events), process)
    for number in range(30):
        (data / f"{number:04}.png").write_bytes(noise(500 + number))
    assert finished(process).status in (0, 1)
    stale = look("verify", cache, "--full", "--json").json
    assert stale["counts"]["stale"] > 0  # the early ones
    again = build(data, cache)
    assert again.json["counts"]["encoded"] == 30 - again.json["counts"]["cached"]
    assert again.json["counts"]["cached"] > 0  # the late ones: read after the edit, and known by what was read
    assert look("verify", cache, "--full", "--json").status == 0
    assert build(data, tmp_path / "other").status == 0
    current = {name: key for key, (_, names) in entries(cache).items() for name in names}
    assert current == {name: key for key, (_, names) in entries(tmp_path / "other").items() for name in names}


def test_a_file_deleted_during_the_build_is_named_and_the_others_are_there(tmp_path):
    data, cache, events = draw_folder(tmp_path / "data", 30), tmp_path / "cache", tmp_path / "events"
    process = start_build(data, cache, "--decode-threads", 1, "--host-memory", 100_000, delay_ms=60, events=events)
    wait_for(lambda: acknowledged(events), process)
    for number in range(30):
        (data / f"{number:04}.png").unlink()
    done = finished(process)
    assert done.status == 1
    assert {item["reason"] for item in done.json["items"] if item["category"] == "quarantined"} == {"vanished"}
    assert done.json["counts"]["samples"] == 30
    assert done.json["counts"]["quarantined"] + done.json["counts"]["encoded"] == 30


def counts(samples, encoded=0, cached=0, quarantined=0, no_caption=0):
    made = {"samples": samples, "encoded": encoded, "cached": cached, "duplicates": 0}
    return made | {"quarantined": quarantined, "no_caption": no_caption}


def chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def png(height, width, *, pixels=b"", more=b""):
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


def damaged_png():
    """Inflates without an error, to other pixels: only its checksum says so."""
    rows = (b"\0" + bytes(range(48)) * 3) * 48
    stored = zlib.compress(rows, 0)
    whole = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 48, 48, 8, 2, 0, 0, 0))
    body = chunk(b"IDAT", stored)
    return whole + body[:2000] + b"\xff" + body[2001:] + chunk(b"IEND", b"")


def float_tiff():
    buffer = io.BytesIO()
    Image.fromarray(np.linspace(0, 1, 48 * 48, dtype=np.float32).reshape(48, 48)).save(buffer, format="TIFF")
    return buffer.getvalue()


def text_bomb():
    return png(48, 48, more=chunk(b"zTXt", b"x\0\0" + zlib.compress(b"a" * (80 << 20), 9)))


HOSTILE = {
    "cut.png": (lambda: noise(1)[:-60], "truncated"),
    "cut.jpg": (lambda: noise(1, form="JPEG")[:-300], "truncated"),
    "cut.webp": (lambda: noise(1, form="WEBP")[:-90], "truncated"),
    "cut.tiff": (lambda: noise(1, form="TIFF")[:-900], "truncated"),
    "nothing.jpg": (lambda: b"", "empty"),
    "zeros.jpg": (lambda: bytes(5000), "zeros"),
    "page.jpg": (lambda: b"<!DOCTYPE html><html>404</html>", "html"),
    "pointer.png": (lambda: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git-lfs"),
    "drawing.png": (lambda: b'<svg xmlns="http://www.w3.org/2000/svg"/>', "svg"),
    "phone.heic": (lambda: b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "heic-needs-plugin"),
    "script.jpg": (lambda: b"%!PS-Adobe-3.0 EPSF-3.0\n", "eps"),
    "dot.png": (lambda: png(1, 1, pixels=b"\0abc"), "too-small"),
    "line.png": (lambda: png(2, 4000, pixels=(b"\0" + bytes(12_000)) * 2), "extreme-aspect"),
    "large.png": (lambda: png(11_000, 11_000), "too-many-pixels"),
    "bomb.png": (lambda: png(60_000, 60_000), "bomb"),
    "text.png": (text_bomb, "png-metadata-too-large"),
    "rot.png": (damaged_png, "decoder-error"),
    "float.tiff": (float_tiff, "float"),
    "noise.jpg": (lambda: os.urandom(4000), "unknown"),
}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """Four good images among everything that can be wrong; and what each should be called."""
    data = draw_folder(tmp_path / "data", 4)
    expected = {name: cause for name, (_, cause) in HOSTILE.items()}
    for name, (make, _) in HOSTILE.items():
        (data / name).write_bytes(make())
    os.mkfifo(data / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.chdir(data)  # a socket's name may have 107 bytes only
        listener.bind("socket.png")
    (data / "loop").symlink_to(".")
    (data / "nowhere.jpg").symlink_to("not-there.jpg")
    (data / "outside.jpg").symlink_to("/etc/hostname")
    (data / "self.jpg").symlink_to("self.jpg")
    expected |= dict.fromkeys(("pipe.jpg", "socket.png"), "not-regular")
    expected |= {"loop": "symlink-loop", "nowhere.jpg": "not-found", "outside.jpg": "outside-root"}
    return data, expected | {"self.jpg": "symlink-loop"}


def test_among_hostile_files_the_good_ones_are_built_and_each_bad_one_is_named(hostile, tmp_path):
    data, expected = hostile
    (data / os.fsdecode(b"caf\xe9\n.png")).write_bytes(noise(77))
    (data / "really.jpg").write_bytes(noise(78))  # a PNG
    before, started = state_of(data), time.monotonic()
    done = build(data, tmp_path / "cache")
    assert time.monotonic() - started < 20
    items = {item["path"]: item for item in done.json["items"] if item["category"] == "quarantined"}
    assert {name: item["reason"] for name, item in items.items()} == expected
    assert all(item["hint"] for item in items.values())
    assert done.status == 1
    assert done.json["counts"] == counts(
        6 + len(expected), 6, 0, len(expected), no_caption=done.json["counts"]["no_caption"]
    )
    assert "Traceback" not in done.err
    assert state_of(data) == before
    again = build(data, tmp_path / "cache", "--allow-failed", "100%")
    assert (again.status, again.json["counts"]["encoded"], again.json["counts"]["cached"]) == (0, 0, 6)
    assert len(entries(tmp_path / "cache")) == 6
