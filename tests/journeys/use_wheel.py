"""Runs in the environment of test_wheel.py, which has no developer tools: ``make FOLDER``, then ``check FOLDER``."""

import json
import sys
from pathlib import Path

import diffusers
import torch
import transformers
from made_pipelines import LETTERS, clip, tiny_vae

import latentcache


def tokenizer(folder):
    """A CLIP tokenizer from files, which every version of transformers reads."""
    folder.mkdir()
    pieces = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
    vocabulary.write_text(json.dumps({piece: number for number, piece in enumerate(pieces)}))
    merges.write_text("#version: 0.2\n")
    return transformers.CLIPTokenizer(vocabulary, merges, model_max_length=77)


def make(folder):
    """Save a tiny SDXL without its denoiser."""
    torch.manual_seed(0)
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=clip().eval(),
        text_encoder_2=clip(transformers.CLIPTextModelWithProjection, hidden=24).eval(),
        tokenizer=tokenizer(folder.with_name("words")),
        tokenizer_2=tokenizer(folder.with_name("words2")),
        unet=None,
        scheduler=None,
    )
    pipe.save_pretrained(folder)


def check(folder):
    """Compare an epoch with the pipeline's own embeddings."""
    pipe = diffusers.StableDiffusionXLPipeline.from_pretrained(folder, unet=None, scheduler=None)
    cache, seen = latentcache.open_cache("images.latentcache"), 0
    for batch in cache.loader(batch_size=2, seed=0, remainder="partial"):
        for caption, embeds in zip(batch["captions"], batch["prompt_embeds"], strict=True):
            wanted = pipe.encode_prompt(caption, device="cpu", do_classifier_free_guidance=False)[0][0]
            assert torch.equal(embeds, wanted.to(embeds.dtype)), caption
            seen += 1
    print(f"{seen} samples are equal to encode_prompt")  # noqa: T201


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](Path(sys.argv[2]))
