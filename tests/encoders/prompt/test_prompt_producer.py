"""Embeddings in a cache equal the pipeline's own ``encode_prompt``, token ids what it gives its text encoders."""

import inspect
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from latentcache.encoders.prompt.describe import describe_ids, describe_sequence, describe_vector
from latentcache.encoders.prompt.pipelines import PIPELINES
from latentcache.encoders.prompt.producer import (
    IdsProducer,
    PromptProducer,
    _PipelineEncoder,
    call_default,
    lengths,
)
from latentcache.errors import EncoderError
from latentcache.fields.dtypes import as_floats
from latentcache.fields.prompt_embeds import PromptSettings
from latentcache.fields.protocol import DescribeContext, Job, Output, ProducerContext

OUTPUTS = [(name, output) for name, row in PIPELINES.items() for output in row]
TEXTS = ["a red fox", "", "a caption about a dog and a cat, " * 3, "word " * 300]


def ask(target, /, **arguments):
    return lengths(**arguments) if target.endswith(":lengths") else call_default(**arguments)


def described(folder, output, **settings):
    describe = describe_sequence if output == "prompt_embeds" else describe_vector
    settings = PromptSettings(text_encoder=str(folder), **{"text_storage_dtype": "float32"} | settings)
    return describe(settings, DescribeContext(ask=ask))


def encoded(description, texts=TEXTS, producer_class=PromptProducer):
    producer = producer_class(description.producer, description.recipe, ProducerContext(root=""))
    producer.open()
    outputs = (Output(item=0, group=0),)
    jobs = [Job(sample=0, name="", inputs={"caption": {"text": text}}, outputs=outputs) for text in texts]
    items = producer.encode([item for job in jobs for item in producer.prepare(job, {})])
    producer.close()
    return items


def asked_alone(pipe, output, text):
    """Encode one caption with the class's own ``encode_prompt``; drop the masked padding."""
    encode, call = (inspect.signature(method).parameters for method in (pipe.encode_prompt, type(pipe).__call__))
    shared = ("max_sequence_length", "complex_human_instruction", "clean_caption")
    arguments = {name: call[name].default for name in shared if name in encode and name in call}
    more = {"do_classifier_free_guidance": False, "num_images_per_prompt": 1, "prompt_2": None, "prompt_3": None}
    arguments |= {name: value for name, value in more.items() if name in encode}
    with torch.inference_mode():
        result = pipe.encode_prompt([text], device="cpu", **arguments)
    if output == "pooled_prompt_embeds":
        return result[1 if type(pipe).__name__ == "FluxPipeline" else 2][0]
    embeds = result[0][0]
    if PIPELINES[type(pipe).__name__][output].trim and not isinstance(result[0], list) and result[1] is not None:
        embeds = embeds[result[1][0].bool()]
    return embeds


@pytest.mark.parametrize(("name", "output"), OUTPUTS)
def test_items_equal_those_of_the_pipeline(pipelines, name, output):
    pipe, folder = pipelines(name)
    description, texts = described(folder, output), TEXTS[:2] if name == "Flux2KleinPipeline" else TEXTS  # 28 layers
    for text, item in zip(texts, encoded(description, texts), strict=True):
        expected, array = asked_alone(pipe, output, text), torch.from_numpy(item.array)
        if name == "WanPipeline":  # the model attends to zeros: those that the loader pads with
            array = torch.nn.functional.pad(array, (0, 0, 0, len(expected) - len(array)))
        assert array.shape == expected.shape
        torch.testing.assert_close(array, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "output"), OUTPUTS)
def test_lengths_are_the_defaults_of_the_pipeline(pipelines, name, output):
    pipe, row = pipelines(name)[0], PIPELINES[name][output]
    default = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
    if output == "prompt_embeds" and default is not None:
        assert row.length == default.default + (77 if name == "StableDiffusion3Pipeline" else 0)


@pytest.mark.parametrize("name", ["SanaPipeline", "StableDiffusionPipeline", "QwenImagePipeline"])
def test_truncated_captions_are_counted(pipelines, name):
    items = encoded(described(pipelines(name)[1], "prompt_embeds"), ["short", "word " * 300])
    assert items[0].columns["cut"] == 0
    assert items[1].columns["cut"] > 900


def test_a_shorter_length_equals_the_pipeline(pipelines):
    pipe, folder = pipelines("FluxPipeline")
    (item,) = encoded(described(folder, "prompt_embeds", text_length=16), ["a red fox"])
    with torch.inference_mode():
        expected = pipe.encode_prompt(["a red fox"], device="cpu", max_sequence_length=16)[0][0]
    torch.testing.assert_close(torch.from_numpy(item.array), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
def test_storage_types_round_once(pipelines, storage):
    folder = pipelines("StableDiffusionPipeline")[1]
    (exact,) = encoded(described(folder, "prompt_embeds"), ["a red fox"])
    (item,) = encoded(described(folder, "prompt_embeds", text_storage_dtype=storage), ["a red fox"])
    rounded = torch.from_numpy(exact.array).to(getattr(torch, storage)).float().numpy()
    assert np.array_equal(as_floats(item.array), rounded)


def test_weights_that_lack_a_tensor_are_an_error(pipelines, tmp_path):
    folder = shutil.copytree(pipelines("StableDiffusionPipeline")[1], tmp_path / "pipeline")
    file = folder / "text_encoder" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("final_layer_norm.weight"))
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(EncoderError, match="text encoders") as error:
        encoded(described(folder, "prompt_embeds"), ["a"])
    assert "lacks 1 tensors" in error.value.why


