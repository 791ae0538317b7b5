from pathlib import Path

import pytest

from latentcache.verify.findings import Finding
from latentcache.verify.fixes import Commands, Fixes

BUILD = "latentcache build '/d a' --out /c --allow-failed 2% --field m:K --model M --device cpu"
AGAIN = "latentcache verify /c --reencode 9 --field m:K --model M --device cpu"
REPAIR = "latentcache verify /c --field m:K --repair --yes"


def fixes(**more):
    words = Commands(common="--field m:K", recipe="--model M", run="--device cpu")
    more |= {"allow_failed": "2%", "reencode": "--reencode 9"}
    return Fixes(commands=words, cache=Path("/c"), root=Path("/d a"), **more)


@pytest.mark.parametrize(
    ("category", "reason", "file", "expected"),
    [
        ("stale", "source-changed", "", BUILD),
        ("missing", "not-built", "", BUILD),
        ("corrupt", "payload", "shards/x", f"{REPAIR}; {BUILD}"),
        ("unverifiable", "permission", "shards/x", "chmod -R u+rX /c"),
        ("unverifiable", "permission", "", "chmod -R u+rX '/d a'"),
        ("unverifiable", "io-error", "shards/x", "latentcache verify /c --field m:K"),
        ("unverifiable", "not-encoded", "", AGAIN),
        ("drift", "x", "", f"{AGAIN} --repair --yes; {BUILD}"),
        ("touched", "stat-changed", "", ""),
        ("quarantined", "empty", "", ""),
    ],
)
def test_every_category_has_the_command_that_mends_it(category, reason, file, expected):
    assert fixes()(Finding(category=category, reason=reason, file=file)).fix == expected


def test_data_that_was_named_is_named_again():
    fix = fixes(named_data=True)(Finding(category="corrupt", reason="payload")).fix
    assert fix == f"latentcache verify /c --data '/d a' --field m:K --repair --yes; {BUILD}"
