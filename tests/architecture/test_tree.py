import ast
import re

import pytest
from package_source import PACKAGE, ROOT, Function, folders, modules

#: Modules without a test module of their own, and why.
UNTESTED = {
    "latentcache/__main__.py": "one line; run by architecture/test_light.py",
    "latentcache/__init__.py": "tested by architecture/test_exports.py",
    "latentcache/encoders/protocol.py": "types without behaviour",
    "latentcache/loader/entries.py": "types without behaviour",
    "latentcache/sources/sample.py": "types without behaviour",
}


def readme_tree():
    """The lines of the README's drawing of the package, blanks collapsed."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), flags=re.M | re.S)
    drawings = [block for block in blocks if re.search(r"^\s*latentcache/", block, flags=re.M)]
    assert len(drawings) == 1, "README.md draws the tree once, in a fenced block with a line latentcache/"
    return [" ".join(line.split()) for line in drawings[0].splitlines()]


def first_line(path):
    docstring = ast.get_docstring(modules()[path])
    assert docstring, f"{path} says nothing about itself"
    return docstring.splitlines()[0]


@pytest.mark.parametrize("folder", [path.name for path in folders()])
def test_the_readme_says_of_a_folder_what_the_folder_says(folder):
    said = first_line(f"latentcache/{folder}/__init__.py")
    (line,) = [line for line in readme_tree() if re.match(rf"(\W+ )?{folder}/ ", line)]
    assert line.split(f"{folder}/ ", 1)[1] == said


def test_the_readme_draws_no_folder_that_is_not_there():
    drawn = {found[1] for line in readme_tree() if (found := re.match(r"(?:\W+ )?([a-z]+)/(?: |$)", line))}
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert drawn - {path.name for path in folders()} - top == set()


def test_every_folder_is_a_package():
    missing = {path.parent.name for path in PACKAGE.glob("*/*.py")} - {path.name for path in folders()}
    assert missing == set()


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


@pytest.mark.parametrize("path", [path for path in modules() if path not in UNTESTED])
def test_every_module_has_a_test_module(path):
    *middle, name = path.removeprefix("latentcache/").removesuffix(".py").split("/")
    if name == "__init__":
        return
    folder = ROOT.joinpath("tests", *middle)
    wanted = {f"test_{name}.py", "_".join(["test", *middle, name]) + ".py"}
    assert wanted & {path.name for path in folder.glob("test_*.py")}, f"one of {sorted(wanted)} in {folder.name}/"


def test_listed_untested_modules_are_there():
    assert set(UNTESTED) <= set(modules())


def test_test_modules_have_names_of_their_own():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
    assert list((ROOT / "tests").rglob("__init__.py")) == []


@pytest.mark.parametrize("path", list(modules()))
def test_every_module_says_what_it_is_for(path):
    assert first_line(path).endswith((".", "?", ":"))


@pytest.mark.parametrize("path", list(modules()))
def test_everything_public_is_described(path):
    silent = [node.name for node in _public(modules()[path]) if not ast.get_docstring(node)]
    assert silent == []


def _public(tree):
    """Functions and classes a caller may use, and the methods of those classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (
                    part for part in node.body if isinstance(part, Function) and not part.name.startswith("_")
                )
