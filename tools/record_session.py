"""Record a session as an animated SVG: build, edit one image, verify names it, and a build encodes it alone.

Runs the installed commands on drawn images in a temporary folder. The output is theirs; only the path of that folder
is left out. Without animation, for example in print, all lines are visible.

    python tools/record_session.py docs/session.svg
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from xml.sax.saxutils import escape

from make_images import make_images
from PIL import Image, ImageOps

EDITED = "photos/image_0003.jpg"
COLUMNS, ROW, LEFT, TOP = 104, 19, 18, 46
#: Seconds that a reader needs: before a command, and for each line of its output.
PAUSE_S, LINE_S = 1.2, 0.25
STYLE = """
    .window { fill: #0d1117; stroke: #30363d; } .dot { fill: #30363d; }
    text { font: 13px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; fill: #c9d1d9; white-space: pre; }
    .command { fill: #ffffff; font-weight: 600; } .note { fill: #8b949e; }
    .stale { fill: #ffa657; } .good { fill: #3fb950; }
    @media (prefers-reduced-motion: no-preference) {
      .later { opacity: 0; animation: appear 0.2s forwards; }
      @keyframes appear { to { opacity: 1; } }
    }
"""


class Line(NamedTuple):
    """One line of the terminal, its CSS class, and when it appears."""

    text: str
    kind: str
    seconds: float


def session() -> list[Line]:
    """Run the commands; return the lines of the terminal."""
    lines: list[Line] = []
    with TemporaryDirectory() as name:
        folder = Path(name)
        for path in make_images(folder / "photos", 60, side=800):
            if path.suffix != ".jpg":
                path.unlink()
                path.with_suffix(".txt").unlink()
        _run(lines, folder, "build photos")
        with Image.open(folder / EDITED) as image:
            ImageOps.mirror(image).save(folder / EDITED)
        lines.append(Line(f"# {EDITED} is edited in another program", "note", _end(lines) + PAUSE_S))
        _run(lines, folder, "verify photos.latentcache")
        _run(lines, folder, "build photos --quiet")
        _run(lines, folder, "verify photos.latentcache")
    return lines


def _run(lines: list[Line], folder: Path, words: str) -> None:
    start = _end(lines) + PAUSE_S
    lines.append(Line(f"$ latentcache {words}", "command", start))
    command = [str(Path(sys.executable).with_name("latentcache")), *words.split()]
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"COLUMNS": str(COLUMNS), "NO_COLOR": "1"},
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    took = time.monotonic() - began
    for number, line in enumerate(done.stdout.replace(f"{folder}/", "").splitlines(), 1):
        kind = "stale" if " stale" in f" {line}" else "good" if " ok (" in line or "encoded," in line else "output"
        parts = textwrap.wrap(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False)
        lines += [Line(part, kind, start + took + LINE_S * number) for part in parts]


def _end(lines: list[Line]) -> float:
    return lines[-1].seconds if lines else 0.0


def drawing(lines: list[Line]) -> str:
    """Return the SVG of a terminal in which the lines appear one after the other."""
    width, height = LEFT * 2 + COLUMNS * 8, TOP + ROW * len(lines) + 8
    body = [
        f'<text class="{line.kind} later" style="animation-delay: {line.seconds:.1f}s" x="{LEFT}"'
        f' y="{TOP + ROW * number}">{escape(line.text)}</text>'
        for number, line in enumerate(lines)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            ' aria-labelledby="title">',
            '  <title id="title">A build, an edit, a verify that names the image, a build that encodes it</title>',
            f"  <style>{STYLE}  </style>",
            f'  <rect class="window" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="8"/>',
            *(f'  <circle class="dot" cx="{LEFT + 18 * number}" cy="18" r="5"/>' for number in range(3)),
            *(f"  {line}" for line in body),
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Record a session as an animated SVG.")
    parser.add_argument("out", type=Path, help="SVG to write")
    parser.parse_args().out.write_text(drawing(session()), "utf-8")


if __name__ == "__main__":
    main()
