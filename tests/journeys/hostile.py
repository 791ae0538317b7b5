"""Create a folder of hostile files with the expected cause of each; valid files have none.

The files take about 1 MB; bombs are a header and a stream of zeros. As a program it decodes a folder under limits
of memory and processor time, and prints the cause of each file as JSON.
"""

import io
import json
import os
import resource
import signal
import socket
import struct
import sys
import zlib
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, PngImagePlugin

SEED = 7
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP", "avif": "AVIF", "bmp": "BMP", "gif": "GIF", "tif": "TIFF"}
MAGIC = {
    "jpg": b"\xff\xd8",
    "png": b"\x89PNG\r\n\x1a\n",
    "webp": b"RIFF\x10\0\0\0WEBP",
    "gif": b"GIF89a",
    "bmp": b"BM",
}
MAGIC |= {"tif": b"II*\0", "avif": b"\x00\x00\x00\x18ftypavif\x00\x00\x00\x00avifmif1"}
#: Where a file is cut; a name ends in the number of its cut.
CUTS = (lambda n: n - 2, lambda n: n - n // 10, lambda n: n // 2, lambda n: n // 8, lambda n: 20)
#: Cuts that leave a whole image: the last bytes of these formats hold no pixels.
HARMLESS_CUTS = {"cut0.gif"}


def pixels(height=64, width=80, channels=3, seed=SEED, dtype=np.uint8):
    top = np.iinfo(dtype).max
    shape = (height, width, channels)[: 2 + (channels > 1)]
    return np.random.default_rng(seed).integers(0, top, shape, dtype=dtype)


def saved(form, image=None, **options):
    buffer = io.BytesIO()
    (image or Image.fromarray(pixels())).save(buffer, format=form, **options)
    return buffer.getvalue()


def png_chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(height, width, *chunks, depth=8, color=2, idat=b""):
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0))
    body = b"".join(png_chunk(*chunk) for chunk in chunks) + png_chunk(b"IDAT", idat or zlib.compress(b""))
    return b"\x89PNG\r\n\x1a\n" + head + body + png_chunk(b"IEND", b"")


