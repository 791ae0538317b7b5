import struct
import warnings
import zlib

import numpy as np
import pytest
from made_images import chunk, image_size, saved
from PIL import Image

from latentcache.errors import UnusableSampleError
from latentcache.fields.strings import Strings
from latentcache.fields.table import Files, Input, SampleTable
from latentcache.geometry.sizes import Size
from latentcache.images.headers import check_png, exif_orientation, fill_sizes

SIGNATURE = b"\x89PNG\r\n\x1a\n"


def png(width: int, height: int, *between: bytes, after: bytes = b"", body: bytes = b"") -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = body or zlib.compress(b"\0" * (width + 1) * height)
    return SIGNATURE + header + b"".join(between) + chunk(b"IDAT", rows) + after + chunk(b"IEND", b"")


def exif(orientation: int, order: str = "<", kind: int = 3) -> bytes:
    magic = b"II*\0" if order == "<" else b"MM\0*"
    value = struct.pack(order + ("H2x" if kind == 3 else "I"), orientation)
    return magic + struct.pack(order + "IHHHI", 8, 1, 0x0112, kind, 1) + value + bytes(4)


def cause(data: bytes, **limits: int) -> str:
    with pytest.raises(UnusableSampleError) as caught:
        image_size(data, **limits)
    assert caught.value.what
    assert caught.value.fix
    return caught.value.slug


def test_orientation_behind_the_pixels_of_a_png_counts():
    assert image_size(png(40, 30, after=chunk(b"eXIf", exif(6)))) == Size(40, 30)
    assert image_size(png(40, 30, chunk(b"eXIf", exif(6)))) == Size(40, 30)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("kind", [3, 4])
def test_orientation_in_every_spelling(order, kind):
    assert [exif_orientation(exif(value, order, kind)) for value in range(1, 9)] == list(range(1, 9))
    assert exif_orientation(b"Exif\0\0" + exif(8, order, kind)) == 8


@pytest.mark.parametrize("block", [b"", b"II", exif(99), exif(0), exif(6)[:12], exif(6)[:19], b"junk" * 9])
def test_nonsense_in_exif_is_ignored(block):
    assert exif_orientation(block) == 1
    assert image_size(png(40, 30, chunk(b"eXIf", block))) == Size(30, 40)


def test_xmp_orientation_does_not_count():
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert image_size(saved(Image.new("RGB", (40, 30)), format="WEBP", xmp=xmp)) == Size(30, 40)


def test_pillow_warnings_stay_inside():
    warned = png(9_500, 10_000, body=b"x")  # above Pillow's warning limit, below ours
    broken = saved(Image.new("RGB", (40, 30)), format="TIFF")
    broken = broken.replace(struct.pack("<HHI", 258, 3, 3), struct.pack("<HHI", 258, 3, 60_000))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert image_size(warned) == Size(10_000, 9_500)
        cause(broken)
    assert not seen


def test_png_check_finds_every_flipped_bit():
    data = png(6, 5, chunk(b"tEXt", b"Title\0x"))
    check_png(data + b"rubbish behind the end is harmless")
    for bit in range(8 * len(SIGNATURE), 8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UnusableSampleError) as caught:
            check_png(bytes(damaged))
        assert caught.value.slug in ("truncated", "decoder-error")


def images(folder, files):
    names = Strings.of(files)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    count, unknown = len(files), np.zeros((len(files), 16), np.uint8)
    return SampleTable(
        names=names,
        files=Files(names=names, stat=np.zeros((count, 6), np.uint64), content=unknown),
        inputs={"image": Input(content=unknown, file=np.arange(count, dtype=np.int32))},
    )


def test_sizes_of_many_files_and_their_failures(tmp_path):
    samples = images(tmp_path, {"a.png": png(3, 2), "b.png": b"<html>", "c.png": png(5, 4), "d.png": png(60, 50)})
    columns, _, rejected = fill_sizes(tmp_path, samples, np.array([1, 2, 3]), max_pixels=100)
    assert columns["original_size"].tolist() == [[0, 0], [4, 5], [0, 0]]
    assert [(row, item.name, item.reason) for row, item in rejected] == [
        (1, "b.png", "html"),
        (3, "d.png", "too-many-pixels"),
    ]
    assert rejected[0][1].hint


def tiff(*samples: int, bits: int, kind: int) -> bytes:
    """Create a TIFF of one pixel with samples of a format that Pillow does not open."""
    number, width = len(samples), bits // 8
    shorts = struct.pack(f"<{2 * number}H", *[bits] * number, *[kind] * number)
    end = 8 + 2 + 12 * 10 + 4
    tags = [(256, 1, 1), (257, 1, 1), (258, number, end), (259, 1, 1), (262, 1, 2), (273, 1, end + len(shorts)),
            (277, 1, number), (278, 1, 1), (279, 1, number * width), (339, number, end + 2 * number)]  # fmt: skip
    packed = b"".join(struct.pack("<HHII", tag, 3, count, value) for tag, count, value in tags)
    body = b"".join(sample.to_bytes(width, "little") for sample in samples)
    return b"II*\0" + struct.pack("<IH", 8, 10) + packed + bytes(4) + shorts + body


@pytest.mark.parametrize(("bits", "kind", "words"), [(32, 3, "32 bits, floats"), (32, 1, "32 bits, integers")])
def test_a_deep_tiff_is_named_for_what_it_is(bits, kind, words):
    with pytest.raises(UnusableSampleError, match=f"3 x {words} per pixel") as caught:
        image_size(tiff(1, 2, 3, bits=bits, kind=kind))
    assert caught.value.slug == "float"
    assert cause(tiff(1, 2, 3, bits=bits, kind=kind)[:60]) == "truncated"


def test_what_pixels_lose_is_noted_once_for_each_kind(tmp_path):
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    files = {"a.gif": saved(frames[0], format="GIF", save_all=True, append_images=frames[1:]),
             "b.jpg": saved(Image.new("CMYK", (8, 8)), format="JPEG"),
             "c.png": saved(Image.new("RGBA", (8, 8)), format="PNG"),
             "d.png": saved(frames[0], format="PNG"),
             "e.jpg": saved(frames[0], format="MPO", save_all=True, append_images=frames[1:])}  # fmt: skip
    columns, *_ = fill_sizes(tmp_path, images(tmp_path, files), np.arange(5))
    assert columns["altered"].tolist() == [1, 2, 4, 0, 0]
    pages = [Image.new("RGB", (8, 8)) for _ in range(2)]
    damaged = saved(pages[0], format="TIFF", save_all=True, append_images=pages[1:])[:400]
    columns, _, rejected = fill_sizes(tmp_path, images(tmp_path, {"f.tif": damaged}), np.arange(1))
    assert (columns["altered"].tolist(), rejected) == ([1], []), "its second page is cut off"
    plain, *_ = fill_sizes(tmp_path, images(tmp_path, {"d.png": files["d.png"]}), np.arange(1))
    assert set(plain) == {"original_size"}


def test_a_file_that_is_gone_is_rejected(tmp_path):
    samples = images(tmp_path, {"a.png": png(3, 2)})
    (tmp_path / "a.png").unlink()
    columns, _, [(row, item)] = fill_sizes(tmp_path, samples, np.array([0]))
    assert (row, item.reason, columns["original_size"].tolist()) == (0, "not-found", [[0, 0]])
