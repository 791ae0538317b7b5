"""What is noise and what is drift: arithmetic here, whole caches in tests/pipeline/test_pipeline_reencode.py."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_cache import damage_payload

from latentcache.encoders.storage import from_bfloat16, to_bfloat16
from latentcache.recipe import EncoderSpec, GeometrySettings, PixelProfile, Recipe
from latentcache.store.generation import load_generation
from latentcache.store.layout import CacheLayout
from latentcache.store.reader import EntryReader
from latentcache.verify.drift import ELSEWHERE_IN_BFLOAT16, LEAST, apart, as_floats, draw, tolerance, with_model
from latentcache.verify.run import verify_cache
from latentcache.verify.selection import Depth

SPEC = EncoderSpec(family="stub", fingerprint="00", config="00", channels=4, factor=8, multiple=8)


def recipe_in(compute):
    spec = EncoderSpec(
        family="x", fingerprint="00", config="00", channels=4, factor=8, multiple=8, compute_dtype=compute
    )
    return Recipe(geometry=GeometrySettings(), pixels=PixelProfile(resample="lanczos-pil"), encoder=spec)


@dataclass
class Entry:
    row: int
    latents: np.ndarray
    same_pixels: bool = True
    cause: str = ""
    detail: str = ""


@dataclass
class Changed:
    """An encoder that gives what is stored, changed by a function of row and values."""

    cache: Path
    change: object
    seen: list = field(default_factory=list)
    now: EncoderSpec | None = None
    device: str = "cpu"

    def spec(self, generation):
        return self.now or generation.recipe.encoder

    def encode(self, generation, root, rows):
        reader = EntryReader(CacheLayout(self.cache), generation)
        for row in rows:
            self.seen.append(row)
            found = self.change(row, None if row < 0 else reader.read(row)[1])
            yield found if isinstance(found, Entry) else Entry(row, found)


def again(cache, change, number=4, **more):
    encoder = Changed(cache, change)
    depth = Depth(reencode=number, **more)
    return verify_cache(cache, depth=depth, reencode=encoder), encoder


def same(row, latents):
    return latents


def test_what_is_equal_is_clean(shared):
    report, encoder = again(shared[1], same)
    assert (report.exit_code(), report.counts["ok"], report.checked["reencoded"]) == (0, 4, 4)
    assert sorted(encoder.seen) == [0, 1, 2, 3]
    found = report.reencoded
    assert (found.samples, found.entries, found.drifted, found.largest, found.mean) == (4, 4, 0, 0.0, 0.0)
    assert found.confidence == "4 clean: that is all of them"


def test_a_part_says_something_of_all(shared):
    report, encoder = again(shared[1], same, number=2, seed=5)
    assert len(encoder.seen) == report.reencoded.samples == 2
    assert report.reencoded.confidence.startswith("2 clean: 95 % sure that less than ")
    assert again(shared[1], same, number=2, seed=5)[1].seen == encoder.seen
    assert {tuple(again(shared[1], same, number=1, seed=seed)[1].seen) for seed in range(9)} > {(0,)}


def test_without_an_encoder_nothing_is_encoded(shared):
    report = verify_cache(shared[1])
    assert (report.reencoded, report.checked["reencoded"]) == (None, 0)


@pytest.mark.parametrize(
    ("change", "drifted"),
    [
        (lambda v: v + 0.01 * v.std(), False),
        (lambda v: v + 0.03 * v.std(), True),  # everywhere a little: the mean says so
        (lambda v: v + 0.5 * v.std() * (np.arange(v.size).reshape(v.shape) == 7), True),  # much in one place
        (lambda v: v + 0.05 * v.std() * (np.arange(v.size).reshape(v.shape) == 7), False),
        (lambda v: np.roll(v, 1, axis=-1), True),
        (lambda v: v * np.nan, True),
        (lambda v: v[:, 1:], True),
    ],
)
def test_noise_and_drift(shared, change, drifted):
    def changed(row, latents):
        return change(latents.astype(np.float32)) if row == 1 else latents

    report, _ = again(shared[1], changed)
    assert (report.exit_code(), report.counts["drift"], report.counts["ok"]) == (drifted, drifted, 4 - drifted)
    assert bool(report.reencoded.confidence) is not drifted
    if drifted:
        (finding,) = report.findings
        generation = load_generation(shared[1])
        name = generation.samples.names[int(generation.rows.sample[1])]
        assert (finding.category, finding.reason, finding.path) == ("drift", "latents", name)
        assert finding.key == generation.rows.key[1].tobytes().hex()
        assert finding.expected == "at most 0.1 std, 0.02 on average"
        assert "std" in finding.found
        assert finding.fix.startswith(f"latentcache verify {shared[1]} --reencode 4 --seed 0 --repair --yes; latent")


def test_other_pixels_are_named(shared):
    report, _ = again(shared[1], lambda row, latents: Entry(row, latents + 1, same_pixels=False))
    assert {finding.reason for finding in report.findings} == {"pixels"}
    assert all("decodes to other pixels" in finding.found for finding in report.findings)


def test_a_file_with_other_bytes_and_one_that_cannot_be_encoded(shared):
    causes = {0: ("source-changed", "ab"), 2: ("out-of-memory", "too much")}

    def changed(row, latents):
        return Entry(row, latents, True, *causes[row]) if row in causes else latents

    report, _ = again(shared[1], changed)
    found = {(f.category, f.reason, f.found) for f in report.findings}
    wanted = {("stale", "source-changed", "ab"), ("unverifiable", "not-encoded", "out-of-memory: too much")}
    assert found == wanted
    assert (report.reencoded.samples, report.reencoded.confidence, report.counts["ok"]) == (2, "", 2)
    fixes = {finding.category: finding.fix for finding in report.findings}
    assert fixes["unverifiable"] == f"latentcache verify {shared[1]} --reencode 4 --seed 0 --device cpu"


def test_what_is_wrong_already_is_not_encoded(cache, data):
    (data / "p0.png").unlink()
    report, encoder = again(cache, same)
    assert len(encoder.seen) == 3
    assert report.counts["stale"] == 1
    assert report.reencoded.confidence == "3 clean: that is all of them"


def test_damage_that_a_fast_check_passes_by_is_found(cache):
    name = damage_payload(cache, row=2)
    generation = load_generation(cache)

    class Blind(Changed):
        def encode(self, generation, root, rows):
            yield from (Entry(row, np.zeros((4, 8, 8), np.float16)) for row in rows if row == 2)

    report = verify_cache(cache, depth=Depth(reencode=4), reencode=Blind(cache, same))
    assert generation.number == 1
    (finding,) = report.findings
    assert (finding.category, finding.reason, finding.path) == ("corrupt", "payload", name)


def test_another_model_is_another_recipe_and_no_drift(shared):
    encoder = Changed(shared[1], same, now=SPEC)
    report = verify_cache(shared[1], depth=Depth(reencode=4), reencode=encoder)
    assert encoder.seen == []
    assert {finding.reason for finding in report.findings} == {"recipe:encoder.fingerprint"}
    assert (report.counts["stale"], report.counts["drift"], report.reencoded.entries) == (4, 0, 0)
    generation = load_generation(shared[1])
    assert with_model(generation, None, Changed(shared[1], same)) is None


def test_no_time_left(shared):
    report, encoder = again(shared[1], same, max_duration_s=0)
    assert (encoder.seen, report.reencoded.samples, report.reencoded.confidence) == ([], 0, "")


@given(st.integers(0, 60), st.integers(1, 70), st.integers(0, 5))
def test_the_draw(count, number, seed):
    fine = np.random.default_rng(count).random(count) < 0.7
    drawn = draw(fine, number, seed)
    assert len(set(drawn.tolist())) == len(drawn) == min(number, int(fine.sum()))
    assert fine[drawn].all()
    assert draw(fine, number, seed).tolist() == drawn.tolist()
    if len(drawn):
        fine[drawn[-1]] = False
        assert draw(fine, number, seed).tolist()[: len(drawn) - 1] == drawn.tolist()[:-1]


def test_the_tolerance():
    floor = {"largest": 0.05, "mean": 0.001}
    made = {"devices": ["cpu"], "noise_floor": floor}
    in_float, in_bfloat = recipe_in("float32"), recipe_in("bfloat16")
    assert tolerance({}, in_float, "cpu") == LEAST
    assert tolerance({}, in_bfloat, "cpu") == ELSEWHERE_IN_BFLOAT16
    assert tolerance(made | {"noise_floor": {"largest": 0.0, "mean": 0.0}}, in_bfloat, "cpu") == LEAST
    assert tolerance(made, in_float, "cpu").largest == pytest.approx(0.4)
    assert tolerance(made, in_bfloat, "cuda X") == ELSEWHERE_IN_BFLOAT16
    assert tolerance(made | {"devices": ["cpu", "cuda X"]}, in_bfloat, "cpu") == ELSEWHERE_IN_BFLOAT16


def test_differences():
    kept = np.array([[1.0, 3.0]], np.float32)
    found = apart(kept, np.array([[1.5, 3.0]], np.float32))
    assert (found.largest, found.mean, found.std, found.peak) == (0.5, 0.25, 1.0, 3.0)
    assert apart(kept, kept * np.inf).largest == np.inf
    values = np.array([1.5, -2.25, 1e-8], np.float32)
    assert (as_floats(to_bfloat16(values)) == from_bfloat16(to_bfloat16(values))).all()
