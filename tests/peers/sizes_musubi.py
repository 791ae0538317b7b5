"""Sizes by musubi-tuner's own code: python sizes_musubi.py CHECKOUT COUNT. Prints vectors for ``compare``."""

import json
import random
import sys

import numpy as np

sys.path.insert(0, sys.argv[1])
import cv2
from musubi_tuner.dataset import media_utils
from musubi_tuner.dataset.bucket import BucketSelector


def vectors(draw):
    resolution = [draw.randint(8, 96) * 16 for _ in range(2)]
    has_buckets, no_upscale = draw.random() < 0.9, draw.random() < 0.3
    selector = BucketSelector(tuple(resolution), has_buckets, no_upscale and has_buckets, "qi")
    images = [(draw.randint(16, 2048), draw.randint(16, 2048)) for _ in range(48)]
    for width, height in [*images, (1500, 1000), (1000, 1500), tuple(resolution)]:
        bucket = selector.get_bucket_resolution((width, height))
        sizes = {"resolution": resolution[::-1], "buckets": has_buckets}
        yield [sizes, not no_upscale, [height, width], bucket[::-1], resized(width, height, bucket)]


def resized(width, height, bucket):
    """Height and width before the crop, as its resize is asked for them."""
    asked = [(width, height)]  # of an image that is not resized

    def remember(image, size, **_):
        asked.append(size)
        return np.zeros((size[1], size[0]), np.uint8)

    class Image(np.ndarray):
        def resize(self, size, _):
            return remember(self, size)

    cv2.resize, media_utils.Image.fromarray = remember, lambda image: image.view(Image)
    media_utils.resize_image_to_bucket(np.zeros((height, width), np.uint8), bucket)
    return asked[-1][::-1]


draw = random.Random(0)
sys.stdout.write(json.dumps([vector for _ in range(int(sys.argv[2])) for vector in vectors(draw)]))
