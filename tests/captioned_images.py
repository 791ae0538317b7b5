"""Folders of captioned images in several buckets, for exports to trainers."""

from small_cache import build, draw

#: Width and height of each image; three buckets at 256 pixels.
FOUR = [(400, 240), (240, 400), (300, 300), (410, 240)]
TEN = [*FOUR, (500, 300), (260, 250), (240, 410), (301, 299), (400, 250), (999, 600)]


def draw_captioned(folder, sizes=FOUR, *, captions=10):
    """Draw images of noise with captions, of which ``captions`` differ."""
    for number, size in enumerate(sizes):
        draw(folder / f"p{number}.png", size, seed=number)
        (folder / f"p{number}.txt").write_text(f"caption {number % captions}, tag", "utf-8")
    return folder


def draw_sets(folder):
    """Draw ten images in two folders of kohya, one of them with repeats."""
    draw_captioned(folder / "2_cats", TEN)
    dogs = folder / "1_dogs"
    dogs.mkdir()
    for number in range(6, len(TEN)):
        for end in ("png", "txt"):
            (folder / f"2_cats/p{number}.{end}").rename(dogs / f"p{number}.{end}")
    return folder


def data_and_cache(folder, **options):
    """Build the cache of four images; return its data, itself, and a path for an export."""
    data = draw_captioned(folder / "cats")
    build(data, folder / "cache", **options)
    return data, folder / "cache", folder / "out"


def files_below(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
