"""Images out of nothing, with captions that describe them: input for the demo, the tests and the benchmarks.

Five aspect ratios in turn; JPEG, PNG and WebP; every third JPEG is stored turned with an EXIF orientation, and
one PNG in four has transparency. The same arguments give the same pixels and captions on every machine (the
compressed bytes depend on the installed codecs). Cost: about 60 ms for an image of 640 x 640 pixels.

    python tools/make_images.py OUT --count 40
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

#: Width and height in units, in the order of the images.
ASPECTS: tuple[tuple[int, int], ...] = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16))
#: The file formats, likewise. Seven and five share no factor, so that every aspect comes in every format.
SUFFIXES: tuple[str, ...] = (".jpg", ".jpg", ".png", ".jpg", ".webp", ".jpg", ".png")
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (200, 52, 48),
    "orange": (230, 140, 40),
    "yellow": (236, 208, 74),
    "green": (70, 150, 86),
    "teal": (40, 140, 150),
    "blue": (52, 92, 190),
    "violet": (124, 76, 172),
    "gray": (128, 130, 136),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "ring", "star")
#: Value of EXIF tag 0x0112, and the transposition from the upright to the stored image.
ORIENTATION_TAG = 0x0112
STORED_TURNS: dict[int, Image.Transpose] = {
    3: Image.Transpose.ROTATE_180,
    6: Image.Transpose.ROTATE_90,
    8: Image.Transpose.ROTATE_270,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """The content of one image, for drawing and caption."""

    width: int
    height: int
    sky: str
    ground: str
    shapes: tuple[tuple[str, str], ...]
    """(color, shape) from back to front."""
    has_text: bool

    def caption(self) -> str:
        """Return one sentence that describes the image."""
        listed = " and ".join(f"{_article(color)} {color} {shape}" for color, shape in self.shapes)
        writing = ", with lines of small writing" if self.has_text else ""
        return f"{listed} on {_article(self.sky)} {self.sky} to {self.ground} gradient{writing}"


def make_images(folder: Path, count: int, seed: int = 0, side: int = 640) -> list[Path]:
    """Draw ``count`` images with captions into ``folder`` (made if missing); existing files are overwritten.

    Args:
        folder: Where ``image_0000.jpg`` and ``image_0000.txt`` and so on go.
        count: Number of images.
        seed: Same seed, same images.
        side: Pixels on the side of a square of the same area as each image.

    Returns:
        The image files, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return [_make_one(folder, index, np.random.default_rng((seed, index)), side) for index in range(count)]


def draw(scene: Scene, rng: np.random.Generator) -> Image.Image:
    """Draw the image of a scene, RGB."""
    image = Image.fromarray(_gradient(scene, rng))
    pen = ImageDraw.Draw(image)
    for color, shape in scene.shapes:
        _draw_shape(pen, shape, _varied(COLORS[color], rng), _placement(scene, rng))
    if scene.has_text:
        _draw_writing(pen, scene, rng)
    grain = rng.normal(0.0, 3.0, (scene.height, scene.width, 1))
    return Image.fromarray(np.clip(np.asarray(image) + grain, 0, 255).astype(np.uint8))


def invent(aspect: tuple[int, int], side: int, rng: np.random.Generator) -> Scene:
    """Create a scene of the given aspect ratio, its area within a few per cent of ``side`` squared."""
    scale = side * rng.uniform(0.96, 1.04) / (aspect[0] * aspect[1]) ** 0.5
    names = list(COLORS)
    sky, ground = (names[i] for i in rng.choice(len(names), 2, replace=False))
    shapes = tuple(
        (names[rng.integers(len(names))], SHAPES[rng.integers(len(SHAPES))]) for _ in range(rng.integers(1, 4))
    )
    return Scene(
        width=max(round(aspect[0] * scale), 16),
        height=max(round(aspect[1] * scale), 16),
        sky=sky,
        ground=ground,
        shapes=shapes,
        has_text=bool(rng.integers(2)),
    )


def _article(word: str) -> str:
    return "an" if word == "orange" else "a"


def _make_one(folder: Path, index: int, rng: np.random.Generator, side: int) -> Path:
    scene = invent(ASPECTS[index % len(ASPECTS)], side, rng)
    path = folder / f"image_{index:04d}{SUFFIXES[index % len(SUFFIXES)]}"
    _save(draw(scene, rng), path, index)
    path.with_suffix(".txt").write_text(scene.caption() + "\n", encoding="utf-8")
    return path


