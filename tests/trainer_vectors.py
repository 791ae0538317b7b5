"""Compare our sizes of a trainer with those that its own code printed."""

from latentcache.geometry.like.kohya import letterbox
from latentcache.geometry.like.trainers import TRAINERS
from latentcache.geometry.sizes import Size


def compare(trainer, vectors):
    """Compare vectors.

    Each has the arguments of a table and whether images may be enlarged; then (height, width) of the image, its
    bucket and, if known, the resized image; of kohya also left and top of ``get_crop_ltrb``.
    """
    for options, upscale, *sizes in vectors:
        image, expected, *resized = (Size(*map(int, size)) for size in sizes[:3])
        table = TRAINERS[trainer].table(**options | {"resolution": Size(*options["resolution"])})
        bucket = table.nearest(image) if upscale else table.within(image)
        assert bucket == expected, (options, image)
        if resized:
            assert table.resized(image, bucket, upscale=upscale) == resized[0], (options, image)
        for left_and_top in sizes[3:]:
            left, top, right, bottom = letterbox(image, bucket)
            assert [left, top] == left_and_top, (options, image)
            assert left < right
            assert top < bottom
