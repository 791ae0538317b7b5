"""No message offers to delete anything that this program did not write."""

import ast
import re

from package_source import modules

_DELETES = re.compile(r"(?<![\w-])(rm|unlink|rmtree|delete|erase|remove)\b", re.IGNORECASE)
#: Strings with such a word, and why each may have it.
ALLOWED = {
    ("latentcache/cli/commands/verify.py", "Delete unreferenced data instead of listing it."): "data of the cache",
    (
        "latentcache/cli/commands/verify.py",
        "Remove corrupt entries after a full check; a build makes them again.",
    ): "entries",
    ("latentcache/cli/commands/verify.py", "Remove them?"): "entries of the cache",
    ("latentcache/pipeline/preflight.py", "a build that ignored the field would remove it from the cache"): "a field",
    (
        "latentcache/store/lock.py",
        "it names another owner of the open shards; never delete builder.lock",
    ): "a warning",
}


def texts(tree):
    """Strings of a module that are no docstrings."""
    statements = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in statements
    ]


def test_no_message_offers_to_delete_what_this_program_did_not_write():
    found = {(str(path), text) for path, tree in modules().items() for text in texts(tree) if _DELETES.search(text)}
    assert found == set(ALLOWED)
