"""Recipes name the text encoders; unusable pipelines are rejected before torch is loaded."""

import json
import shutil
from dataclasses import replace

import pytest

from latentcache.encoders.prompt.describe import describe_sequence, describe_vector, locate_pipeline, text_settings
from latentcache.encoders.prompt.producer import call_default
from latentcache.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from latentcache.fields.prompt_embeds import PromptSettings
from latentcache.fields.protocol import DescribeContext

CONTEXT = DescribeContext(ask=lambda _, **arguments: call_default(**arguments))


def recipe_of(folder, cached=None, **settings):
    return describe_sequence(
        PromptSettings(text_encoder=str(folder), **settings), replace(CONTEXT, **cached or {})
    ).recipe


@pytest.fixture
def flux(pipelines, tmp_path):
    """A private copy of the Flux pipeline."""
    return shutil.copytree(pipelines("FluxPipeline")[1], tmp_path / "flux")


def test_a_recipe_depends_on_the_encoders_in_use_alone(flux, tmp_path):
    before = recipe_of(flux)
    moved = shutil.copytree(flux, tmp_path / "moved")
    for name in ("text_encoder", "tokenizer"):  # CLIP gives only the pooled vector
        config = next((moved / name).glob("*config.json"))
        config.write_text(json.dumps(json.loads(config.read_text()) | {"surprise": 1}))
    assert recipe_of(moved).recipe_id == before.recipe_id
    pooled = [describe_vector(PromptSettings(text_encoder=str(folder)), CONTEXT).recipe for folder in (flux, moved)]
    assert pooled[0].recipe_id != pooled[1].recipe_id


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("text_encoder_2/model.safetensors", "fingerprint"),
        ("text_encoder_2/config.json", "config"),
        ("tokenizer_2/tokenizer.json", "tokenizer"),
    ],
)
def test_each_part_of_an_encoder_is_in_the_recipe(flux, file, part):
    before, path = recipe_of(flux), flux / file
    data = bytearray(path.read_bytes())
    if path.suffix == ".json":
        data = json.dumps(json.loads(data) | {"surprise": 1}).encode()
    else:
        data[-1] ^= 1
    path.write_bytes(data)
    after = recipe_of(flux)
    assert {name for name, value in after.as_json().items() if value != before.as_json()[name]} == {part}


def test_the_library_version_of_a_configuration_is_not_in_the_recipe(flux):
    before, path = recipe_of(flux), flux / "text_encoder_2" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"transformers_version": "9", "dtype": "float16"}))
    assert recipe_of(flux).recipe_id == before.recipe_id


def test_unset_settings_follow_the_cache(flux):
    description = describe_sequence(
        PromptSettings(text_encoder=str(flux), text_length=64, text_storage_dtype="float32"), CONTEXT
    )
    cached = {"recipe": description.recipe, "provenance": description.provenance}
    assert describe_sequence(PromptSettings(), replace(CONTEXT, **cached)).recipe == description.recipe
    assert recipe_of(flux, cached, text_length=32).length == 32


def test_a_pipeline_sets_its_own_outputs(pipelines, flux):
    settings = PromptSettings(text_length=64)
    assert text_settings("prompt_embeds", str(flux), settings) == PromptSettings(
        text_encoder=str(flux), text_length=64
    )
    assert text_settings("pooled_prompt_embeds", str(flux), settings).text_encoder == str(flux)
    assert text_settings("pooled_prompt_embeds", str(pipelines("SanaPipeline")[1]), settings) is None
    assert text_settings("prompt_embeds", str(flux / "text_encoder"), settings) is None, "the model of another field"
    assert text_settings("prompt_embeds", "stub", settings) is None, "the model of another field"


def test_a_hub_id_gives_the_settings_of_its_folder(flux, monkeypatch, tmp_path):
    """Only the index is downloaded until the embeddings are described."""
    requests = []

    def download(name, wanted, **words):
        requests.append(wanted.files)
        return {"org/flux": flux, "org/vae": tmp_path}[name]

    monkeypatch.setattr("latentcache.encoders.files.download", download)
    settings = text_settings("pooled_prompt_embeds", "org/flux", PromptSettings())
    assert settings == PromptSettings(text_encoder="org/flux")
    assert text_settings("prompt_embeds", "org/vae", PromptSettings()) is None
    assert {tuple(files) for files in requests} == {("model_index.json",)}
    assert locate_pipeline("org/flux", "prompt_embeds").cls == "FluxPipeline"
    assert any("text_encoder" in pattern for pattern in requests[-1])


