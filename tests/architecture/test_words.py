import ast
import re

import typer
from package_source import PACKAGE, ROOT, docstrings, modules

from latentcache.cli.app import application

SUFFIXES = {".py", ".md", ".toml", ".txt", ".yml", ".cfg", ""}
FOLDERS = ("latentcache", "tests", "tools", "docs", ".ci")
#: Pages that quote old words: the glossary itself, decisions and the notebook.
PAGES = [
    path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))
    if not {"adr", "notes"} & set(path.parts) and path.name not in ("glossary.md", "CHANGELOG.md")
]  # fmt: skip
# Spelled in two halves, so that this file does not contain it.
MACHINE = re.compile(r"(?<![\w.])/(?:wo" + r"rk|ro" + r"ot|ho" + r"me|Us" + r"ers|o" + r"pt)/")


def retired():
    """Return one pattern for the starred retired words of the glossary."""
    table = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8").partition("## Retired words")[2]
    words = re.findall(r"^\| `?([\w-]+)`? \* \|", table, flags=re.M)
    assert len(words) > 10
    return re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, words))})(s|d)?(?![\w-])", re.IGNORECASE)


def texts():
    top = [path for path in ROOT.iterdir() if path.is_file()]
    below = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    chosen = [p for p in top + below if p.suffix in SUFFIXES and "__pycache__" not in p.parts]
    return sorted(p.relative_to(ROOT).as_posix() for p in chosen if p.name != "LICENSE" and p.name[:4] != ".git")


def lines_with(pattern, text):
    return [f"{number}: {line.strip()}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]


def test_text_has_no_machine_paths_or_stray_whitespace():
    for path in texts():
        text = (ROOT / path).read_text("utf-8")
        assert lines_with(MACHINE, text) == [], path
        assert not text or (text.endswith("\n") and not text.endswith("\n\n")), path
        assert lines_with(re.compile(r"[ \t]+$"), text) == [], path
        assert "\t" not in text or path == "Makefile", path


def test_docstrings_and_names_use_no_retired_word():
    words = retired()
    for path, tree in modules().items():
        assert [f"{line}: {text[:60]}" for line, text in docstrings(tree) if words.search(text)] == [], path
        names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert [name for name in names if words.search(name.replace("_", " "))] == [], path


def test_pages_use_no_retired_word():
    idioms = re.compile(r"\b(nobody|for ever|goes by|of ours|without a word|hears)\b", re.IGNORECASE)
    for path in PAGES:
        assert lines_with(retired(), path.read_text("utf-8")) == [], path
        assert lines_with(idioms, path.read_text("utf-8")) == [], path


def test_helps_use_no_retired_word_and_begin_with_a_verb():
    group = typer.main.get_command(application())
    for name, command in group.commands.items():
        texts = [command.help or "", *(p.help or "" for p in command.params)]
        assert [text for text in texts if retired().search(text)] == [], name
        assert not re.match(r"(What|Whether|How|Of|From|To|A|The)\b", command.help), name
        assert [p.name for p in command.params if not p.help] == [], name


def test_the_reference_begins_with_a_verb_or_a_name():
    page = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    texts = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    first = re.compile(r"^(- `\w+`: )?(What|Whether|Why|How|Where|Of|From|To|For)\b", re.IGNORECASE)
    assert lines_with(first, texts) == []


def test_errors_use_no_retired_word():
    for path in modules():
        calls = [n for n in ast.walk(modules()[path]) if isinstance(n, ast.Call)]
        raised = [c for c in calls if ast.unparse(c.func).endswith("Error")]
        for call in raised:
            parts = [n.value for n in ast.walk(call) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
            assert [part for part in parts if retired().search(part)] == [], f"{path}:{call.lineno}"


def test_the_patterns_match():
    assert retired().search("a picture of it")
    assert not retired().search("an image of it")
    assert MACHINE.search('"/' + 'home/me/x"')
    assert (PACKAGE / "py.typed").exists()
