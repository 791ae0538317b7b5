"""Run the console and Python blocks of a section of a page in one folder and compare their output.

A section begins with a heading of level two.

A ``console`` block has commands after ``$``, each followed by its output. ``python`` blocks share one namespace.
A ``python`` block with a name, as in "python edges.py", is
written to that file. In expected output a number matches any number and ``…`` matches anything.
"""

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from latentcache.cli.app import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_BLOCK = re.compile(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", flags=re.M | re.S)
_NUMBER = re.compile(r"\b[0-9a-f]{8,}\b|\b\d+(?:[.,:]\d+)*\b")


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    """Line number of the block in its page."""
    file: str = ""
    section: str = ""


def blocks(page, section=None):
    """Return the blocks of a page, or of one of its sections."""
    text = page.read_text("utf-8")
    found = []
    for match in _BLOCK.finditer(text):
        heading = re.findall(r"^## (.*)$", text[: match.start()], flags=re.M)
        line = text[: match.start(3)].count("\n") + 1
        found.append(Block(match[1], match[3], line, match[2] or "", heading[-1] if heading else ""))
    return [block for block in found if section in (None, block.section)]


def run_page(page, folder, section=None):
    """Run every console and Python block of a section in ``folder``; return the namespace."""
    (folder / "tools").symlink_to(ROOT / "tools")
    names = {"__name__": page.stem}
    for block in blocks(page, section):
        if block.language == "console":
            run_console(block, folder, page.name)
        elif block.file:
            (folder / block.file).write_text(block.text, "utf-8")
        elif block.language == "python":
            # padded, so that a traceback names the line of the page
            exec(compile("\n" * (block.line - 1) + block.text, str(page), "exec"), names)
    return names


def run_console(block, folder, page=""):
    """Run the commands of one block and compare their output with the page."""
    status = 0
    for command, expected in parse(block.text):
        status, found = run_command(command, folder, status)
        assert agrees(expected, found), f"{page}:{block.line}: $ {command}\nexpected:\n{expected}\nfound:\n{found}"


def run_command(command, folder, before=0):
    """Run one command, in this process if it is ``latentcache``; return status and output."""
    if command.startswith("latentcache ") and not set(command) & set("|&;<>$*?`"):
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out), chdir(folder), patch.dict(os.environ, COLUMNS="100"):
            status = main(shlex.split(command)[1:])
        return status, out.getvalue()
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    words, more = ["bash", "-c", f"(exit {before})\n{command}"], {"PATH": path, "COLUMNS": "100"}
    together = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(words, cwd=folder, env=os.environ | more, check=False, **together)
    return done.returncode, done.stdout


def parse(text):
    """Split a console block into (command, expected output)."""
    steps = []
    for line in text.splitlines():
        if line.startswith("$ "):
            steps.append((line[2:], ""))
        else:
            command, expected = steps[-1]
            steps[-1] = (command, expected + line + "\n")
    return steps


def agrees(expected, found):
    """Compare output with the page; without expected output anything matches."""
    if not expected.strip():
        return True
    pieces = (re.escape(_plain(piece)) for piece in expected.strip().split("…"))
    return re.fullmatch(".*".join(pieces), _plain(found.strip()), flags=re.S) is not None


def _plain(text):
    """Replace numbers, hex words and whitespace by placeholders."""
    numbered = _NUMBER.sub("0", text)
    return "\n".join(" ".join(line.split()) for line in numbered.splitlines())
