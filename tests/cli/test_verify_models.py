"""``verify`` compares the models that a cache records, without being asked."""

import shutil

import pytest
from in_threads import in_threads
from made_pipelines import make_pipeline, tiny_vae
from safetensors.numpy import load_file, save_file
from small_cache import draw_four

from latentcache import open_cache, verify_cache
from latentcache.cli.app import main
from latentcache.errors import StaleCacheError

pytestmark = pytest.mark.usefixtures("threads")
VAE, TEXT = "vae/diffusion_pytorch_model.safetensors", "text_encoder_2/model.safetensors"
FIELDS = ["latents", "pooled_prompt_embeds", "prompt_embeds"]


def train_further(weights):
    """Save other weights of the same names and shapes, as a trainer does."""
    save_file({name: values * 1.01 for name, values in load_file(weights).items()}, weights)


def stale_by(report):
    """(Field, reason) of the stale samples in ``verify --json``."""
    return {(item["field"], item["reason"]) for item in report.json["items"] if item["category"] == "stale"}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A pipeline, images and their cache, and a copy of the three."""
    folder = tmp_path_factory.mktemp("models") / "now"
    make_pipeline("StableDiffusionXLPipeline", folder / "sdxl", vae=tiny_vae())
    (draw_four(folder / "data") / "p3.txt").write_text("caption 3")
    words = ("--model", folder / "sdxl", "--resolution", "64", "--bucket-step", "32")
    with in_threads():
        assert main([str(word) for word in ("build", folder / "data", "--out", folder / "cache", *words)]) == 0
    shutil.copytree(folder, folder.with_name("copy"))
    return folder


@pytest.fixture
def folder(built):
    shutil.rmtree(built)
    return shutil.copytree(built.with_name("copy"), built)


@pytest.fixture
def model(folder):
    return folder / "sdxl"


@pytest.fixture
def cache(folder):
    return folder / "cache"


def test_other_vae_weights_in_the_same_folder_are_stale_until_the_next_build(run, cache, model, folder):
    train_further(model / VAE)
    for words in ([], ["--full"]):
        done = run("verify", cache, *words, "--json")
        assert (done.status, done.json["counts"]["stale"]) == (1, 4)
        assert stale_by(done) == {("latents", "recipe:encoder.fingerprint")}
    assert verify_cache(cache).counts["stale"] == 4
    built = run("build", folder / "data", "--out", cache, "--json").json["fields"]
    assert {name: field["encoded"] for name, field in built.items()} == dict(zip(FIELDS, (4, 0, 0), strict=True))
    assert run("verify", cache).status == 0


def test_a_changed_text_encoder_makes_embeddings_stale_and_no_latents(run, cache, model, folder):
    train_further(model / TEXT)
    assert stale_by(run("verify", cache, "--json")) == {(name, "recipe:fingerprint") for name in FIELDS[1:]}
    built = run("build", folder / "data", "--out", cache, "--json").json["fields"]
    assert {name: field["encoded"] for name, field in built.items()} == dict(zip(FIELDS, (0, 4, 4), strict=True))
    assert run("verify", cache).status == 0


def test_a_pipeline_that_is_given_compares_all_its_fields(run, cache, model, folder):
    done = run("verify", cache, "--text-encoder", model, "--json")
    assert (done.status, done.json["not_compared"]) == (0, [])
    open_cache(cache).check(model)
    other = shutil.copytree(model, folder / "other")
    for file in (VAE, TEXT):
        train_further(other / file)
    reasons = {("latents", "recipe:encoder.fingerprint"), *((name, "recipe:fingerprint") for name in FIELDS[1:])}
    assert stale_by(run("verify", cache, "--model", other, "--json")) == reasons
    assert run("verify", cache).status == 0, "the recorded pipeline is as it was"
    with pytest.raises(StaleCacheError, match=r"encoder\.fingerprint: [0-9a-f]{8} -> [0-9a-f]{8}, fingerprint: "):
        open_cache(cache).check(other)


def test_a_model_that_is_not_there_is_named_and_no_failure(run, cache, model, folder):
    model.rename(model.with_name("moved"))
    words = {"latents": ("VAE", "--model takes a VAE")} | dict.fromkeys(
        FIELDS[1:], ("text encoder", "--text-encoder")
    )
    done = run("verify", cache, "--json")
    sentences = {sentence.partition(":")[0]: sentence for sentence in done.json["not_compared"]}
    assert (done.status, sorted(sentences)) == (0, FIELDS)
    for name, (encoder, flag) in words.items():
        lost = f"{name}: {encoder} {model} was not checked (no such file or folder); check the path; {flag}"
        assert sentences[name].startswith(lost)
    assert set(sentences.values()) <= set(run("verify", cache).out.splitlines())
    other = run("verify", cache, "--resolution", "128", "--json")
    assert (other.status, other.json["error"]["slug"]) == (2, "model-not-found"), "no flag is ignored in silence"
    moved = ("--model", model.with_name("moved"))
    compared = run("verify", cache, *moved, "--json")
    assert (compared.status, compared.json["not_compared"]) == (0, [])
    assert run("build", folder / "data", "--out", cache, *moved, "--json").json["counts"]["encoded"] == 0
    assert run("verify", cache, "--json").json["not_compared"] == [], "the build records the new place"


def test_a_model_whose_weights_are_cut_is_not_compared(run, cache, model):
    weights = model / VAE
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run("verify", cache, "--json")
    assert done.status == 0
    (lost,) = done.json["not_compared"]
    assert "damaged safetensors file" in lost
    assert str(model) in lost
