"""What building of tokens costs: the tokenizer alone, as transformers calls it, by the fast path, and whole builds.

All in one process and one thread, so that CPU seconds compare. What a build costs once, whatever the data, is told
apart. The tokenizer is a byte-level BPE trained on the very texts, 32 000 entries.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from latentcache.encoders.describe_tokens import describe_tokeniser
from latentcache.encoders.fastcheck import with_fast_path
from latentcache.encoders.opening_tokens import open_tokeniser
from latentcache.pipeline import token_build, token_making, token_pool
from latentcache.pipeline.token_build import build_tokens
from latentcache.pipeline.token_inputs import describe
from latentcache.pipeline.token_settings import TokenSettings
from latentcache.sources.records import Record

ENTRIES = 32_000
_END = "<|endoftext|>"


def train(folder: Path, texts: list[str]) -> Path:
    """A folder with a tokenizer as transformers saves one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=ENTRIES, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
        ),
    )
    home = folder / "tokenizer"
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": _END, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    return home


def bench_build(folder: Path, texts: list[str], rounds: int) -> dict[str, float]:
    """CPU seconds per MB of text of each way, and their ratios."""
    from transformers import AutoTokenizer

    home = train(folder, texts)
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    records = [Record(source="texts.jsonl", line=n, content=bytes(16), text=text) for n, text in enumerate(texts, 1)]
    described = describe_tokeniser(str(home), chat=False)
    quick = with_fast_path(described, records)
    reference, fast = open_tokeniser(replace(described, fast=False)), open_tokeniser(quick)
    loaded: Any = AutoTokenizer.from_pretrained(str(home))
    ways: dict[str, Callable[[int], Any]] = {
        "transformers, batches of 1000": lambda _: [loaded(texts[i : i + 1000]) for i in range(0, len(texts), 1000)],
        "reference": lambda _: reference.tokenise(records),
        "fast": lambda _: fast.tokenise(records),
        "whole build": lambda number: build_tokens(
            TokenSettings(data=data, out=folder / f"cache{number}", tokenizer=str(home), workers=0)
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.process_time()
            way(number)
            if number:
                times[name].append(time.process_time() - start)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    found = {f"{name}, CPU s/MB": statistics.median(taken) / megabytes for name, taken in times.items()}

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))

    where = [parts_of_a_build(folder, data, home, number) for number in range(rounds)]
    found |= {f"{name} of one build, CPU s": statistics.median(one[name] for one in where) for name in where[0]}
    shares = [one["tokenizer"] / (one["tokenizer"] + one["all else"]) for one in where]
    return found | {
        "tokenizer / build without its fixed part": statistics.median(shares),
        "fast path used": float(quick.fast),
        "transformers / fast": ratio("transformers, batches of 1000", "fast"),
        "tokenizer alone (fast) / whole build": ratio("fast", "whole build"),
        "tokenizer alone (reference) / whole build": ratio("reference", "whole build"),
    }


def parts_of_a_build(folder: Path, data: Path, home: Path, number: int) -> dict[str, float]:
    """CPU seconds of one build: its fixed part (naming, trying and opening the tokenizer), the tokenizer, all else.

    Taken inside one build: the difference of two is smaller than what changes from one to the next.
    """
    spent = dict.fromkeys(("fixed part", "tokenizer"), 0.0)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **named: Any) -> Any:
            start = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                spent[name] += time.process_time() - start

        return made

    def opened(description: Any) -> Any:
        tokeniser: Any = timed("fixed part", open_tokeniser)(description)
        tokeniser.tokenise = timed("tokenizer", tokeniser.tokenise)
        return tokeniser

    start = time.process_time()
    with (
        patch.object(token_build, "describe", timed("fixed part", describe)),
        patch.object(token_making, "with_fast_path", timed("fixed part", with_fast_path)),
        patch.object(token_pool, "open_tokeniser", opened),
    ):
        build_tokens(TokenSettings(data=data, out=folder / f"parts{number}", tokenizer=str(home), workers=0))
    return spent | {"all else": time.process_time() - start - sum(spent.values())}
