"""Thirteen images for three buckets: five, four and four."""

from small_cache import draw

SHAPES = [(96, 64), (64, 96), (80, 80)]


def draw_thirteen(folder):
    """Thirteen images of three shapes with captions."""
    for number in range(13):
        draw(folder / f"{number:02}.png", SHAPES[number % 3], seed=number)
        (folder / f"{number:02}.txt").write_text(f"image {number}")
    return folder


def order(loader, epochs):
    batches = []
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        batches += [batch["names"] for batch in loader]
    return batches
