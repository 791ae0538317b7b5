"""Bytes in the table of disk sizes follow from its other columns, and lengths from the table of pipelines."""

import math
import re

import pytest
from page_blocks import DOCS

from latentcache.encoders.prompt.pipelines import PIPELINES

TABLE = (DOCS / "reference" / "performance.md").read_text("utf-8").partition("## Disk\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if re.match(r"\| .*channels", line)
]
PIPELINE = {
    "Stable Diffusion 1": "StableDiffusionPipeline",
    "SDXL": "StableDiffusionXLPipeline",
    "Stable Diffusion 3": "StableDiffusion3Pipeline",
    "Flux.1": "FluxPipeline",
    "Flux.2 klein 4B": "Flux2KleinPipeline",
    "Qwen-Image": "QwenImagePipeline",
    "Z-Image": "ZImagePipeline",
    "Lumina 2": "Lumina2Pipeline",
    "Sana": "SanaPipeline",
    "PixArt-Sigma": "PixArtSigmaPipeline",
    "Wan 2.1, 81 frames": "WanPipeline",
}


def number(text):
    return int(text.replace(",", ""))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_bytes_follow_from_shapes(row):
    family, size, latents, image_bytes, width, tokens, caption_bytes = row
    channels, factor = map(int, re.match(r"(\d+) channels, f(\d+)", latents).groups())
    frames = int((re.findall(r"(\d+) frames", latents) or [1])[0])
    cells = math.prod(int(side) // factor for side in size.split("x"))
    assert number(image_bytes) == channels * frames * cells * 2
    assert number(caption_bytes) == int(width) * int(tokens.split()[0]) * 2
    embeds = PIPELINES[PIPELINE[family]]["prompt_embeds"]
    assert (tokens == str(embeds.length)) == (not embeds.trim)


def test_every_pipeline_but_ltx_has_a_row():
    assert {PIPELINE[row[0]] for row in ROWS} == set(PIPELINES) - {"LTXPipeline"}
