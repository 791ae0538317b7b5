"""Draw one part of many large JPEGs; ``bench_gpu`` runs it once per core. Imports no torch, for a quick start.

python tools/gpu_images.py FOLDER COUNT SIDE SHARES SHARE
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from make_images import draw, invent

ASPECTS = ((1, 1), (4, 3), (3, 4))


def main(words: list[str]) -> None:
    """Draw images SHARE, SHARE + SHARES, ...: different crops of one scene per aspect."""
    folder, (count, side, shares, share) = Path(words[0]), map(int, words[1:])
    scenes = {}
    for number in range(share, count, shares):
        which, shift = number % len(ASPECTS), number // len(ASPECTS)
        if which not in scenes:
            rng = np.random.default_rng(which)
            scenes[which] = draw(invent(ASPECTS[which], side, rng), rng)
        left, top = shift % 64, shift // 64
        image = scenes[which].crop((left, top, scenes[which].width, scenes[which].height))
        image.save(folder / f"{number:05}.jpg", quality=90)


if __name__ == "__main__":
    main(sys.argv[1:])
