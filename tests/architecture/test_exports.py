import ast
import json
import subprocess
import sys

from package_source import is_for_type_checkers, modules

import latentcache

HEAVY = ["numpy", "torch", "lmdb", "PIL", "typer", "rich", "pydantic", "diffusers", "transformers"]


def run(code):
    """Run code in a fresh interpreter and parse its JSON output."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_the_package_imports_nothing_heavy():
    code = f"import json, sys, latentcache; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    assert run(code) == []


def test_type_checkers_see_the_same_names():
    tree = modules()["latentcache/__init__.py"]
    nodes = [node for block in tree.body for node in (block.body if is_for_type_checkers(block) else [block])]
    imported = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assigned = {ast.unparse(t) for node in nodes if isinstance(node, ast.Assign) for t in node.targets}
    assigned |= {ast.unparse(node.target) for node in nodes if isinstance(node, ast.AnnAssign)}
    assert len(latentcache.__all__) <= 12
    assert set(latentcache.__all__) - imported - assigned == set()
