"""Draw the losses of ``bench_plan --json`` at one batch size: a panel for each set of images.

python tools/draw_plan.py plan.json docs/batches.svg [--batch 8]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

SETS = ("329 images", "LoRA, 54 images")
"""Sets that are drawn."""
PARTS = {"dropped": "dropped", "repeated_above": "repeated", "unfilled": "unfilled"}
"""Key of a row -> words of the legend, and the class of its bars."""
LEFT, RIGHT, ROW, BAR, TOP = 210, 560, 26, 16, 34
MOST = 0.6
"""Part of the images at the right end; longer bars end there."""
STYLE = """
    .name { font-size: 13px; fill: #1f2328; } .number { font-size: 12px; fill: #57606a; }
    .head { font-size: 15px; font-weight: 600; fill: #1f2328; }
    .dropped { fill: #cf222e; } .repeated { fill: #bf8700; } .unfilled { fill: #afb8c1; }
    @media (prefers-color-scheme: dark) {
      .name, .head { fill: #e6edf3; } .number { fill: #a5afba; }
      .dropped { fill: #f85149; } .repeated { fill: #d29922; } .unfilled { fill: #57606a; }
    }
"""


def panel(title: str, rows: Sequence[Mapping[str, Any]], top: int) -> list[str]:
    """Draw one set: a bar per table of buckets."""
    scale = (RIGHT - LEFT) / MOST
    lines = [f'<text class="head" x="12" y="{top + 18}">{escape(title)}</text>']
    for number, row in enumerate(rows):
        y, x, lost = top + TOP + ROW * number, float(LEFT), 0.0
        lines.append(f'<text class="name" x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(row["name"])}</text>')
        for key, kind in PARTS.items():
            part = row[key] / row["images"]
            width = min(part * scale, RIGHT - x)
            if width > 0:
                lines.append(f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{width:.0f}" height="{BAR}"/>')
            x, lost = x + width, lost + part
        words = f"{lost:.0%}, mean crop {row['cropped']:.1%}"
        lines.append(f'<text class="number" x="{x + 6:.0f}" y="{y + 13}">{words}</text>')
    return lines


def drawing(found: Mapping[str, Any], batch: str) -> str:
    """SVG of the sets at one batch size."""
    body, top, x = list[str](), 40, 12
    for words in PARTS.values():
        body.append(f'<rect class="{words}" x="{x}" y="12" width="12" height="12"/>')
        body.append(f'<text class="number" x="{x + 18}" y="22">{words}</text>')
        x += 110
    for title in SETS:
        rows = found["sets"][title][batch]
        body += panel(title, rows, top)
        top += TOP + ROW * len(rows) + 22
    about = f"Images dropped, repeated above the minimum, and places unfilled at batch size {batch}; less is better"
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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draw the losses that bench_plan wrote.")
    parser.add_argument("plan", type=Path, help="file of bench_plan --json")
    parser.add_argument("out", type=Path, help="SVG to write")
    parser.add_argument("--batch", default="8", help="batch size")
    options = parser.parse_args(words)
    options.out.write_text(drawing(json.loads(options.plan.read_text("utf-8")), options.batch), "utf-8")


if __name__ == "__main__":
    main()
