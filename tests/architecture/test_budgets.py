"""How big, how tangled, how careful: limits that hold for every module. An exception is listed with its reason."""

import ast
import re
from collections import Counter
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from statistics import median

import pytest
from package_source import (
    Function,
    dotted,
    functions,
    imported_modules,
    imports_at_load,
    length_of_body,
    length_without_docstring,
    modules,
)

MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 10
MAX_FILE_LINES = 400
#: Files above this many lines need a reason.
REVIEW_FILE_LINES = 300
LONG_FILES: dict[str, str] = {"latentcache/errors.py": "one tree of classes, drawn in one docstring"}
LOCAL_IMPORTS = {
    "latentcache/cli/*": "a command imports what it needs when it runs, so that --help and info start at once",
    "latentcache/encoders/opening.py": "only the library of the model that is opened is imported",
    "latentcache/encoders/hub.py": "half a second that only users of a hub id should pay",
    "latentcache/encoders/opening_tokens.py": "chat templates cost a second of imports, and tiktoken is an extra",
    "latentcache/encoders/text_tokeniser.py": "templates import transformers, which plain texts never need",
    "latentcache/encoders/tokenizer.py": "transformers takes seconds; only folders without tokenizer.json need it",
    "latentcache/sources/corpus.py": "pyarrow is an extra that only parquet and saved data sets need",
    "latentcache/pipeline/resize.py": "torch is taken for resizing only when its self-test passes",
}
BROAD_EXCEPTS = {
    "latentcache/cli/app.py": "the front door: what nobody foresaw becomes one line and exit status 70",
    "latentcache/encoders/describe_tokens.py": "tokenizers raises plain Exception for any fault of its file",
    "latentcache/loader/prefetch.py": "a thread hands its error to the caller, who raises it at its batch",
    "latentcache/pipeline/decoding.py": "a thread hands its error to the build, which raises it",
    "latentcache/pipeline/worker.py": "a worker tells its error to the build, which raises it",
    "latentcache/pipeline/writing.py": "a thread hands its error to the build, which raises it",
    "latentcache/pipeline/headers.py": "picture libraries raise anything on a damaged file; it becomes our error",
}
VAGUE_NAMES = {"utils", "util", "common", "core", "base", "misc", "helpers", "helper", "tools", "lib"}
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
DANGEROUS_CALLS = {"torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "os.system"}
DANGEROUS_ARGUMENTS = {
    ("allow_pickle", True),
    ("trust_remote_code", True),
    ("weights_only", False),
    ("shell", True),
}

each_module = pytest.mark.parametrize("path", list(modules()))


@each_module
def test_functions_are_short(path):
    # The signature of a command is its table of options, one line each: data, like a docstring.
    measure = length_of_body if path.startswith("latentcache/cli/") else length_without_docstring
    lengths = {f"{f.name} (line {f.lineno})": measure(f) for f in functions(modules()[path])}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_most_functions_are_very_short():
    lengths = [length_without_docstring(f) for tree in modules().values() for f in functions(tree)]
    assert median(lengths) <= MAX_MEDIAN_LINES


@each_module
def test_files_are_short(path):
    lines = _number_of_lines(path)
    assert lines <= MAX_FILE_LINES
    assert lines <= REVIEW_FILE_LINES or path in LONG_FILES


def test_listed_long_files_are_long():
    assert [path for path in LONG_FILES if _number_of_lines(path) <= REVIEW_FILE_LINES] == []


def _number_of_lines(path):
    return max((getattr(node, "end_lineno", 0) or 0 for node in ast.walk(modules()[path])), default=0)


def test_no_module_needs_itself_to_be_loaded():
    known = {dotted(path) for path in modules()}
    graph = {}
    for path, tree in modules().items():
        wanted = {name for node in imports_at_load(tree) for name in imported_modules(node)} & known
        graph[dotted(path)] = wanted - {dotted(path)}
    graph = {name: _without_own_packages(name, wanted) for name, wanted in graph.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


def _without_own_packages(name, wanted):
    """``from latentcache.store import entry`` names the package too, but needs only the module."""
    packages = {other.rpartition(".")[0] for other in wanted}
    return {other for other in wanted if other not in packages or not name.startswith(other + ".")}


def local_imports():
    """path -> line numbers of imports inside functions."""
    found = Counter()
    for path, tree in modules().items():
        inside = {
            node.lineno
            for function in functions(tree)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
        }
        if inside:
            found[path] = sorted(inside)
    return dict(found)


def test_imports_stand_at_the_top_but_for_the_listed():
    unlisted = {
        path: lines
        for path, lines in local_imports().items()
        if not any(fnmatch(path, pattern) for pattern in LOCAL_IMPORTS)
    }
    assert unlisted == {}


def test_listed_local_imports_are_there():
    unused = [pattern for pattern in LOCAL_IMPORTS if not any(fnmatch(path, pattern) for path in local_imports())]
    assert unused == []


@each_module
def test_no_bare_except(path):
    handlers = [node for node in ast.walk(modules()[path]) if isinstance(node, ast.ExceptHandler)]
    assert [handler.lineno for handler in handlers if handler.type is None] == []


@each_module
def test_broad_excepts_are_listed(path):
    lines = _broad_excepts(path)
    assert lines == [] or path in BROAD_EXCEPTS


def test_listed_broad_excepts_are_there():
    assert [path for path in BROAD_EXCEPTS if path not in modules() or not _broad_excepts(path)] == []


def _broad_excepts(path):
    """Lines of handlers that catch everything and do not raise it again."""
    handlers = [node for node in ast.walk(modules()[path]) if isinstance(node, ast.ExceptHandler) and node.type]
    return [h.lineno for h in handlers if _is_broad(h.type) and not _raises_again(h)]


def _is_broad(kind):
    return bool({"Exception", "BaseException"} & {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)})


def _raises_again(handler):
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


@each_module
def test_names_say_what_is_inside(path):
    parts = path.removesuffix(".py").split("/")
    assert not VAGUE_NAMES & set(parts)
    assert len(parts) <= 3, "one level of folders"
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*|__\w+__", part) for part in parts)


@each_module
def test_nothing_that_runs_a_strangers_code(path):
    tree = modules()[path]
    names = [name for node in ast.walk(tree) for name in _loaded(node)]
    assert [name for name in names if name.split(".")[0] in PICKLES] == []
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert [node.lineno for node in calls if ast.unparse(node.func) in DANGEROUS_CALLS] == []
    assert [node.lineno for node in calls if _has_dangerous_argument(node)] == []


def _loaded(node):
    return imported_modules(node) if isinstance(node, ast.Import | ast.ImportFrom) else []


def _has_dangerous_argument(call):
    constants = [(k.arg, k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)]
    return any((name, value) in DANGEROUS_ARGUMENTS for name, value in constants)


@each_module
def test_no_print(path):
    calls = [node for node in ast.walk(modules()[path]) if isinstance(node, ast.Call)]
    prints = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id in {"print", "input"}]
    assert prints == [] or path.startswith("latentcache/cli/")


def test_the_ruler_measures():
    """The measurements above are right about a function whose length is known."""
    tree = ast.parse('def f(a):\n    """One\n    two."""\n    import pickle\n    return a\n')
    (function,) = functions(tree)
    assert isinstance(function, Function)
    assert length_without_docstring(function) == 3
    assert length_of_body(function) == 2
