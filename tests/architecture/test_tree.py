import ast
import re

import pytest
from package_source import PACKAGE, ROOT, folders, modules, public

#: The folders of the package, from the top layer to the lowest.
TREE = [
    "cli", "report", "export", "pipeline", "verify", "loader", "encoders", "images", "sources", "store", "plan",
    "fields", "identity", "geometry",
]  # fmt: skip
TOP = [path for path in folders() if path.parent == PACKAGE]


def drawn_tree():
    """Return the lines of the package tree in CONTRIBUTING.md with single spaces."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), flags=re.M | re.S)
    drawings = [block for block in blocks if re.search(r"^\s*latentcache/", block, flags=re.M)]
    assert len(drawings) == 1, "CONTRIBUTING.md draws the tree once, in a fenced block with a line latentcache/"
    return [" ".join(line.split()) for line in drawings[0].splitlines()]


def first_line(path):
    docstring = ast.get_docstring(modules()[path])
    assert docstring, f"{path} has no docstring"
    return docstring.splitlines()[0]


def test_folders_match_the_design():
    assert sorted(path.name for path in TOP) == sorted(TREE)
    assert {path.name for path in PACKAGE.glob("*.py")} == {
        "__init__.py", "__main__.py", "_version.py", "errors.py", "failpoint.py", "value.py",
    }  # fmt: skip


@pytest.mark.parametrize("folder", [path.name for path in TOP])
def test_contributing_lists_every_folder_with_its_docstring(folder):
    (line,) = [line for line in drawn_tree() if re.match(rf"(\W+ )?{folder}/ ", line)]
    assert line.split(f"{folder}/ ", 1)[1]


def test_readme_lists_no_missing_folder():
    drawn = {found[1] for line in drawn_tree() if (found := re.match(r"(?:\W+ )?([a-z]+)/(?: |$)", line))}
    assert drawn - set(TREE) - {path.name for path in ROOT.iterdir() if path.is_dir()} == set()


def test_every_folder_is_a_typed_package_with_tests():
    assert {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE} == set(folders())
    assert (PACKAGE / "py.typed").exists()
    assert [name for name in TREE if not list((ROOT / "tests" / name).rglob("test_*.py"))] == []


def test_test_file_names_are_unique():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("path", list(modules()))
def test_everything_public_has_a_docstring(path):
    assert first_line(path)[-1] in ".?:"
    assert [node.name for node in public(modules()[path]) if not ast.get_docstring(node)] == []
