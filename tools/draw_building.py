"""Draw images per second of GPU builds, from the table of ``bench_gpu`` in ``docs/reference/performance.md``.

python tools/draw_building.py docs/building.svg
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from draw_reading import BAR, ROW, STYLE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "performance.md"
LEFT, RIGHT, TOP = 392, 664, 34
_ROW = re.compile(r"^\| (\d+ MP) \| ([^|]*) \| ([\d.]+) \|", re.M)


class Rate(NamedTuple):
    """One row of the table."""

    size: str
    system: str
    images: float


def rates() -> list[Rate]:
    """Return the rows of the table."""
    text = PAGE.read_text("utf-8")
    return [Rate(size, system.replace("`", ""), float(images)) for size, system, images in _ROW.findall(text)]


def drawing(rows: Sequence[Rate]) -> str:
    """Return the SVG: a bar for each system, sources of 2 megapixels above sources of 12."""
    scale = (RIGHT - LEFT) / max(row.images for row in rows)
    body, top = [], 8
    for size in dict.fromkeys(row.size for row in rows):
        body.append(f'<text class="head" x="12" y="{top + 18}">source images of {size}</text>')
        for number, row in enumerate(row for row in rows if row.size == size):
            y = top + TOP + ROW * number
            kind = "ours" if row.system == "latentcache" else "others"
            body += [
                f'<text class="name" x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row.system)}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{row.images * scale:.0f}" height="{BAR}"/>',
                f'<text class="number" x="{LEFT + row.images * scale + 6:.0f}" y="{y + 13}">{row.images}</text>',
            ]
        top += TOP + ROW * sum(row.size == size for row in rows) + 16
    about = "Images per second with an SDXL autoencoder at 1024 x 1024 pixels on one H200; more is faster"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {top}" role="img" aria-labelledby="title"'
            ' font-family="ui-sans-serif, system-ui, sans-serif">',
            f'  <title id="title">{about}</title>',
            f"  <style>{STYLE}  </style>",
            *(f"  {line}" for line in body),
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw images per second of builds on a GPU.")
    parser.add_argument("out", type=Path, help="SVG to write")
    parser.parse_args().out.write_text(drawing(rates()), "utf-8")


if __name__ == "__main__":
    main()
