"""Limits on size, imports and dangerous calls of every module. Each exception has a reason."""

import ast
from statistics import median

from package_source import PACKAGE, code_lines, folders, functions, imported_modules, modules

MAX_FUNCTION_LINES = 60
MAX_MEDIAN_LINES = 9
MAX_FILE_LINES = 700
MAX_FILES = 16
BROAD_EXCEPTS = {
    "latentcache/cli/app.py": "the one place that turns every exception into an error and status 70",
    "latentcache/encoders": "libraries raise plain Exception for a fault of a file",
    "latentcache/images": "image libraries raise anything on a damaged file",
    "latentcache/loader": "a thread passes its exception to the caller",
    "latentcache/pipeline": "threads and workers pass their exception to the build",
}
#: Modules that may be named after inputs or kinds of fields.
KIND_FOLDERS = ("fields", "encoders", "images", "sources", "export")
KIND_NAMES = {"latents", "input_ids", "prompt_embeds", "edge_map"}
#: Tables of trainers' names, and the default options of a batch for trainers.
KIND_TABLES = (
    "latentcache/loader/formats.py",
    "latentcache/fields/registry.py",
    "latentcache/loader/samples.py",  # the option ``latents`` of ``cache.read``
)
PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
DANGEROUS_CALLS = {"torch.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load", "eval", "exec", "os.system"}
DANGEROUS_ARGUMENTS = {("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False), ("shell", True)}


def test_functions_are_short():
    lengths = {f"{path}: {f.name}": code_lines(f) for path, tree in modules().items() for f in functions(tree)}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}
    assert median(lengths.values()) <= MAX_MEDIAN_LINES


def test_files_and_folders_are_small():
    lines = {path: (PACKAGE.parent / path).read_text("utf-8").count("\n") for path in modules()}
    assert {path: number for path, number in lines.items() if number > MAX_FILE_LINES} == {}
    counts = {folder.name: len(list(folder.glob("*.py"))) for folder in folders()}
    assert {name: number for name, number in counts.items() if number > MAX_FILES} == {}


def test_the_engine_names_no_kind_of_field():
    """No module, class or function is named after a kind, and no code compares with a kind's name."""
    for path, tree in modules().items():
        if path.split("/")[1] in KIND_FOLDERS:
            continue
        assert not path.rpartition("/")[2].startswith(("token_", "image_", "picture_")), path
        nodes = list(ast.walk(tree))
        named = [node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        assert [one for one in named if set(_words(one)) & {"latents", "picture", "pictures"}] == [], path
        assert [one for one in named if one in KIND_NAMES] == [], path
        if path not in KIND_TABLES:
            texts = [node for node in nodes if isinstance(node, ast.Constant)]
            assert [(node.lineno, node.value) for node in texts if node.value in KIND_NAMES] == [], path
        calls = [ast.unparse(node) for node in nodes if isinstance(node, ast.Call)]
        checks = [call for call in calls if call.startswith("isinstance(")]
        assert [call for call in checks if "kind" in call.partition(",")[0]] == [], path


def _words(name):
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).strip("_").split("_")


def test_exceptions_are_caught_by_name():
    for path, tree in modules().items():
        handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
        assert [handler.lineno for handler in handlers if handler.type is None] == [], path
        broad = [h.lineno for h in handlers if h.type and _is_broad(h.type) and not _raises_again(h)]
        assert not broad or any(path.startswith(listed) for listed in BROAD_EXCEPTS), f"{path}: {broad}"


def _is_broad(kind):
    return bool({"Exception", "BaseException"} & {n.id for n in ast.walk(kind) if isinstance(n, ast.Name)})


def _raises_again(handler):
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_no_pickle_eval_or_shell():
    for path, tree in modules().items():
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in imports for name in imported_modules(node)]
        assert [name for name in names if name.split(".")[0] in PICKLES] == [], path
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        assert [node.lineno for node in calls if ast.unparse(node.func) in DANGEROUS_CALLS] == [], path
        assert [node.lineno for node in calls if _has_dangerous_argument(node)] == [], path
        prints = [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id in {"print", "input"}]
        assert prints == [] or path.startswith("latentcache/cli/"), path


def _has_dangerous_argument(call):
    constants = [(k.arg, k.value.value) for k in call.keywords if isinstance(k.value, ast.Constant)]
    return any((name, value) in DANGEROUS_ARGUMENTS for name, value in constants)
