"""Captions per second of a build, beside a plain loop over ``encode_prompt`` in batches of eight.

Three pipelines with random text encoders of medium size: PixArt-Sigma (T5 gets a mask, captions are sorted by
length), Flux (T5 without a mask, every caption has 512 tokens) and Stable Diffusion XL (two CLIPs, 77 tokens).
Lengths of captions are log-normal. A build runs in its own processes and writes a cache; its rate is that of its
report, from the open encoder to the end. ``whole`` counts its whole time: the start of a process, imports, weights.
Candidates take turns in every round. Prints a Markdown table.

    python tools/bench_text.py [--rounds 5] [--captions 96] [--pipelines NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

from latentcache import BuildSettings, build_cache
from latentcache.fields.prompt_embeds import PromptSettings

BATCH = 8
#: Tokens per caption: median, sigma of the logarithm, maximum.
MEDIAN, SIGMA, MOST = 40, 0.8, 250
PIPELINES = ("PixArtSigmaPipeline", "FluxPipeline", "StableDiffusionXLPipeline")
WORDS = [f"{first}{second}{third}" for first in "bdfglm" for second in "aeiou" for third in "nrst"]
Size = dict[str, int]
MEDIUM = {"width": 512, "inner": 2048, "layers": 6, "heads": 8}
TINY = {"width": 32, "inner": 64, "layers": 2, "heads": 2}
Times = dict[str, dict[str, list[float]]]


def captions(count: int) -> list[str]:
    """Create distinct captions of random words."""
    random = np.random.default_rng(0)
    sizes = np.clip(random.lognormal(np.log(MEDIAN), SIGMA, count), 3, MOST).astype(int)
    return [" ".join(random.choice(WORDS, size)) for size in sizes]


def t5(size: Size) -> tuple[Any, Any]:
    """Create a T5 encoder and a tokenizer with one token per word."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), *((f"▁{word}", -3.0) for word in WORDS)]
    config = transformers.T5Config(
        vocab_size=len(pieces),
        d_model=size["width"],
        d_kv=size["width"] // size["heads"],
        d_ff=size["inner"],
        num_layers=size["layers"],
        num_heads=size["heads"],
    )
    return transformers.T5EncoderModel(config), transformers.T5TokenizerFast(vocab=pieces, extra_ids=0)


def clip(size: Size, cls: Any = transformers.CLIPTextModel) -> tuple[Any, Any]:
    """Create a CLIP text encoder and a tokenizer with one token per word."""
    letters = sorted(set("".join(WORDS)))
    merges = [pair for word in WORDS for pair in ((word[0], word[1]), (word[:2], f"{word[2]}</w>"))]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)]
    pieces += [first + second for first, second in merges]
    vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    config = transformers.CLIPTextConfig(
        vocab_size=len(vocab),
        hidden_size=size["width"],
        intermediate_size=size["inner"],
        projection_dim=size["width"],
        num_hidden_layers=size["layers"],
        num_attention_heads=size["heads"],
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return cls(config), transformers.CLIPTokenizer(
        vocab=vocab, merges=list(dict.fromkeys(merges)), model_max_length=77
    )


def make_pipeline(name: str, folder: Path, size: Size) -> Any:
    """Save a pipeline of text encoders only."""
    torch.manual_seed(0)
    more: dict[str, Any] = dict.fromkeys(("vae", "transformer", "scheduler", "unet"))
    if name == "PixArtSigmaPipeline":
        encoder, tokenizer = t5(size)
        given = {"text_encoder": encoder, "tokenizer": tokenizer}
    else:
        xl = name == "StableDiffusionXLPipeline"
        (first, one), (second, two) = (
            clip(size),
            (clip(size, transformers.CLIPTextModelWithProjection) if xl else t5(size)),
        )
        given = {"text_encoder": first, "tokenizer": one, "text_encoder_2": second, "tokenizer_2": two}
    cls = getattr(diffusers, name)
    wanted = cls.__init__.__annotations__
    pipe = cls(**{part: value for part, value in more.items() if part in wanted} | given)
    for part in given.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    pipe.save_pretrained(folder)
    return pipe


def plain_loop(pipe: Any, texts: Sequence[str]) -> float:
    """Measure captions per second of a plain loop in data order."""
    guided = {} if type(pipe).__name__ == "FluxPipeline" else {"do_classifier_free_guidance": False}
    started = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(texts), BATCH):
            embeds = pipe.encode_prompt(list(texts[first : first + BATCH]), device="cpu", **guided)[0]
            embeds.to(torch.bfloat16).contiguous()
    return len(texts) / (time.perf_counter() - started)


def built(data: Path, pipeline: Path, out: Path, *, device: str = "cpu") -> tuple[float, float]:
    """Measure captions per second of a build: of the encoding, and of the whole command."""
    fields = {"prompt_embeds": PromptSettings(text_encoder=str(pipeline), text_storage_dtype="bfloat16")}
    started = time.perf_counter()
    report = build_cache(BuildSettings(data=data, out=out, fields=fields, device=device))
    whole = time.perf_counter() - started
    shutil.rmtree(out)
    done = report.fields["prompt_embeds"]
    return done.encoded / done.run.encode_s, done.encoded / whole


def make_data(folder: Path, texts: Sequence[str]) -> Path:
    """Small images with captions."""
    folder.mkdir()
    Image.new("RGB", (16, 16)).save(folder / "0.png")
    for number, text in enumerate(texts):
        if number:
            shutil.copy(folder / "0.png", folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(text, "utf-8")
    return folder


def measure(folder: Path, count: int, rounds: int, size: Size, names: Sequence[str] = PIPELINES) -> Times:
    """Measure captions per second: pipeline -> candidate -> rounds, without the first round."""
    texts, times = captions(count), Times()
    data = make_data(folder / "data", texts)
    for name in names:
        pipe = make_pipeline(name, folder / name, size)
        ways: dict[str, Callable[[], tuple[float, ...]]] = {
            "build": lambda name=name: built(data, folder / name, folder / "cache"),  # type: ignore[misc]
            "loop": lambda pipe=pipe: (plain_loop(pipe, texts),),  # type: ignore[misc]
        }
        times[name] = {"build": [], "whole": [], "loop": []}
        for number in range(rounds + 1):
            for way in list(ways) if number % 2 else reversed(list(ways)):
                for one, rate in zip((way, "whole"), ways[way](), strict=False):
                    print(f"{name}, round {number}: {one} {rate:.2f}", file=sys.stderr, flush=True)
                    if number:
                        times[name][one].append(rate)
    return times


def table(times: Times) -> str:
    """Format medians, and median and range of the ratios of rounds."""
    heads = "| pipeline | build, captions/s | whole build, captions/s | loop, captions/s | build / loop |"
    lines = [heads, "|---|---:|---:|---:|---:|"]
    for name, rates in times.items():
        ratios = sorted(build / loop for build, loop in zip(rates["build"], rates["loop"], strict=True))
        kinds = (rates["build"], rates["whole"], rates["loop"], ratios)
        build, whole, loop, ratio = (statistics.median(one) for one in kinds)
        spread = f"{ratio:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        lines.append(f"| {name} | {build:.2f} | {whole:.2f} | {loop:.2f} | {spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how quickly captions are encoded.")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--captions", type=int, default=96, help="distinct captions (default: 96)")
    parser.add_argument("--pipelines", nargs="+", choices=PIPELINES, default=PIPELINES, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rates")
    options = parser.parse_args()
    for library in (diffusers, transformers):
        library.utils.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), options.captions, options.rounds, MEDIUM, options.pipelines)
    print(table(times))
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
