"""Generate ``docs/reference/python.md``: signatures and docstrings of the public names.

``make_reference.py`` writes it with the other pages.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import latentcache
from latentcache.errors import LatentcacheError

INTRO = """\
`import latentcache` is cheap; each name is loaded at its first use. These names are the public API; other names may
change. Shapes are written `(B, C, H, W)`; sizes in pixels are `(height, width)`.
"""
_WIDTH = 100


def sections() -> Iterator[str]:
    """Return one Markdown section per name."""
    yield "\n".join(["| name | purpose |", "|---|---|", *map(_row, _named())])
    for value in _named():
        yield _section(value)


def _named() -> list[Any]:
    """Sort functions before classes; errors have their own page."""
    public = [getattr(latentcache, name) for name in latentcache.__all__]
    functions = [value for value in public if inspect.isfunction(value)]
    classes = [value for value in public if inspect.isclass(value) and not issubclass(value, LatentcacheError)]
    return [*functions, *classes]


def _row(value: Any) -> str:
    first = inspect.getdoc(value).splitlines()[0].replace("``", "`")  # type: ignore[union-attr]
    return f"| [`{value.__name__}`](#{value.__name__.lower()}) | {first} |"


def _section(value: Any) -> str:
    if inspect.isfunction(value):
        return f"## {value.__name__}\n\n{_described(value.__name__, value)}"
    if value.__name__ in latentcache.__all__ and hasattr(value, "__dataclass_fields__"):
        return "\n\n".join([f"## {value.__name__}", _described(value.__name__, value), *_fields(value)])
    parts = [f"## {value.__name__}", to_markdown(_without_arguments(inspect.getdoc(value) or ""))]
    parts += [_member(value, name) for name in _members(value)]
    return "\n\n".join(parts)


def _fields(kind: type) -> list[str]:
    """List the fields that have a docstring in the source, or the help of an option."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    items = []
    for field, text in itertools.pairwise(vars(definition)["body"]):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                items.append(f"- `{name}`: {' '.join(text.split())}".replace("``", "`"))
    options = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    items += [f"- `{option.name}`: {option.metadata['help']}" for option in options if "help" in option.metadata]
    return ["\n".join(items)] if items else []


def _members(kind: type) -> list[str]:
    """Return public methods and properties with a docstring, inherited ones first."""
    names = [name for parent in reversed(kind.__mro__[:-1]) for name in vars(parent)]
    return [name for name in dict.fromkeys(names) if not name.startswith("_") and _is_told(getattr(kind, name))]


def _is_told(member: Any) -> bool:
    return isinstance(member, property) or (inspect.isfunction(member) and bool(member.__doc__))


def _member(kind: type, name: str) -> str:
    member = inspect.getattr_static(kind, name)
    if isinstance(member, property):
        return f"### {kind.__name__}.{name}\n\n{to_markdown(inspect.getdoc(member) or '')}"
    return f"### {kind.__name__}.{name}\n\n{_described(name, getattr(kind, name))}"


def _described(name: str, value: Any) -> str:
    return f"```python\n{signature(name, value)}\n```\n\n{to_markdown(inspect.getdoc(value) or '')}"


def signature(name: str, value: Any) -> str:
    """Format a signature: one line if it fits, otherwise one line per parameter."""
    found = inspect.signature(value)
    kept = [part for part in found.parameters.values() if part.name != "self"]
    words = [str(_plain(part)) for part in kept]
    first = next((at for at, part in enumerate(kept) if part.kind is part.KEYWORD_ONLY), None)
    if first is not None:
        words.insert(first, "*")
    back = "" if found.return_annotation in (found.empty, None, "None") else f" -> {_text(found.return_annotation)}"
    line = f"{name}({', '.join(words)}){back}"
    return line if len(line) <= _WIDTH else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){back}"


def _plain(part: inspect.Parameter) -> str:
    default = "" if part.default is part.empty else f" = {_default(part.default)}"
    star = "*" if part.kind is part.VAR_POSITIONAL else ""
    return f"{star}{part.name}{'' if part.annotation is part.empty else ': ' + _text(part.annotation)}{default}"


def _default(value: Any) -> str:
    return "..." if repr(value).startswith("<") else repr(value)


def _text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def to_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown: its sections become lists."""
    text = re.sub(r":(?:meth|attr|class|func):`(\w+)`", r"`\1`", docstring.replace("``", "`"))
    text = re.sub(r"^(Args|Raises|Returns|Yields):\n", r"**\1**\n\n", text, flags=re.M)
    text = re.sub(r"^ {4}(\w+): ", r"- `\1`: ", text, flags=re.M)
    text = re.sub(r"^ {8}(?=\S)", "  ", text, flags=re.M)
    return re.sub(r"^ {4}(?=\S)", "", text, flags=re.M)


def _without_arguments(docstring: str) -> str:
    """Drop the arguments of a class that only other calls create."""
    return re.split(r"\n\n(?:Args|Raises):\n", docstring)[0]
