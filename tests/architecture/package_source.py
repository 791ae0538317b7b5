"""Parse the package into syntax trees for the structure tests, without importing it."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "latentcache"
Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def modules() -> dict[str, ast.Module]:
    """Map each module path (relative to the repository) to its syntax tree."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8"), str(path)) for path in paths}


def folders() -> list[Path]:
    return sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield all functions and methods, including nested ones."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported_modules(node: ast.Import | ast.ImportFrom) -> list[str]:
    """List the dotted names an import may load: ``from a import b`` gives ``a.b`` and ``a``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] + [str(node.module)]


def code_lines(node: Function) -> int:
    """Count the body lines of a function without its docstring."""
    docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    end = node.end_lineno or node.lineno
    inside = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return end - node.body[0].lineno + 1 - inside


def public(tree: ast.Module) -> Iterator[ast.ClassDef | Function]:
    """Yield public functions and classes, and the public methods of those classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | Function) and not node.name.startswith("_") and not _is_overload(node):
            yield node
            if isinstance(node, ast.ClassDef):
                inner = (part for part in node.body if isinstance(part, Function))
                yield from (part for part in inner if not part.name.startswith("_"))


def _is_overload(node: ast.ClassDef | Function) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and text of every docstring, attribute docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