def remove(*names):
    return lambda folder: [shutil.rmtree(folder / name) for name in names]


def pickled(folder):
    path = folder / "text_encoder_2" / "model.safetensors"
    path.rename(path.with_name("pytorch_model.bin"))


def other_class(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "MyPipeline"}))


def custom_encoder(folder):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"text_encoder_2": ["my_module", "MyEncoder"]}))


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (remove("text_encoder_2"), "has no text_encoder_2"),
        (remove("tokenizer_2"), "has no tokenizer_2"),
        (pickled, "only pickle weights"),
        (other_class, "MyPipeline"),
        (custom_encoder, "my_module.MyEncoder"),
        (lambda folder: (folder / "text_encoder_2" / "model.safetensors").write_bytes(b"GGUF" * 9), "GGUF"),
        (lambda folder: (folder / "text_encoder_2" / "config.json").write_text("{"), "config.json is not JSON"),
    ],
)
def test_an_unusable_pipeline_is_rejected_with_the_reason(flux, break_it, words):
    break_it(flux)
    with pytest.raises(UnsupportedModelError) as caught:
        recipe_of(flux)
    assert words in f"{caught.value.what} {caught.value.why}"
    assert caught.value.fix


def test_a_missing_folder_and_a_folder_without_a_pipeline(tmp_path):
    with pytest.raises(ModelNotFoundError):
        recipe_of(tmp_path / "nowhere")
    with pytest.raises(UnsupportedModelError, match="not a pipeline"):
        recipe_of(tmp_path)
    with pytest.raises(UsageError, match="no pipeline was named"):
        describe_sequence(PromptSettings(), CONTEXT)


def test_a_length_that_is_a_property_of_the_model_is_rejected(pipelines):
    with pytest.raises(UsageError, match="text_length=64"):
        recipe_of(pipelines("StableDiffusionPipeline")[1], text_length=64)
    with pytest.raises(UsageError, match="77 tokens of CLIP before those of T5"):
        recipe_of(pipelines("StableDiffusion3Pipeline")[1], text_length=77)


def test_libraries_that_clean_captions_are_in_the_recipe_and_a_missing_one_is_reported(pipelines, monkeypatch):
    """Cleaned captions depend on the versions of these libraries."""
    folder, there = pipelines("PixArtSigmaPipeline")[1], {"ftfy": "6.3", "beautifulsoup4": "4.13"}
    descriptions = []
    for has in (there, {**there, "ftfy": ""}):
        monkeypatch.setattr(
            "latentcache.encoders.prompt.describe.installed",
            lambda names, has=has: {name: has.get(name, "") for name in names},
        )
        descriptions.append(describe_sequence(PromptSettings(text_encoder=str(folder)), CONTEXT))
    assert descriptions[0].notes == ()
    assert [note for note in descriptions[1].notes if "pip install ftfy" in note]
    assert descriptions[0].recipe.recipe_id != descriptions[1].recipe.recipe_id
    cached = {"recipe": descriptions[0].recipe, "provenance": descriptions[0].provenance}
    again = describe_sequence(PromptSettings(), replace(CONTEXT, **cached)).recipe
    differing = [name for name, *_ in descriptions[0].recipe.differences(again)]
    assert differing == ["arguments"], "another machine without the library encodes the captions anew, and says so"


@pytest.mark.parametrize(("computes_bfloat16", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_a_card_that_emulates_bfloat16_computes_float32(flux, computes_bfloat16, precision):
    context = DescribeContext(device="cuda:0", ask=lambda target, **arguments: computes_bfloat16)
    first = describe_sequence(PromptSettings(text_encoder=str(flux)), context)
    assert (first.recipe.compute_dtype, first.recipe.storage_dtype) == (precision, "bfloat16")
    cached = {"recipe": first.recipe, "provenance": first.provenance, "ask": None}
    assert describe_sequence(PromptSettings(), replace(context, **cached)).recipe == first.recipe
