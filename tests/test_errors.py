import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
from make_reference import SPECIFIC, catalog

from latentcache import errors
from latentcache.errors import CacheLockedError, InterruptedBuildError, LatentcacheError, UsageError, as_python
from latentcache.sources.causes import HINTS

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__ and issubclass(cls, LatentcacheError)
]
PACKAGE = Path(errors.__file__).parent
EXTRA = {CacheLockedError: {"holder": {"pid": 7}}, InterruptedBuildError: {"signal_number": 15}}


def make(cls, **parts):
    return cls("it broke", **EXTRA.get(cls, {}), **parts)


def branch_of(cls):
    """Return the ancestor directly below :class:`LatentcacheError`."""
    return cls if cls is LatentcacheError else cls.__mro__[cls.__mro__.index(LatentcacheError) - 1]


def test_exit_codes_follow_the_base_class():
    for cls in CLASSES:
        assert cls.exit_code == branch_of(cls).exit_code
    found = {cls.__name__: cls.exit_code for cls in CLASSES if cls.__base__ is LatentcacheError}
    assert {name for name, code in found.items() if code == 3} == {"DeviceError", "WorkerError", "StoreError"}
    assert {name for name, code in found.items() if code == 1} == {"PlanError"}
    assert set(found.values()) <= {1, 2, 3}


def test_slugs_are_unique_and_plain():
    slugs = [cls.slug for cls in CLASSES]
    assert len(set(slugs)) == len(slugs)
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", slug) for slug in slugs)


@pytest.mark.parametrize("cls", CLASSES)
def test_the_text_has_all_four_parts(cls):
    text = str(make(cls, where="a.csv:3", why="found 2 of 3", fix="add a column"))
    assert text == "it broke; at a.csv:3; found 2 of 3; fix: add a column"


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("duplicate", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_errors_are_picklable(cls, duplicate):
    error = make(cls, where="here", why="because", fix="this")
    again = duplicate(error)
    assert type(again) is cls
    assert again.as_json() == error.as_json()
    assert str(again) == str(error)
    assert again.exit_code == error.exit_code


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("UsageError", ValueError),
        ("SourceNotFoundError", FileNotFoundError),
        ("DeviceMemoryError", MemoryError),
        ("MissingEntryError", LookupError),
        ("DiskFullError", OSError),
        ("CacheReadOnlyError", PermissionError),
    ],
)
def test_errors_are_python_exceptions(name, builtin):
    with pytest.raises(builtin):
        raise make(getattr(errors, name))


def test_the_catalog_lists_every_slug_that_the_package_uses():
    """A slug is that of the class, or an argument of the raise."""
    rows = {one.name: one for one in catalog()}
    used = {"output"}  # of the command line's own class
    for path in PACKAGE.rglob("*.py"):
        used |= set(re.findall(r"""\bslug(?:, \w+)* ?= ?["']([a-z-]+)["']""", path.read_text("utf-8")))
    used |= {f"{name}" for cls in CLASSES for name in [cls.slug] if cls is not LatentcacheError}
    used -= set(HINTS)  # reasons of rejected inputs
    assert used - set(rows) == set()
    assert set(SPECIFIC) - used - {"disk-full", "system"} == set()
    assert all(row.meaning.endswith(".") for row in rows.values())


@pytest.mark.parametrize(
    ("flags", "arguments"),
    [
        ("--batch-size=0: must be 1 or more", "batch_size=0: must be 1 or more"),
        ("--device=cuda:9: unknown device", "device='cuda:9': unknown device"),
        ("give another disk with --out", "give another disk with out"),
        ("check the path; --model takes a folder", "check the path; model takes a folder"),
        ("use --no-add-bos, or --flip.", "use add_bos=False, or flip."),
        ("raise --resolution or use --bucket=64x64.", "raise resolutions or use buckets=['64x64']."),
        ("--crop=random --crop-variants=4", "crop='random', crop_variants=4"),
        ("--frames=77 or --frames=N", "frames=[77] or frames=[N]"),
        ("--loss=all|assistant", "loss='all' or 'assistant'"),
        ("--model='/a b': no such file", "model='/a b': no such file"),
        ("name it with --field=MODULE:CLASS", "name it with LATENTCACHE_FIELDS=MODULE:CLASS"),
        ("run the same `latentcache build` again", "call the same build_cache() again"),
        ("`latentcache gc CACHE --apply` frees them", "`latentcache gc CACHE --apply` frees them"),
        ("latentcache verify C --data DATA", "latentcache verify C --data DATA"),
        ("pip install -U lmdb", "pip install -U lmdb"),
    ],
)
def test_flags_become_python_arguments(flags, arguments):
    assert as_python(flags) == arguments


def test_package_errors_use_python_arguments(tmp_path):
    from latentcache import BuildSettings, build_cache, merge_caches

    with pytest.raises(UsageError) as caught:
        BuildSettings(data="images", device="gpu")
    assert (caught.value.what, caught.value.fix.split(" ")[0]) == ("device='gpu': unknown device", "device='auto'")
    (tmp_path / "images").mkdir()
    with pytest.raises(UsageError) as caught:
        build_cache(BuildSettings(data=tmp_path / "images", out=tmp_path / "images" / "cache"))
    assert "--" not in caught.value.what + caught.value.fix
    for parts in ([], [tmp_path]):
        with pytest.raises(UsageError) as caught:
            merge_caches(parts, tmp_path)
        assert not {"--", "`"}.intersection(caught.value.what + caught.value.fix)
