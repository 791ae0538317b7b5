"""What is written here is true anywhere: no place of one machine, one spelling for every word."""

import io
import re
import tokenize

import pytest
from package_source import ROOT

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".cfg", ""}
FOLDERS = ("latentcache", "tests", "tools", "docs", ".ci")
#: Full of other people's words.
FOREIGN = {"LICENSE"}

# Spelled in two halves, so that this page does not forbid itself.
PLACES = {
    "a folder of one machine": r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|Us" + r"ers|o" + r"pt)/",
    "a package registry": r"py" + r"pi\.org|pythonho" + r"sted|extra-in" + r"dex|find-li" + r"nks",
}
#: ``optimizer`` is the name of a class of torch, not a word to spell.
AMERICAN = re.compile(
    r"\b(?!optimizers?\b)(?:\w*(?:norm|initi|seri|optim|organ|recogn|summar|general|minim|maxim|custom|util)(?:al|i)?"
    + r"iz(?:e|es|ed|er|ing|ation)"
    + r"|behav" + r"ior|col" + r"ors?|cent" + r"er(?:ed|s)?|gr" + r"ay)\b",
    re.IGNORECASE,
)  # fmt: skip


def texts():
    """Every file that was written for this project."""
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    chosen = [p for p in top + below if p.suffix in SUFFIXES and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT).as_posix() for p in chosen if p.name not in FOREIGN and p.name[:4] != ".git")


def read(path):
    return (ROOT / path).read_text("utf-8")


each_text = pytest.mark.parametrize("path", texts())


def lines_with(pattern, text):
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


@pytest.mark.parametrize("what", PLACES)
def test_no_place_of_one_machine(what):
    pattern = re.compile(PLACES[what])
    found = {path: lines for path in texts() if (lines := lines_with(pattern, read(path)))}
    assert found == {}


@each_text
def test_text_ends_with_one_newline_and_has_no_trailing_blanks(path):
    text = read(path)
    assert not text or (text.endswith("\n") and not text.endswith("\n\n"))
    assert lines_with(re.compile(r"[ \t]+$"), text) == []
    assert "\t" not in text or path == "Makefile"


@each_text
def test_prose_is_spelled_the_british_way(path):
    assert lines_with(AMERICAN, prose(path)) == []


def prose(path):
    """The sentences of a file: comments and docstrings of code, pages without their code. Line numbers are kept."""
    text = read(path)
    if path.endswith(".py"):
        text = _comments_and_docstrings(text)
    else:
        text = re.sub(r"^```.*?^```", _blank, text, flags=re.M | re.S)
    return re.sub(r"``.*?``|`[^`\n]*`|https?://\S+|#[0-9a-f]{6}", _blank, text, flags=re.S)


def _comments_and_docstrings(code):
    lines = [""] * (code.count("\n") + 1)
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        is_docstring = token.type == tokenize.STRING and token.string.startswith('"""')
        if token.type == tokenize.COMMENT or is_docstring:
            for offset, line in enumerate(token.string.splitlines()):
                lines[token.start[0] - 1 + offset] += line
    return "\n".join(lines)


def _blank(found):
    return "\n" * found[0].count("\n")


def test_the_words_are_found_where_they_stand():
    """The searches above find what they look for."""
    american = ["normal" + "ization", "Initial" + "ize", "col" + "or", "optim" + "ized"]
    assert all(AMERICAN.search(f"the {word} of it") for word in american)
    assert not any(
        AMERICAN.search(f"the {word} of it") for word in ["normalisation", "colour", "size", "prize", "optimizer"]
    )
    assert re.search(PLACES["a folder of one machine"], '"/' + 'home/me/x"')
    assert not re.search(PLACES["a folder of one machine"], "src/" + "home/me")