def _save(image: Image.Image, path: Path, index: int) -> None:
    if path.suffix == ".jpg":
        orientation = (6, 8, 3)[index // 3 % 3] if index % 3 == 0 else 1
        exif = Image.Exif()
        exif[ORIENTATION_TAG] = orientation
        stored = image.transpose(STORED_TURNS[orientation]) if orientation != 1 else image
        stored.save(path, quality=90, exif=exif)
    elif path.suffix == ".png":
        see_through = index % (2 * len(SUFFIXES)) == 2
        image = _with_transparency(image) if see_through else image
        image.save(path, compress_level=1)
    else:
        image.save(path, quality=85, method=0)


def _with_transparency(image: Image.Image) -> Image.Image:
    """Make RGBA: opaque in the middle, transparent at the corners."""
    fade = Image.radial_gradient("L").point(lambda level: max(0, min(255, 2 * (255 - level)))).resize(image.size)
    clear = image.convert("RGBA")
    clear.putalpha(fade)
    return clear


def _gradient(scene: Scene, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Draw (H, W, 3): a gradient of two colors with two slow waves."""
    y, x = np.mgrid[0 : scene.height, 0 : scene.width].astype(np.float64)
    y, x = y / scene.height, x / scene.width
    slope = np.clip(y + 0.25 * (x - 0.5) * rng.uniform(-1, 1), 0, 1)[..., None]
    top, bottom = (np.array(_varied(COLORS[name], rng), dtype=np.float64) for name in (scene.sky, scene.ground))
    phase = rng.uniform(0, 2 * np.pi, 2)
    waves = np.sin(2 * np.pi * (2 * x + y) + phase[0]) + np.sin(2 * np.pi * (x - 3 * y) + phase[1])
    blend: NDArray[np.float64] = top + (bottom - top) * slope + 9 * waves[..., None]
    return np.clip(blend, 0, 255).astype(np.uint8)


def _varied(color: tuple[int, int, int], rng: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = (int(np.clip(c + rng.integers(-18, 19), 0, 255)) for c in color)
    return red, green, blue


def _placement(scene: Scene, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return center x, center y and radius in pixels, inside the image."""
    radius = min(scene.width, scene.height) * rng.uniform(0.12, 0.3)
    return (
        float(rng.uniform(radius, scene.width - radius)),
        float(rng.uniform(radius, scene.height - radius)),
        float(radius),
    )


def _draw_shape(
    pen: ImageDraw.ImageDraw, shape: str, color: tuple[int, int, int], place: tuple[float, float, float]
) -> None:
    x, y, radius = place
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        pen.ellipse(box, fill=color)
    elif shape == "ring":
        pen.ellipse(box, outline=color, width=max(int(radius / 4), 2))
    else:
        points, depth = {"square": (4, 1.0), "triangle": (3, 1.0), "star": (10, 0.45)}[shape]
        pen.polygon(_corners(x, y, radius, points, depth), fill=color)


def _corners(x: float, y: float, radius: float, points: int, depth: float) -> list[tuple[float, float]]:
    """Return corners on a circle; every second one at ``depth`` of the radius."""
    turn = np.pi / 4 if points == 4 else -np.pi / 2
    angles = turn + 2 * np.pi * np.arange(points) / points
    reach = radius * np.where(np.arange(points) % 2, depth, 1.0)
    corners = zip(reach * np.cos(angles), reach * np.sin(angles), strict=True)
    return [(x + float(across), y + float(down)) for across, down in corners]


def _draw_writing(pen: ImageDraw.ImageDraw, scene: Scene, rng: np.random.Generator) -> None:
    """Draw short dark strokes in rows, like small print."""
    line = max(scene.height // 48, 4)
    top = int(rng.uniform(0.55, 0.75) * scene.height)
    for row in range(int(rng.integers(3, 6))):
        x, y = scene.width // 12, top + 2 * row * line
        while x < scene.width * 11 // 12:
            word = int(rng.integers(line, 5 * line))
            for stroke in range(x, x + word, max(line // 2, 2)):
                height = int(rng.integers(line // 2, line + 1))
                pen.line((stroke, y + line - height, stroke, y + line), fill=(28, 28, 34), width=max(line // 5, 1))
            x += word + line


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw images with captions, the same ones every time.")
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--count", type=int, default=40, help="number of images (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same images (default: 0)")
    parser.add_argument("--side", type=int, default=640, help="side of a square of equal area (default: 640)")
    options = parser.parse_args()
    paths = make_images(options.folder, options.count, options.seed, options.side)
    print(f"{len(paths)} images with captions in {options.folder}")


if __name__ == "__main__":
    main()
