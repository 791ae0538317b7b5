"""Draw the times of ``bench_read --json``: the speed of each reader in multiples of a memory copy.

If a library was measured in several ways, the fastest is drawn and named.

    python tools/draw_reading.py times.json docs/reading.svg
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

LIMITS = ("memcpy", "memcpy, two buffers in turn", "one mapped file, memcpy", "shard, read unchecked")
"""Candidates that are no way to train; not drawn."""
LEFT, RIGHT, ROW, BAR, TOP = 300, 660, 26, 16, 34
STYLE = """
    .name { font-size: 13px; fill: #1f2328; } .number { font-size: 12px; fill: #57606a; }
    .head { font-size: 15px; font-weight: 600; fill: #1f2328; } .others { fill: #afb8c1; } .ours { fill: #1a7f37; }
    .line { stroke: #57606a; stroke-dasharray: 4 4; }
    @media (prefers-color-scheme: dark) {
      .name, .head { fill: #e6edf3; } .number { fill: #a5afba; } .others { fill: #57606a; } .ours { fill: #3fb950; }
    }
"""


def ratios(times: Mapping[str, list[float]]) -> dict[str, float]:
    """Return median multiples of ``memcpy``: the loader first, then the fastest way of each library."""
    found = {
        name: statistics.median(copy / own for copy, own in zip(times["memcpy"], taken, strict=True))
        for name, taken in times.items()
    }
    best: dict[str, str] = {}
    for name in sorted(found, key=lambda name: -found[name]):
        if name not in LIMITS and not name.startswith("loader"):
            best.setdefault(name.split(",")[0], name)
    return {name: found[name] for name in ("loader()", *best.values())}


def panel(kib: int, found: Mapping[str, float], top: int) -> list[str]:
    """Draw one size: a bar per candidate."""
    scale = (RIGHT - LEFT) / max(1.0, *found.values())
    copy = LEFT + scale
    lines = [f'<text class="head" x="12" y="{top + 18}">{kib} KiB a sample</text>']
    for number, (name, ratio) in enumerate(found.items()):
        y = top + TOP + ROW * number
        kind = "others" if number else "ours"
        lines += [
            f'<text class="name" x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
            f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{max(ratio * scale, 1):.0f}" height="{BAR}"/>',
            f'<text class="number" x="{LEFT + ratio * scale + 6:.0f}" y="{y + 13}">{ratio:.2f}</text>',
        ]
    bottom = top + TOP + ROW * len(found)
    return [*lines, f'<line class="line" x1="{copy:.0f}" x2="{copy:.0f}" y1="{top + TOP - 6}" y2="{bottom}"/>']


def drawing(found: Mapping[str, Mapping[str, Mapping[str, list[float]]]]) -> str:
    """SVG of the shuffled epochs of all sizes."""
    body, top = [], 8
    for kib, parts in found.items():
        bars = ratios(parts["shuffled"])
        body += panel(int(kib), bars, top)
        top += TOP + ROW * len(bars) + 22
    about = "Reading shuffled batches, in multiples of a memory copy (dashed line); more is faster"
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
    parser = argparse.ArgumentParser(description="Draw the times that bench_read wrote.")
    parser.add_argument("times", type=Path, help="file of bench_read --json")
    parser.add_argument("out", type=Path, help="SVG to write")
    options = parser.parse_args()
    options.out.write_text(drawing(json.loads(options.times.read_text("utf-8"))["kib"]), "utf-8")


if __name__ == "__main__":
    main()
