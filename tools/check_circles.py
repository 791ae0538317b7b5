"""Fail if modules of the package import each other in a circle; imports in functions and for types count."""

from __future__ import annotations

import sys
from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGE = "latentcache"


def circle(imports: dict[str, set[str]]) -> list[str]:
    """One circle as a list of modules, each imported by the one after it; empty if there is none."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def main() -> int:
    """Print a circle, if there is one. Return the exit status."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    imports = {name: set(graph.find_modules_directly_imported_by(name)) for name in sorted(graph.modules)}
    if modules := circle(imports):
        print("import circle:", " <- ".join(modules))
        return 1
    print("imports: no circle")
    return 0


if __name__ == "__main__":
    sys.exit(main())
