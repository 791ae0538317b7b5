"""The package as text and syntax trees, for the tests of how it is built. Nothing of it is imported here."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "latentcache"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Path relative to the repository -> syntax tree, for every module of the package."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"), str(path)) for path in paths}


def folders() -> list[Path]:
    """The folders of the package that are packages themselves."""
    return sorted(path.parent for path in PACKAGE.glob("*/__init__.py"))


def functions(tree: ast.AST) -> Iterator[Function]:
    """All functions and methods, nested ones too."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def dotted(path: str) -> str:
    """``latentcache/store/entry.py`` -> ``latentcache.store.entry``."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_at_load(tree: ast.Module) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports that run when the module is loaded: not those in functions or for type checkers."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, Function) and not is_for_type_checkers(node):
            waiting.extend(ast.iter_child_nodes(node))


def is_for_type_checkers(node: ast.AST) -> bool:
    """Whether this is ``if TYPE_CHECKING:``."""
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names an import may load: of ``from a import b`` both ``a.b`` and ``a``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]


def length_without_docstring(node: Function) -> int:
    """Lines from ``def`` to the end, the docstring not counted."""
    return _end(node) - node.lineno + 1 - _docstring_lines(node)


def length_of_body(node: Function) -> int:
    """Lines below the signature, the docstring not counted."""
    return _end(node) - node.body[0].lineno + 1 - _docstring_lines(node)


def _docstring_lines(node: Function) -> int:
    return _end(node.body[0]) - node.body[0].lineno + 1 if ast.get_docstring(node, clean=False) is not None else 0


def _end(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno
