from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.verify.findings import CATEGORIES, PROBLEMS, Finding, VerifyReport, count, mender, spoken, worst

FINDINGS = st.builds(Finding, category=st.sampled_from(CATEGORIES[:-1]), reason=st.text(max_size=5))


def report(**counts):
    everything = dict.fromkeys(CATEGORIES, 0) | counts
    return VerifyReport(
        mode="fast", generation=1, findings=(), counts=everything, samples=9, building=False, elapsed_s=0.0
    )


@pytest.mark.parametrize("category", CATEGORIES)
def test_only_problems_and_refused_files_are_status_1(category):
    assert report(**{category: 1}).exit_code() == int(category in PROBLEMS or category == "quarantined")


@pytest.mark.parametrize(("number", "allowed", "status"), [(0, 0, 0), (1, 0, 1), (1, 1, 0), (5, 4, 1), (5, 5, 0)])
def test_allowed_quarantined_are_fine(number, allowed, status):
    assert report(quarantined=number).exit_code(allowed) == status
    assert report(quarantined=number, stale=1).exit_code(allowed) == 1


@given(st.lists(FINDINGS), st.integers(0, 9))
def test_every_finding_is_counted_once(findings, num_ok):
    counts = count(findings, num_ok)
    assert set(counts) == set(CATEGORIES)
    assert sum(counts.values()) == len(findings) + num_ok
    assert counts["ok"] == num_ok


@given(st.lists(FINDINGS, min_size=1))
def test_the_worst_is_the_first_in_the_order(findings):
    decided = worst(findings)
    assert decided is not None
    rank = CATEGORIES.index(decided.category)
    assert all(rank <= CATEGORIES.index(finding.category) for finding in findings)
    assert decided is next(finding for finding in findings if finding.category == decided.category)


def test_nothing_is_worst_of_nothing():
    assert worst([]) is None


@pytest.mark.parametrize("category", CATEGORIES[:-1])
def test_every_category_has_a_hint_and_problems_have_a_fix(category):
    finding = Finding(category=category, reason="x").with_defaults("mend it")
    assert finding.hint
    assert finding.fix == ("mend it" if category in PROBLEMS | {"orphan"} else "")


def test_what_a_finding_says_itself_stays():
    finding = Finding(category="stale", reason="x", hint="h", fix="f").with_defaults("mend it")
    assert (finding.hint, finding.fix) == ("h", "f")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((512, 768), "512, 768"),
        ([[64, 96], [96, 64]], "64x96, 96x64"),
        ([], "none"),
        (None, "null"),
        (True, "true"),
        (0.5, "0.5"),
        ("float16", "float16"),
        ({"kind": "none", "mean": ()}, "kind none, mean none"),
    ],
)
def test_values_are_said_without_the_marks_of_a_language(value, text):
    assert spoken(value) == text


def test_the_build_that_mends_allows_what_the_last_one_allowed():
    stale = Finding(category="stale", reason="source-changed", path="a")
    assert mender(Path("c"), Path("d"))(stale) == "latentcache build d --out c"
    assert mender(Path("c"), Path("d"), "", "2%")(stale) == "latentcache build d --out c --allow-failed 2%"
