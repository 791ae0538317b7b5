"""Sizes by ai-toolkit's own code: python sizes_ai_toolkit.py CHECKOUT COUNT. Prints vectors for ``compare``."""

import importlib.util
import json
import random
import sys
from pathlib import Path

spec = importlib.util.spec_from_file_location("buckets", Path(sys.argv[1], "toolkit/buckets.py"))
buckets = importlib.util.module_from_spec(spec)
spec.loader.exec_module(buckets)


def vectors(draw):
    side, step = draw.choice([256, 512, 768, 1000, 1024, 1536]), draw.choice([8, 16, 32, 64])
    images = [(draw.randint(16, 4096), draw.randint(16, 4096)) for _ in range(48)]
    for width, height in [*images, (1500, 1000), (1000, 1500), (side, side)]:
        bucket = buckets.get_bucket_for_image_size(width, height, resolution=side, divisibility=step)
        sides = {"resolution": [side, side], "step": step}
        yield [sides, True, [height, width], [bucket["height"], bucket["width"]]]


draw = random.Random(0)
sys.stdout.write(json.dumps([vector for _ in range(int(sys.argv[2])) for vector in vectors(draw)]))
