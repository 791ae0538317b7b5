from pathlib import Path

import pytest

from latentcache.verify.findings import Finding
from latentcache.verify.fixes import Commands

BUILD = "latentcache build '/d a' --out /c --allow-failed 2% --field m:K --model M --device cpu"
AGAIN = "latentcache verify /c --reencode 9 --field m:K --model M --device cpu"
REPAIR = "latentcache verify /c --data x --field m:K --repair --yes"


@pytest.mark.parametrize(
    ("category", "reason", "data", "expected"),
    [
        ("stale", "source-changed", "", BUILD),
        ("missing", "not-built", "", BUILD),
        ("corrupt", "payload", "--data x", f"{REPAIR}; {BUILD}"),
        ("unverifiable", "permission", "", "chmod -R u+rX '/d a'"),
        ("unverifiable", "io-error", "", "latentcache verify /c --field m:K"),
        ("unverifiable", "not-encoded", "", AGAIN),
        ("drift", "x", "", f"{AGAIN} --repair --yes; {BUILD}"),
        ("touched", "stat-changed", "", ""),
        ("quarantined", "empty", "", ""),
    ],
)
def test_every_category_has_the_command_that_mends_it(category, reason, data, expected):
    words = {"common": "--field m:K", "recipe": "--model M", "run": "--device cpu", "allow_failed": "2%"}
    fixes = Commands(**words, cache=Path("/c"), root=Path("/d a"), data=data, reencode="--reencode 9")
    assert fixes(Finding(category=category, reason=reason)).fix == expected
