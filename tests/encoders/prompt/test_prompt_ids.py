"""Token ids in a cache are those that a pipeline's own ``encode_prompt`` gives its text encoders, masks included."""

import json

import numpy as np
import pytest
import torch

from latentcache.encoders.prompt.describe import describe_ids, describe_sequence
from latentcache.encoders.prompt.pipelines import PIPELINES
from latentcache.encoders.prompt.producer import IdsProducer, call_default, lengths
from latentcache.fields.prompt_embeds import PromptSettings
from latentcache.fields.protocol import DescribeContext, Job, Output, ProducerContext

TEXTS = ["a red fox", "", "word " * 300]
LENGTHS = {
    "StableDiffusionPipeline": (77,),
    "StableDiffusionXLPipeline": (77, 77),
    "StableDiffusion3Pipeline": (77, 77, 256),
    "FluxPipeline": (77, 512),
    "QwenImagePipeline": (34 + 512,),
    "WanPipeline": (512,),
    "ZImagePipeline": (512,),
}


def ask(target, /, **arguments):
    return lengths(**arguments) if target.endswith(":lengths") else call_default(**arguments)


def described(folder, **settings):
    return describe_ids(PromptSettings(text_encoder=str(folder), **settings), DescribeContext(ask=ask))


def items(description, texts=TEXTS):
    producer = IdsProducer(description.producer, description.recipe, ProducerContext(root=""))
    producer.open()
    jobs = [Job(sample=n, name="", inputs={"caption": {"text": t}}, outputs=(Output(item=n, group=0),)) for n, t in
            enumerate(texts)]  # fmt: skip
    return [item.array for item in producer.encode([item for job in jobs for item in producer.prepare(job, {})])]


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
    description = described(folder)
    assert description.recipe.lengths == LENGTHS.get(name, description.recipe.lengths)
    parts = sorted({part for output in PIPELINES[name].values() for part in output.parts})
    arguments = {key: json.loads(value) for key, value in description.recipe.arguments if not key.startswith("has ")}
    for text, item in zip(TEXTS, items(description), strict=True):
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
    recipe = described(folder).recipe
    assert described(folder, text_storage_dtype="float32", text_compute_dtype="bfloat16").recipe == recipe
    shorter = described(folder, text_length=64).recipe
    assert (shorter.lengths, shorter.recipe_id != recipe.recipe_id) == ((77, 64), True)
    beside = describe_sequence(PromptSettings(text_encoder=str(folder), text_length=64), DescribeContext(ask=ask))
    assert describe_ids(PromptSettings(), DescribeContext(ask=ask, followed=beside)).recipe == shorter
    cached = DescribeContext(recipe=shorter, provenance={"text_encoder": str(folder)})
    assert describe_ids(PromptSettings(), cached).recipe == shorter, "no tokenizer runs for an up-to-date cache"
