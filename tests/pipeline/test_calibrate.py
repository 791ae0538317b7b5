import pytest
from small_builds import folder_of, settings
from tiny_vae import tiny_vae

from latentcache.encoders.describe import describe_model
from latentcache.encoders.opening import open_encoder
from latentcache.encoders.stub import StubEncoder
from latentcache.errors import DeviceMemoryError
from latentcache.pipeline.build import build_cache
from latentcache.pipeline.calibrate import known_noise, measured_noise
from latentcache.pipeline.preflight import Before
from latentcache.store.generation import load_generation

NONE = {"largest": 0.0, "mean": 0.0}


def provenance(cache):
    return load_generation(cache).manifest["provenance"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_vae(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("name", ["stub", "demo"])
def test_exact_encoders_have_no_noise(tmp_path, name):
    found = settings(folder_of(tmp_path / "data", 1), out=tmp_path / "cache", recipe={"model": name})
    build_cache(found)
    assert provenance(tmp_path / "cache")["noise_floor"] == NONE
    assert provenance(tmp_path / "cache")["devices"] == ["cpu"]


def test_a_build_records_the_noise_of_its_model_and_keeps_it(tmp_path, model):
    data, cache = folder_of(tmp_path / "data", 2), tmp_path / "cache"
    build_cache(settings(data, out=cache, recipe={"model": str(model)}))
    made = provenance(cache)
    assert made["devices"] == ["cpu"]
    assert 0 <= made["noise_floor"]["mean"] <= made["noise_floor"]["largest"] < 0.01
    (data / "000.txt").write_text("a caption: nothing is encoded for it")
    assert build_cache(settings(data, out=cache, recipe={"model": None})).encoded == 0
    assert load_generation(cache).number == 2
    assert provenance(cache)["noise_floor"] == made["noise_floor"]


def test_other_weights_know_nothing_of_the_noise_of_the_last(tmp_path, model):
    data, cache = folder_of(tmp_path / "data", 1), tmp_path / "cache"
    build_cache(settings(data, out=cache))
    generation, description = load_generation(cache), describe_model(str(model))
    other = generation.recipe.with_encoder(fingerprint="ff")
    assert known_noise(Before(generation=generation), other, description) == {}
    assert known_noise(Before(generation=generation), generation.recipe, description)["noise_floor"] == NONE
    assert known_noise(Before(), generation.recipe, description) == {}


def test_a_cache_of_two_devices(model):
    encoder = open_encoder(describe_model(str(model)), device="cpu")
    known = {"devices": ["cuda Y"], "noise_floor": {"largest": 0.5, "mean": 0.1}}
    assert measured_noise(encoder, known) == known | {"devices": ["cpu", "cuda Y"]}


def test_no_room_for_three_pictures():
    class Small(StubEncoder):
        def encode(self, pixels, *, precise=False):
            if len(pixels) > 1:
                raise DeviceMemoryError("no memory left")
            return super().encode(pixels)

    assert measured_noise(Small(), {}) == {}
