"""Measure tokens: padded and packed rows, the packing itself, and builds, each against other libraries.

CPU seconds of this process beside wall seconds, because the former are taken from training; candidates take turns in
every round and ratios are taken round by round. Documents are log-normal, 1055 tokens on average; texts to tokenize
are the Python sources of this environment, the tokenizer is a byte-level BPE trained on them.

    python tools/bench_tokens.py [--only read|packed|pack|build] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from token_peers import Epoch, token_peers

from latentcache import BuildSettings, build_cache, open_cache
from latentcache.encoders.text.describe import describe_tokenizer
from latentcache.encoders.text.tokenizer import TextTokenizer
from latentcache.fields.input_ids import InputIdsRecipe, InputIdsSettings
from latentcache.plan.documents import Corpus, plan_rows
from latentcache.sources.records import Record

LENGTH, BATCH = 4096, 16
MEAN, SIGMA = 1055, 1.0
PACKED_DOCUMENTS = 60_000
VOCABULARY, _END = 32_000, "<|endoftext|>"
FLOORS = ("flat memmap and offsets, with labels", "flat memmap and offsets")
PACKED_FLOOR = "flat memmap, rows by hand, with labels and positions"
Times = dict[str, list[tuple[float, float]]]


def lengths(count: int, seed: int) -> NDArray[np.int64]:
    """Draw log-normal lengths with a mean of about 1055 tokens, at most 32 rows."""
    drawn = np.random.default_rng(seed).lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, count)
    return np.clip(drawn, 2, 32 * LENGTH).astype(np.int64)


def make_cache(folder: Path, sizes: NDArray[np.int64]) -> tuple[Path, list[NDArray[np.uint16]]]:
    """Create a cache of such documents with the byte tokenizer; return it and the ids."""
    letters = np.random.default_rng(1)
    texts = [letters.integers(97, 123, int(size)).astype(np.uint8).tobytes().decode() for size in sizes]
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    cache = folder / "documents.latentcache"
    build(folder / "documents.jsonl", cache, tokenizer="stub", add_eos=False)
    return cache, [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16) for text in texts]


def build(data: Path, cache: Path, **settings: Any) -> None:
    """Tokenize a file in this process."""
    fields = {"input_ids": InputIdsSettings(**settings)}
    build_cache(BuildSettings(data=data, out=cache, fields=fields, workers=0))


def view_options(rows: Any) -> dict[str, Epoch]:
    """List views of rows, the default options first."""
    return {
        "latentcache, loader()": lambda plan: iter(rows.loader(batch_size=BATCH, seed=len(plan))),
        "latentcache, loader(prefetch=0)": lambda plan: iter(
            rows.loader(batch_size=BATCH, seed=len(plan), prefetch=0)
        ),
        "latentcache, rows.batch(rows)": lambda plan: (rows.batch(one) for one in plan),
    }


def bench_read(folder: Path, documents: int, rounds: int) -> dict[str, Any]:
    """Measure (CPU, wall) seconds per padded row of each candidate, and bytes on disk per token."""
    cache, ids = make_cache(folder, lengths(documents, 0))
    peers, missing = token_peers(folder, ids, LENGTH)
    found = view_options(open_cache(cache).rows(pad=LENGTH, overflow="truncate_right")) | peers
    times = interleaved(found, documents, rounds)
    tokens = sum(map(len, ids))
    stored = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    return {"times": times, "missing": missing, "bytes_per_token": stored / tokens, "tokens": tokens}


def bench_packed(folder: Path, documents: int, rounds: int) -> Times:
    """Measure (CPU, wall) seconds per packed row of the loader and of a loop over a flat file."""
    cache, ids = make_cache(folder, np.minimum(lengths(documents, 0), LENGTH))
    rows = open_cache(cache).rows(pack=LENGTH)
    return interleaved(
        view_options(rows) | {PACKED_FLOOR: by_hand(folder, ids, rows.parts[0].plan)}, len(rows), rounds
    )


def by_hand(folder: Path, ids: Sequence[NDArray[np.uint16]], plan: Any) -> Epoch:
    """Pack rows of a flat file by hand: ids, mask, labels and positions."""
    np.concatenate(ids).tofile(folder / "packed.bin")
    tokens = np.memmap(folder / "packed.bin", np.uint16, "r")
    starts = np.cumsum([0, *map(len, ids)]).tolist()
    documents = np.asarray(plan.document).tolist()

    def serve(order: list[list[int]]) -> Iterator[Any]:
        for rows in order:
            out = np.zeros((4, len(rows), LENGTH), np.int64)
            out[2] = -100
            for place, row in enumerate(rows):
                at = 0
                for document in (documents[piece] for piece in plan.pieces(row)):
                    part = tokens[starts[document] : starts[document + 1]]
                    here = slice(at, at + len(part))
                    out[0, place, here], out[1, place, here], out[2, place, here] = part, 1, part
                    out[2, place, at], out[3, place, here] = -100, np.arange(len(part))
                    at += len(part)
            names = ("input_ids", "attention_mask", "labels", "position_ids")
            yield {name: torch.from_numpy(array) for name, array in zip(names, out, strict=True)}

    return serve


def interleaved(epochs: dict[str, Epoch], count: int, rounds: int) -> Times:
    """Measure seconds per row without the first round."""
    times: Times = {name: [] for name in epochs}
    random = np.random.default_rng(2)
    for number in range(rounds + 1):
        plan = random.permutation(count)[: count // BATCH * BATCH].reshape(-1, BATCH).tolist()
        for name in list(epochs) if number % 2 else reversed(list(epochs)):
            taken = per_row(epochs[name], plan[:4] if name.startswith("HF lists") else plan)
            if number:
                times[name].append(taken)
    return times


def per_row(epoch: Epoch, plan: list[list[int]]) -> tuple[float, float]:
    """Measure (CPU, wall) seconds per row; iterators are opened before the clock starts."""
    batches = epoch(plan)
    cpu, wall, rows = time.process_time(), time.perf_counter(), 0
    for batch in batches:
        rows += len(batch["input_ids"])
    return (time.process_time() - cpu) / rows, (time.perf_counter() - wall) / rows


def bench_packing(folder: Path, documents: int = PACKED_DOCUMENTS) -> dict[str, float]:
    """Measure packing efficiency, rows and CPU seconds per million documents of one global plan."""
    sizes = np.minimum(lengths(documents, 3), LENGTH)
    spans = np.column_stack([np.zeros_like(sizes), sizes]).astype(np.uint32)
    ends = np.arange(1, len(sizes) + 1, dtype=np.int64)
    corpus = Corpus(length=sizes.astype(np.uint32), span_ends=ends, spans=spans, where=str)
    start = time.process_time()
    plan = plan_rows(corpus, "pack", LENGTH)
    taken = time.process_time() - start
    least = -(-int(sizes.sum()) // LENGTH)
    efficiency = plan.tokens / (len(plan) * LENGTH)
    return {"efficiency": efficiency, "rows": len(plan), "least": least, "s_per_million": taken * 1e6 / len(sizes)}


def bench_build(folder: Path, texts: list[str], rounds: int) -> dict[str, float]:
    """Measure CPU seconds per MB of text: transformers, our tokenizer, a whole build."""
    from transformers import AutoTokenizer

    home, data = train(folder, texts), folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    records = [Record(source="texts.jsonl", line=n, content=bytes(16), text=text) for n, text in enumerate(texts, 1)]
    description = describe_tokenizer(InputIdsSettings(tokenizer=str(home)))
    assert isinstance(description.recipe, InputIdsRecipe)
    ours = TextTokenizer(description.producer, description.recipe)
    loaded: Any = AutoTokenizer.from_pretrained(str(home))
    ways: dict[str, Callable[[int], Any]] = {
        "transformers": lambda _: [loaded(texts[i : i + 1000]) for i in range(0, len(texts), 1000)],
        "our tokenizer": lambda _: ours.tokenize(records),
        "whole build": lambda number: build(data, folder / f"cache{number}", tokenizer=str(home)),
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
    pairs = {name: zip(times["transformers"], taken, strict=True) for name, taken in times.items()}
    return found | {f"transformers / {name}": statistics.median(a / b for a, b in two) for name, two in pairs.items()}


def train(folder: Path, texts: list[str]) -> Path:
    """Save a byte-level BPE tokenizer in the layout of transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer, home = Tokenizer(models.BPE()), folder / "tokenizer"
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[_END],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    home.mkdir()
    tokenizer.save(str(home / "tokenizer.json"))
    config = {"eos_token": _END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def texts_of_this_environment(megabytes: float) -> list[str]:
    """Read Python sources of the standard library in pieces of at most 8 kB."""
    found: list[str] = []
    left = int(megabytes * 1e6)
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        text = path.read_text("utf-8", "ignore")
        found += [text[start : start + 8000] for start in range(0, len(text), 8000)]
        left -= len(text)
        if left < 0:
            break
    return found


def rows_table(times: Times, floors: Sequence[str]) -> str:
    """Format ratios of CPU seconds to the floors as Markdown."""
    lines = [f"| candidate | {' | '.join(f'CPU, x {floor}' for floor in floors)} | rows per CPU s | rows/s |"]
    lines.append("|---|" + "---:|" * (len(floors) + 2))
    for name, rounds in times.items():
        pairs = [zip(rounds, times[floor], strict=True) for floor in floors]
        ratios = [f"{statistics.median(a[0] / b[0] for a, b in both):.2f}" for both in pairs]
        cpu, wall = (statistics.median(column) for column in zip(*rounds, strict=True))
        lines.append(f"| {name} | {' | '.join(ratios)} | {1 / cpu:,.0f} | {1 / wall:,.0f} |")
    return "\n".join(lines)


def packed_table(times: Times) -> str:
    """Format packed rows as Markdown."""
    return f"packed rows of {LENGTH} tokens, batches of {BATCH}\n\n" + rows_table(times, [PACKED_FLOOR])


def read_table(found: dict[str, Any]) -> str:
    """Format padded rows as Markdown."""
    head = f"padded rows of {LENGTH} tokens, batches of {BATCH}, shuffled, {found['tokens']:,} tokens"
    tail = [f"{found['bytes_per_token']:.2f} bytes per token on disk, columns and reports included"]
    tail += [f"not run: {line}" for line in found["missing"]]
    return f"{head}\n\n{rows_table(found['times'], FLOORS)}\n\n" + "\n".join(tail)


def numbers_line(found: dict[str, float]) -> str:
    """Format named numbers on one line."""
    return ", ".join(f"{key} {value:.4g}" for key, value in found.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("read", "packed", "pack", "build"))
    parser.add_argument("--documents", type=int, default=1600, help="to read [default: 1600]")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of text to tokenize [default: 4]")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds [default: 5]")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    parts: dict[str, tuple[Callable[[Path], Any], Callable[[Any], str]]] = {
        "read": (lambda folder: bench_read(folder, given.documents, given.rounds), read_table),
        "packed": (lambda folder: bench_packed(folder, given.documents, given.rounds), packed_table),
        "pack": (bench_packing, numbers_line),
        "build": (
            lambda folder: bench_build(folder, texts_of_this_environment(given.megabytes), given.rounds),
            numbers_line,
        ),
    }
    found: dict[str, Any] = {}
    for name, (measure, show) in parts.items():
        if given.only in (None, name):
            with tempfile.TemporaryDirectory(prefix="bench-tokens-") as folder:
                found[name] = measure(Path(folder))
            print(f"\n{name}: {show(found[name])}", flush=True)
    if given.json:
        given.json.write_text(json.dumps({"argv": sys.argv, **found}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
