import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from make_images import make_images
from make_reference import catalog, outdated
from page_blocks import DOCS

PROGRAM = Path(sys.executable).with_name("latentcache")


def run(*words):
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, check=False).stdout


def test_generated_pages_are_current():
    assert outdated() == [], "fix: python tools/make_reference.py"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    make_images(folder / "images", count=3, side=64)
    (folder / "images" / "empty.png").touch()
    cache = f"{folder}/images.latentcache"
    build = run("build", f"{folder}/images", "--model", "stub", "--resolution", "64", "--json")
    rest = (run("verify", cache, "--json"), run("info", cache, "--entries", "--json"), run("gc", cache, "--json"))
    plan = run("plan", cache, "--batch-size", "1", "--json")
    inspect = run("inspect", f"{folder}/images", "--model", "stub", "--resolution", "64", "--json")
    failed = run("plan", f"{folder}/nothing", "--batch-size", "1", "--json")
    names = ("build", "verify", "info", "gc", "plan", "inspect", "error")
    return dict(zip(names, map(json.loads, (build, *rest, plan, inspect, failed)), strict=True))


def section(name):
    return (DOCS / "reference" / "json.md").read_text("utf-8").partition(f"\n## {name}\n")[2].partition("\n## ")[0]


def documented(text):
    """Return the keys in the first column of a section's first table."""
    table = text[text.index("\n|") :].lstrip().partition("\n\n")[0]
    rows = re.findall(r"^\| (`.*?) \|", table, flags=re.M)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize("name", ["build", "verify", "info", "gc", "plan"])
def test_documented_keys_match_the_output(objects, name):
    everywhere = {"schema", "command", "exit_code", "error"}
    assert set(objects[name]) == documented(section(name)) | everywhere


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("build", ("counts",)),
        ("inspect", ("layout",)),
        ("inspect", ("layout", "sets", 0)),
        ("inspect", ("counts",)),
        ("inspect", ("sizes",)),
        ("inspect", ("samples", 0)),
        ("inspect", ("checks", 0)),
        ("inspect", ("checks", 4)),
        ("inspect", ("plan", "fields", "latents")),
        ("build", ("plan",)),
        ("info", ("counts",)),
        ("gc", ("counts",)),
        ("info", ("source",)),
        ("info", ("entries", 0)),
        ("plan", ("buckets", 0)),
        ("build", ("fields", "latents")),
        ("build", ("plan", "fields", "latents")),
        ("info", ("fields", "latents")),
        ("info", ("fields", "latents", "groups", 0)),
    ],
)
def test_inner_keys_are_documented(objects, name, path):
    value = objects[name]
    for step in path:
        value = value[step]
    missing = [key for key in value if f"`{key}`" not in section(name)]
    assert missing == []


def test_items_and_errors_are_documented(objects):
    everywhere = section("Every object").partition("`items`")[2]
    items = objects["build"]["items"] + objects["verify"]["items"]
    assert items
    assert {key for item in items for key in item} <= documented(everywhere)
    assert all({"category", "reason", "path", "hint"} <= set(item) for item in items)
    assert objects["error"]["exit_code"] == 2
    assert [key for key in objects["error"]["error"] if f"`{key}`" not in section("Errors")] == []
    assert [one.name for one in catalog() if f"| `{one.name}` | {one.exit_code} |" not in section("Errors")] == []


def test_the_categories_of_verify_are_explained(objects):
    text = (DOCS / "reference" / "verify.md").read_text("utf-8")
    assert [name for name in objects["verify"]["counts"] if f"| `{name}` |" not in text] == []