def test_one_call_is_fetched_while_the_next_one_runs(pipelines, monkeypatch):
    """A device is never idle for a copy, and holds two calls at most."""
    events = []
    monkeypatch.setattr("latentcache.encoders.prompt.producer._CPU_TOKENS", 128)
    run, stored = _PipelineEncoder._run, _PipelineEncoder._stored

    def noted_run(self, texts, length):
        events.append("run")
        return run(self, texts, length)

    def noted_stored(self, values):
        events.append("fetch")
        return stored(self, values)

    monkeypatch.setattr(_PipelineEncoder, "_run", noted_run)
    monkeypatch.setattr(_PipelineEncoder, "_stored", noted_stored)
    encoded(described(pipelines("WanPipeline")[1], "prompt_embeds"), ["word " * count for count in (20, 30, 25)])
    order = "".join(event[0] for event in events)
    assert order.endswith("rrrfrff")  # the lengths, then three calls


# token ids

LENGTHS = {
    "StableDiffusionPipeline": (77,),
    "StableDiffusionXLPipeline": (77, 77),
    "StableDiffusion3Pipeline": (77, 77, 256),
    "FluxPipeline": (77, 512),
    "QwenImagePipeline": (34 + 512,),
    "WanPipeline": (512,),
    "ZImagePipeline": (512,),
}


def described_ids(folder, **settings):
    return describe_ids(PromptSettings(text_encoder=str(folder), **settings), DescribeContext(ask=ask))


def given_to_encoders(pipe, parts, text, arguments):
    """Text encoder -> ids and mask (or None) that the pipeline gives it for a text."""
    inputs, hooks = {}, []
    for part in parts:

        def keep(_, args, kwargs, part=part):
            inputs[part] = args[0] if args else kwargs["input_ids"], kwargs.get("attention_mask")

        hooks.append(getattr(pipe, part).register_forward_pre_hook(keep, with_kwargs=True))
    with torch.inference_mode():
        for output in PIPELINES[type(pipe).__name__].values():
            output.run(pipe, [text], torch.device("cpu"), output.length, arguments if output.arguments else {})
    for hook in hooks:
        hook.remove()
    return inputs


@pytest.mark.parametrize("name", PIPELINES)
def test_ids_and_masks_are_those_of_the_text_encoders(pipelines, name):
    pipe, folder = pipelines(name)
    description = described_ids(folder)
    assert description.recipe.lengths == LENGTHS.get(name, description.recipe.lengths)
    parts = sorted({part for output in PIPELINES[name].values() for part in output.parts})
    arguments = {key: json.loads(value) for key, value in description.recipe.arguments if not key.startswith("has ")}
    for text, encoded_item in zip(TEXTS, encoded(description, producer_class=IdsProducer), strict=True):
        item = encoded_item.array
        assert (item.dtype, item.shape) == (np.int32, description.recipe.shape)
        inputs = given_to_encoders(pipe, parts, text, arguments)
        for part, (ids, mask) in zip(parts, description.recipe.split(item), strict=True):
            expected, attended = inputs[part]
            length = min(len(ids), expected.shape[1])  # Qwen-Image pads to the longest and cuts the embeddings
            np.testing.assert_array_equal(ids[:length], expected[0, :length])
            assert not mask[length:].any()
            if attended is not None:
                np.testing.assert_array_equal(mask[:length], attended[0, :length])


def test_ids_depend_on_tokenizers_and_length_alone(pipelines):
    folder = pipelines("FluxPipeline")[1]
    recipe = described_ids(folder).recipe
    assert described_ids(folder, text_storage_dtype="float32", text_compute_dtype="bfloat16").recipe == recipe
    shorter = described_ids(folder, text_length=64).recipe
    assert (shorter.lengths, shorter.recipe_id != recipe.recipe_id) == ((77, 64), True)
    beside = describe_sequence(PromptSettings(text_encoder=str(folder), text_length=64), DescribeContext(ask=ask))
    assert describe_ids(PromptSettings(), DescribeContext(ask=ask, followed=beside)).recipe == shorter
    cached = DescribeContext(recipe=shorter, provenance={"text_encoder": str(folder)})
    assert describe_ids(PromptSettings(), cached).recipe == shorter, "no tokenizer runs for an up-to-date cache"
