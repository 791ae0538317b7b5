"""Small pictures, encoders that misbehave on purpose, and builds of the one by the other."""

import struct
import threading
import zlib
from dataclasses import replace
from io import BytesIO

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from latentcache.encoders.protocol import EncodedBatch
from latentcache.encoders.stub import StubEncoder
from latentcache.errors import DeviceMemoryError
from latentcache.geometry.placement import place_in
from latentcache.geometry.sizes import Size
from latentcache.identity.content import content_hash
from latentcache.identity.key import EntryKey
from latentcache.pipeline.recipes import resolve_recipe
from latentcache.pipeline.resize import pixel_hash
from latentcache.pipeline.settings import BuildSettings, RecipeSettings
from latentcache.pipeline.work import Piece
from latentcache.store.generation import load_generation

RECIPE = RecipeSettings(model="stub", resolutions=(64,), bucket_step=32)


def pixels(seed, height=64, width=64):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def draw(path, seed, *, height=64, width=64, **options):
    """One picture of noise, in the format of the path's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(seed, height, width)).save(path, **options)
    return path


def folder_of(path, count, **size):
    for number in range(count):
        draw(path / f"{number:03}.png", number, **size)
    return path


def png_with_text(data, text):
    """The same pixels with another comment, so another file."""
    info, buffer = PngInfo(), BytesIO()
    info.add_text("comment", text)
    with Image.open(BytesIO(data)) as picture:
        picture.save(buffer, format="PNG", pnginfo=info)
    return buffer.getvalue()


def jpeg_with_comment(data, text):
    """The same JPEG with a COM segment behind its first two bytes: not one sample is coded again."""
    body = text.encode("ascii")
    return data[:2] + b"\xff\xfe" + struct.pack(">H", len(body) + 2) + body + data[2:]


def bomb_header(height, width):
    """A PNG that claims a size and has no pixels."""

    def chunk(name, body):
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


class FakeEncoder(StubEncoder):
    """The stub, with a record of its calls and three ways to fail."""

    def __init__(self, *, most=None, broken=(), mends=False, change=None, precise_memory=True):
        super().__init__()
        self.most, self.mends, self.change, self.precise_memory = most, mends, change, precise_memory
        self.broken = {content_hash(np.ascontiguousarray(item)) for item in broken}
        self.calls = []
        self.closed = False

    @property
    def num_pictures(self):
        return sum(size for size, _ in self.calls)

    def encode(self, pixels, *, precise=False):
        self.calls.append((len(pixels), precise))
        if self.most is not None and len(pixels) > self.most:
            raise DeviceMemoryError("out of memory", why=f"{len(pixels)} pictures are too many")
        if precise and not self.precise_memory:
            raise DeviceMemoryError("out of memory", why="float32 is too much")
        encoded = super().encode(pixels, precise=precise)
        for number, picture in enumerate(pixels):
            if content_hash(np.ascontiguousarray(picture)) in self.broken and not (precise and self.mends):
                encoded.latents[number, 0, 0, 0] = np.nan
                encoded.finite[number] = False
        return encoded if self.change is None else self.change(encoded)

    def close(self):
        self.closed = True


class LatePending:
    """Of a batch that the device has done when it is waited for."""

    def __init__(self, encoder, work):
        self.encoder, self.work, self.finished = encoder, work, False

    def done(self):
        return self.finished

    def result(self):
        self.encoder.in_flight -= 1
        return self.work()


class LateEncoder(FakeEncoder):
    """A device: it runs out of memory at once, and says everything else later."""

    def __init__(self, **options):
        super().__init__(**options)
        self.in_flight, self.peak = 0, 0

    def submit(self, pictures, *, precise=False):
        pixels = np.stack(pictures)
        if self.most is not None and len(pixels) > self.most:
            self.calls.append((len(pixels), precise))
            raise DeviceMemoryError("out of memory", why=f"{len(pixels)} pictures are too many")
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        return LatePending(self, lambda: self.encode(pixels, precise=precise))


def float32_latents(encoded):
    return EncodedBatch(latents=encoded.latents.astype(np.float32), finite=encoded.finite)


def one_row_less(encoded):
    return EncodedBatch(latents=encoded.latents[:, :, 1:], finite=encoded.finite)


class Talk:
    """An observer that remembers."""

    def __init__(self):
        self.plans, self.warnings, self.looked = [], [], []

    def planned(self, plan):
        self.plans.append(plan)

    def advanced(self, progress):
        self.looked.append(progress.looked)

    def warned(self, message):
        self.warnings.append(message)


def settings(data, **changes):
    recipe = replace(RECIPE, **changes.pop("recipe", {}))
    return BuildSettings(data=data, recipe=recipe, device="cpu", **changes)


def recipe_of(**changes):
    return resolve_recipe(replace(RECIPE, **changes), None, cached_model=None, has_cuda=False)[0]


def piece(seed, recipe, *, height=64, width=64):
    """A decoded picture that fills its bucket."""
    made, bucket = pixels(seed, height, width), Size(height, width)
    content = content_hash(made.tobytes())
    return Piece(
        name=f"{seed}.png",
        key=EntryKey(content=content, bucket=bucket, recipe=recipe.key_part).pack(),
        pixels=made,
        pixel_hash=pixel_hash(made),
        placement=place_in(bucket, bucket),
        original_size=bucket,
        content=content,
    )


def rows_of(cache):
    """name -> the keys of its entries."""
    generation = load_generation(cache)
    names = list(generation.samples.names)
    found = {name: [] for name in names}
    for key, sample in zip(generation.rows.key, generation.rows.sample.tolist(), strict=True):
        found[names[sample]].append(key.tobytes())
    return found


def causes(report):
    return {item.name: item.cause for item in report.refused}


def within(seconds, work):
    """The result of ``work``, or a failure when it takes longer: a hang must not stop the tests."""
    box = []

    def run():
        try:
            box.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            box.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert box, f"it still runs after {seconds} s"
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
