import pytest
from small_cache import build

from latentcache.pipeline.decode import decode
from latentcache.pipeline.resize import pixel_hash, resize_crop
from latentcache.store.generation import load_generation
from latentcache.verify import placements
from latentcache.verify.placements import Placements
from latentcache.verify.run import verify_cache


def test_another_rule_makes_the_samples_stale_that_it_moves(cache, monkeypatch):
    """As if a version with another rule had built it: pictures of 64 x 96 would go elsewhere today."""
    real = placements.place

    def turned(size, table):
        other = next(bucket for bucket in table.sizes if bucket != real(size, table).bucket)
        return placed_in(other) if size.height < size.width else real(size, table)

    def placed_in(bucket):
        return type("Placed", (), {"bucket": bucket})

    monkeypatch.setattr(placements, "place", turned)
    stale = dict.fromkeys(("p0.png", "p3.png"), ("stale", "geometry-changed"))
    findings = verify_cache(cache).findings
    assert {f.path: (f.category, f.reason) for f in findings} == stale
    finding = findings[0]
    assert finding.expected != finding.found == "48x80"


@pytest.mark.parametrize("resolutions", [(64,), (64, 128)])
def test_nothing_has_moved_where_the_rule_is_the_same(data, tmp_path, resolutions):
    build(data, tmp_path / "cache", resolutions=resolutions)
    assert list(Placements(load_generation(tmp_path / "cache")).moved()) == []


def test_placements_are_those_that_were_cut(cache, data):
    """Cutting the picture as they say gives the hash beside them."""
    generation = load_generation(cache)
    found = Placements(generation)
    for number, name in enumerate(generation.samples.names):
        pixels = decode((data / name).read_bytes(), generation.recipe.pixels)
        size = found.size(number)
        assert pixels.shape[:2] == (size.height, size.width)
        for placement, expected in found.placed(number):
            assert pixel_hash(resize_crop(pixels, placement, generation.recipe.pixels.resample)) == expected
