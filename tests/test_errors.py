import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
from make_reference import SPECIFIC, catalog

from latentcache import errors
from latentcache.errors import CacheLockedError, InterruptedBuildError, LatentcacheError, UsageError
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


def test_an_argument_is_named_as_the_caller_writes_it():
    error = UsageError("not a size", argument="buckets", value="6 4", fix="--bucket=64x64")
    assert (error.what, error.fix) == ("--bucket='6 4': not a size", "--bucket=64x64")
    assert str(error) == "buckets='6 4': not a size; fix: buckets=['64x64']"


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        ("name it: --split=train, or leave --min-side out", "name it: split='train', or leave min_side out"),
        ("--crop=random --crop-variants=4", "crop='random' crop_variants=4"),
        ("--out='/a b/c', or --device=cpu|cuda:0,cuda:1.", "out='/a b/c', or device='cpu'|'cuda:0,cuda:1'."),
        (
            "--resolution=PIXELS: `latentcache build my--data --flip`",
            "resolutions=[PIXELS]: `latentcache build my--data --flip`",
        ),
        ("latentcache build my--data --out x", "latentcache build my--data --out x"),
    ],
)
def test_a_python_caller_reads_arguments_of_python(fix, words):
    assert str(UsageError("wrong", fix=fix)) == f"wrong; fix: {words}"


def test_package_errors_use_python_arguments(tmp_path):
    from latentcache import BuildSettings, build_cache, merge_caches

    with pytest.raises(UsageError) as caught:
        BuildSettings(data="images", device="gpu")
    assert str(caught.value).startswith("device='gpu': unknown device; fix: device='auto'")
    images = tmp_path / "my--data"
    images.mkdir()
    with pytest.raises(UsageError) as caught:
        build_cache(BuildSettings(data=images, out=images / "cache"))
    assert f"out='{images / 'cache'}'" in str(caught.value)
    assert f"fix: use out='{tmp_path / 'my--data.latentcache'}'" in str(caught.value)
    for parts in ([], [tmp_path]):
        with pytest.raises(UsageError) as caught:
            merge_caches(parts, tmp_path)
        assert not {"--", "`"}.intersection(str(caught.value))