def flat_png(height, width):
    """A complete single-color PNG of any size in a few kilobytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + 3 * width)
    return png(height, width, idat=b"".join(packer.compress(row) for _ in range(height)) + packer.flush())


def bmp(height, width):
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)


def gif(height, width):
    head, frame = struct.pack("<HHBBB", width, height, 0x80, 0, 0), struct.pack("<HH", width, height)
    return b"GIF89a" + head + bytes(6) + b",\0\0\0\0" + frame + b"\0\x02\0;"


def not_pictures():
    heic = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00heicmif1"
    return {
        "empty.jpg": (b"", "empty"),
        "zeros.jpg": (bytes(5000), "zeros"),
        "page.jpg": (b"<!DOCTYPE html><html><title>403</title></html>", "html"),
        "page-bom.png": (b"\xef\xbb\xbf\n <HTML><body>", "html"),
        "pointer.jpg": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "git-lfs"),
        "page-of-xml.jpg": (b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "x"><html xmlns="x"><svg>', "html"),
        "denied.jpg": (b"<Error><Code>AccessDenied</Code></Error>", "unknown"),
        "vector.svg": (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "svg"),
        "commented.svg": (b'<?xml version="1.0"?>\n<!-- made by hand -->\n<svg>', "svg"),
        "phone.heic": (heic, "heic-needs-plugin"),
        "phone.jpg": (heic, "heic-needs-plugin"),
        "bare.jxl": (b"\xff\x0a" + bytes(20), "jxl-needs-plugin"),
        "boxed.jxl": (b"\0\0\0\x0cJXL \r\n\x87\n", "jxl-needs-plugin"),
        "cut-mif1.avif": (b"\0\0\0\x1cftypmif1\0\0\0\0mif1avifmiaf", "truncated"),
        "sound.webp": (b"RIFF\0\0\0\0WAVEfmt ", "unknown"),
        "print.jpg": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 64 64\nquit\n", "eps"),
        "paper.jpg": (b"%PDF-1.7\n", "pdf"),
        "text.png": (b"hello", "unknown"),
        "json.jpg": (b'{"error": "not found"}', "unknown"),
        "pickle.png": (b"\x80\x04\x95" + bytes(60), "unknown"),
        "gguf.png": (b"GGUF" + bytes(60), "unknown"),
        "movie.jpg": (b"\x00\x00\x00\x18ftypmp42\x00\x00\x00\x00mp42isom", "decoder-error"),
        "jp2.jpg": (saved("JPEG2000"), "unknown"),
        "noise.jpg": (np.random.default_rng(SEED).bytes(4000), "unknown"),
        **{f"only-magic.{ending}": (data, "truncated") for ending, data in MAGIC.items()},
    }


def cut_short():
    for ending, form in FORMATS.items():
        data = saved(form)
        for number, cut in enumerate(CUTS):
            name = f"cut{number}.{ending}"
            yield name, (data[: cut(len(data))], None if name in HARMLESS_CUTS else "truncated")


def damaged():
    """Complete files with damage that a decoder can detect."""
    good = saved("PNG")
    start = good.index(b"IDAT") + 40
    flipped, zeroed = bytearray(good), bytearray(good)
    flipped[start] ^= 0x10
    zeroed[start : start + 2000] = bytes(2000)
    text = zlib.compress(bytes(70_000_000), 9)
    return {
        "flipped.png": (bytes(flipped), "decoder-error"),
        "zeroed.png": (bytes(zeroed), "decoder-error"),
        "chunk-of-4-gib.png": (good[:33] + struct.pack(">I", 0xFFFF_FFF0) + good[37:], "truncated"),
        "no-pixels.png": (png(64, 64), "truncated"),
        "text-bomb.png": (png(64, 64, (b"zTXt", b"k\0\0" + text)), "png-metadata-too-large"),
        "itxt-bomb.png": (png(64, 64, (b"iTXt", b"k\0\x01\0\0\0" + text)), "png-metadata-too-large"),
        "large-profile.png": (saved("PNG", icc_profile=bytes(5 << 20)), "png-metadata-too-large"),
        "profile-bomb.png": (png(64, 64, (b"iCCP", b"k\0\0" + text)), "png-metadata-too-large"),
    }


def unusable_images():
    """Images, or headers of images, that a build rejects."""
    gray = pixels(channels=1)
    floats, wide = Image.fromarray(gray.astype(np.float32) / 255), Image.fromarray(gray.astype(np.int32) * 10_000_000)
    small = {"1x1.png": ("RGB", 1, 1), "2x2.jpg": ("RGB", 2, 2), "15x64.png": ("RGB", 15, 64)}
    long = {"1x65500.jpg": ("L", 65500, 1), "65500x1.jpg": ("L", 1, 65500)}
    long |= {"16x4000.png": ("RGB", 4000, 16), "4000x16.png": ("RGB", 16, 4000)}
    shapes = [(name, form, "too-small") for name, form in small.items()]
    shapes += [(name, form, "extreme-aspect") for name, form in long.items()]
    return {
        "float.tif": (saved("TIFF", floats), "float"),
        "wide.tif": (saved("TIFF", wide), "float"),
        **{name: (saved(FORMATS[name[-3:]], Image.new(mode, size)), why) for name, (mode, *size), why in shapes},
        "101-mpx.png": (png(10_100, 10_000), "too-many-pixels"),
        "178-mpx.png": (png(13_300, 13_400), "too-many-pixels"),
        "178-mpx.bmp": (bmp(13_300, 13_400), "too-many-pixels"),
        "400-mpx.png": (png(20_000, 20_000), "bomb"),
        "2-gpx.png": (png(50_000, 50_000), "bomb"),
        "2-gpx.bmp": (bmp(50_000, 50_000), "bomb"),
        "4-gpx.gif": (gif(65_535, 65_535), "bomb"),
    }


def odd():
    rgb = Image.fromarray(pixels())
    exif, junk = Image.Exif(), b"Exif\0\0II*\0" + b"\xff" * 40
    exif[0x0112] = 99
    clear = rgb.copy()
    clear.putalpha(128)
    frames = [Image.fromarray(pixels(seed=seed)) for seed in (1, 2, 3)]
    more = {"save_all": True, "append_images": frames[1:]}
    palette = rgb.quantize(16)
    late = PngImagePlugin.PngInfo()
    late.add_text("parameters", "a cat" * 1000)
    return {
        "really-a-png.jpg": saved("PNG"),
        "really-a-webp.png": saved("WEBP"),
        "really-a-gif.jpeg": saved("GIF"),
        "UPPER.JPG": saved("JPEG"),
        "grey16.png": saved("PNG", Image.fromarray(pixels(channels=1, dtype=np.uint16))),
        "grey16.tif": saved("TIFF", Image.fromarray(pixels(channels=1, dtype=np.uint16))),
        "rgb16.png": png(64, 80, depth=16, idat=zlib.compress(bytes(64 * (1 + 80 * 6)))),
        "bilevel.png": saved("PNG", rgb.convert("1")),
        "rgba.png": saved("PNG", clear),
        "la.png": saved("PNG", clear.convert("LA")),
        "palette.png": saved("PNG", palette, transparency=bytes(range(16))),
        "cmyk.jpg": saved("JPEG", rgb.convert("CMYK")),
        "grey.jpg": saved("JPEG", rgb.convert("L")),
        "progressive.jpg": saved("JPEG", progressive=True),
        **{f"animated.{ending}": saved(FORMATS[ending], frames[0], **more) for ending in ("gif", "webp", "png")},
        "pages.tif": saved("TIFF", frames[0], **more),
        "pages.mpo.jpg": saved("MPO", frames[0], **more),
        "junk-profile.jpg": saved("JPEG", icc_profile=b"junk" * 100),
        "junk-exif.jpg": saved("JPEG", exif=junk),
        "turned-99.jpg": saved("JPEG", exif=exif),
        "text.of.a.generator.png": saved("PNG", pnginfo=late),
        "tail.jpg": saved("JPEG") + b"<?php evil ?>" * 10,
        "tail.png": saved("PNG") + bytes(1000),
        "half.png": flat_png(3000, 3000),
        **{f"{name}.png": saved("PNG", frames[0]) for name in ("new\nline", "bell\x07", "\udcff\udcfe")},
        **{f"{name}.png": saved("PNG", frames[1]) for name in ("-rf", "e\u0301")},
        **{f"{name}.png": saved("PNG", frames[2]) for name in ("\u00e9", "x" * 251)},
        **{f"{name}.png": saved("PNG") for name in ("same", "sub/same")},
    }


def captions():
    """Captions that no tokenizer accepts, and valid ones that look similar."""
    return {
        "cp1252": (b"caf\xe9", "caption-encoding"),
        "nul": (b"a\0cat", "caption-unicode"),
        "half-pair": (b"a \xed\xa0\x80 cat", "caption-encoding"),
        "endless": (b"a" * ((1 << 20) + 1), "caption-too-large"),
        "utf16": ("a cat".encode("utf-16"), None),
        "bom": (b"\xef\xbb\xbfa cat", None),
        "none": (b"", None),
        "lines": (b"a\r\ncat\n", None),
    }


@cache
def contents():
    """Map the name of every regular file to (bytes, cause)."""
    files = {**not_pictures(), **dict(cut_short()), **damaged(), **unusable_images()}
    files |= {name: (data, None) for name, data in odd().items()}
    return files | {f"caption-{name}.png": (saved("PNG"), cause) for name, (_, cause) in captions().items()}


def make(folder):
    """Create the folder; return name -> cause, None for valid files."""
    files = contents()
    (folder / "sub").mkdir(parents=True)
    for name, (data, _) in files.items():
        (folder / name).write_bytes(data)
    for name, (text, _) in captions().items():
        (folder / f"caption-{name}.txt").write_bytes(text)
    return {name: cause for name, (_, cause) in files.items()} | _special(folder)


def _special(folder):
    """Create special files and a folder named like an image."""
    os.mkfifo(folder / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "socket.jpg"))
    (folder / "device.jpg").symlink_to("/dev/zero")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    (folder / "broken.jpg").symlink_to("nowhere.jpg")
    (folder / "outside.jpg").symlink_to("/etc/hostname")
    (folder / "round").symlink_to(".")
    (folder / "folder.jpg").mkdir()
    causes = {"broken.jpg": "not-found"} | dict.fromkeys(("pipe.jpg", "socket.jpg"), "not-regular")
    causes |= dict.fromkeys(("device.jpg", "outside.jpg"), "outside-root")
    return causes | dict.fromkeys(("loop.jpg", "round"), "symlink-loop")


#: Processor seconds and bytes of address space that one file may cost.
SECONDS, ROOM = 2, 700 << 20


def read_all(folder):
    """Decode every regular file: path -> cause or None. Exit if a file costs too much."""
    from latentcache.errors import UnusableSampleError
    from latentcache.fields.latents import GeometrySettings, PixelProfile
    from latentcache.geometry.sizes import unusable
    from latentcache.images.decode import decode, encoded_file
    from latentcache.sources.formats.files import read_source

    (table,), profile = GeometrySettings(resolutions=(64,), multiple=8).tables(), PixelProfile(resample="lanczos-pil")
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, now + ROOM))
    causes = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or path.is_dir() or path.suffix == ".txt":
            continue
        sys.stderr.write(f"{name!a}\n")
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # SIGVTALRM ends the process
        try:
            data, _ = read_source(path)
            size = encoded_file(data).size
            causes[name] = unusable(size, table.nearest(size)) or None
            if causes[name] is None:
                decode(data, profile)
        except UnusableSampleError as error:
            causes[name] = error.slug
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    return {"causes": causes, "peak_bytes": _peak_bytes()}


def _peak_bytes():
    """Peak memory of this program; ``ru_maxrss`` would include that of its parent."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read_all(Path(sys.argv[1]))))
