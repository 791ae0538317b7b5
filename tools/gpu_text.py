"""The part of ``bench_gpu`` that looks at text encoders: T5-XXL padded and sorted by length, CLIP-L, and builds.

A build of captions uses a pipeline with a T5 of one billion parameters: T5-XXL takes longer to save than to measure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bench_text
import numpy as np
import torch
from gpu_models import Scene
from gpu_timing import Row, peak_mib, seconds_per_call
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

#: Tokens per batch of sorted captions.
TOKENS = 16384
LONGEST = 512
_T5_XXL = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
_LARGE = {"width": 2048, "inner": 8192, "layers": 24, "heads": 32}
_T5_TINY = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}


def text_encoders(scene: Scene, folder: Path) -> Iterator[Row]:
    """Measure captions per second, of encoders alone and of builds."""
    with torch.inference_mode():
        yield from _t5(scene)
        yield from _clip(scene)
    for name in ("PixArtSigmaPipeline", "FluxPipeline"):
        try:
            yield _built(scene, folder, name)
        except Exception as error:  # noqa: BLE001 - such as a library that cleans captions and is not there
            yield {"pipeline": name, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:120]}


def _built(scene: Scene, folder: Path, name: str) -> Row:
    """Compare a build of captions with its text encoder alone: sorted by length with a mask, else at full length."""
    masked, size = name == "PixArtSigmaPipeline", scene.pick(_LARGE, bench_text.TINY)
    texts = bench_text.captions(scene.pick(4096 if masked else 1024, 12))
    data, pipeline = folder / f"texts {name}", folder / name
    bench_text.make_data(data, texts)
    with torch.device(scene.device):
        pipe = bench_text.make_pipeline(name, pipeline, size)
    dtype = torch.bfloat16 if scene.cuda else torch.float32
    model = (pipe.text_encoder if masked else pipe.text_encoder_2).to(scene.device, dtype)
    tokens = np.array([len(text.split()) + 1 for text in texts])
    longest = 300 if masked else LONGEST
    plan = (
        list(sorted_batches(np.minimum(tokens, longest), TOKENS))
        if masked
        else [(32, longest)] * max(len(texts) // 32, 1)
    )

    def alone() -> None:
        for count, length in plan:
            ids = torch.ones(count, length, dtype=torch.int64, device=scene.device)
            model(input_ids=ids, **({"attention_mask": torch.ones_like(ids)} if masked else {}))

    with torch.inference_mode():
        taken = seconds_per_call(scene, alone, least_s=0.0)
    rate = sum(count for count, _ in plan) / taken
    pipe.to("cpu")
    built, _ = bench_text.built(data, pipeline, folder / "text cache", device=scene.device)
    return {"pipeline": name, "alone, captions/s": rate, "build, captions/s": built, "build / alone": built / rate}


def lengths(count: int) -> NDArray[np.int64]:
    """Draw tokens per caption: log-normal about 60, from 5 to 512."""
    drawn = np.random.default_rng(0).lognormal(np.log(60), 0.8, count)
    return np.clip(drawn, 5, LONGEST).astype(np.int64)


def sorted_batches(tokens: NDArray[np.int64], budget: int) -> Iterator[tuple[int, int]]:
    """Return (captions, padded length) of batches of sorted captions within the budget."""
    ordered, first = np.sort(tokens)[::-1], 0
    while first < len(ordered):
        longest = int(ordered[first])
        count = max(min(budget // longest, len(ordered) - first), 1)
        yield count, longest
        first += count


def _t5(scene: Scene) -> Iterator[Row]:
    config = T5Config(feed_forward_proj="gated-gelu", **scene.pick(_T5_XXL, _T5_TINY))
    model = _made(lambda: T5EncoderModel(config), scene)
    batch = scene.pick(32, 2)
    ids = torch.ones(batch, scene.pick(LONGEST, 16), dtype=torch.int64, device=scene.device)
    taken = seconds_per_call(scene, lambda: model(input_ids=ids))
    memory = peak_mib(scene, lambda: model(input_ids=ids))
    yield {"encoder": "T5-XXL", "way": f"padded to {ids.shape[1]}", "captions/s": batch / taken, "MiB": memory}
    captions = lengths(scene.pick(2048, 8))
    plan = list(sorted_batches(np.minimum(captions, scene.pick(LONGEST, 16)), scene.pick(TOKENS, 32)))

    def run() -> None:
        for count, longest in plan:
            tokens = torch.ones(count, longest, dtype=torch.int64, device=scene.device)
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens))

    taken = seconds_per_call(scene, run, least_s=0.0)
    way = "sorted by length, with a mask"
    yield {"encoder": "T5-XXL", "way": way, "captions/s": len(captions) / taken, "MiB": peak_mib(scene, run)}


def _clip(scene: Scene) -> Iterator[Row]:
    width = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = _made(lambda: CLIPTextModel(CLIPTextConfig(**scene.pick(width, tiny))), scene)
    ids: Tensor = torch.ones(scene.pick(256, 2), 77, dtype=torch.int64, device=scene.device)
    taken = seconds_per_call(scene, lambda: model(input_ids=ids))
    memory = peak_mib(scene, lambda: model(input_ids=ids))
    yield {"encoder": "CLIP-L", "way": "padded to 77", "captions/s": len(ids) / taken, "MiB": memory}


def _made(make: object, scene: Scene) -> nn.Module:
    """Create a model with random bf16 weights on the device; float32 on the host would take minutes."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(scene.device):
            model: nn.Module = make()  # type: ignore[operator]
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)
