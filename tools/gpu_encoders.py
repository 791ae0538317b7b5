"""The parts of ``bench_gpu`` that look at encoders alone: rates of all variants, attention, precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_models import MODELS, Model, Scene, encoder_half, images, latents_of
from gpu_timing import Row, peak_mib, seconds_per_call
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

BF16 = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run an encoder."""

    name: str
    dtype: torch.dtype = BF16
    tf32: bool = False
    last: bool = False
    as_conv2d: bool = False
    benchmark: bool = False
    """Whether cuDNN tries its algorithms first."""


PLAIN = Variant(name="bf16, contiguous")
OURS = Variant(name="bf16, channels last", last=True)


def variants(model: Model) -> list[Variant]:
    """Return the variants compared at one shape. Add new ways to run an encoder here."""
    found = [
        Variant(name="fp32 (TF32), contiguous", dtype=torch.float32, tf32=True),
        OURS,
        PLAIN,
        replace(OURS, name="bf16, channels last, cuDNN benchmark", benchmark=True),
    ]
    if model.causal:
        found.append(replace(PLAIN, name="bf16, folded", as_conv2d=True))
    return found


def rates(scene: Scene, matmul_flops: float, left: Callable[[], float]) -> Iterator[Row]:
    """Measure images per second of every model, size, batch and variant, while time remains."""
    for side in scene.pick((1024, 512), (64,)):
        for model in MODELS:
            if left() > 0:
                yield from _rates_of(scene, model, side, matmul_flops)
            else:
                yield {"model": model.name, "side": side, "variant": "not run: no time left"}


def attention(scene: Scene) -> Iterator[Row]:
    """Measure the middle block of an f8 autoencoder: one head of 512, for 512 x 512 and 1024 x 1024 pixels."""
    width = scene.pick(512, 32)
    backends = {
        "SDPA math": SDPBackend.MATH,
        "SDPA memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
        "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
        "SDPA flash": SDPBackend.FLASH_ATTENTION,
    }
    for tokens in scene.pick((4096, 16384), (64,)):
        q, k, v = (torch.randn(1, 1, tokens, width, device=scene.device, dtype=BF16) for _ in range(3))
        exact = nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float())
        for name, backend in backends.items():
            with sdpa_kernel(backend):
                found = _attended(scene, name, nn.functional.scaled_dot_product_attention, (q, k, v), exact)
            yield found | {"tokens": tokens}


def precision(scene: Scene) -> Iterator[Row]:
    """Measure how much other precisions, layouts and batches change latents, in standard deviations."""
    side, model = scene.pick(512, 64), MODELS[0]
    with torch.inference_mode(), _settings(Variant(name="", tf32=False)):
        exact = latents_of(
            model,
            encoder_half(model, scene, torch.float32, last=False),
            images(scene, 2, side, torch.float32, last=False),
        )
    for variant in (
        Variant(name="fp32, channels last", dtype=torch.float32, last=True),
        Variant(name="fp32 (TF32), contiguous", dtype=torch.float32, tf32=True),
        Variant(name="fp16, contiguous", dtype=torch.float16),
        PLAIN,
        OURS,
    ):
        with torch.inference_mode(), _settings(variant):
            module = encoder_half(model, scene, variant.dtype, last=variant.last)
            values = images(scene, 2, side, variant.dtype, last=variant.last)
            found, alone = latents_of(model, module, values), latents_of(model, module, values[:1])
        yield (
            {"variant": variant.name}
            | _apart("fp32", found, exact)
            | _apart("batch of 2 and of 1", found[:1], alone)
            | {"finite": bool(torch.isfinite(found).all())}
        )


def _rates_of(scene: Scene, model: Model, side: int, matmul_flops: float) -> Iterator[Row]:
    """Measure one model at one size: all variants at one batch, all batches of one variant."""
    flops = _flops(model, scene, side)
    middle = scene.pick(4, 2)
    plan = [(variant, middle) for variant in variants(model)]
    plan += [(OURS, batch) for batch in scene.pick((1, 2, 8), (1,))]
    if model.causal:
        plan += [(replace(PLAIN, name="bf16, folded", as_conv2d=True), batch) for batch in scene.pick((1, 8), ())]
    for variant, batch in plan:
        try:
            with torch.inference_mode(), _settings(variant):
                module = encoder_half(model, scene, variant.dtype, last=variant.last, as_conv2d=variant.as_conv2d)
                values = images(scene, batch, side, variant.dtype, last=variant.last)
                row = _row(scene, model, module, values, variant)
        except RuntimeError as error:
            row = {"model": model.name, "side": side, "batch": batch, "variant": variant.name} | _failed(error)
        yield _with_ceiling(row, flops, matmul_flops)


def _row(scene: Scene, model: Model, module: nn.Module, values: Tensor, variant: Variant) -> Row:
    batch, side = values.shape[0], values.shape[-1]
    taken = seconds_per_call(scene, lambda: latents_of(model, module, values))
    memory = peak_mib(scene, lambda: latents_of(model, module, values))
    about = {"model": model.name, "side": side, "batch": batch, "variant": variant.name}
    return about | {"img/s": batch / taken, "MiB": memory}


def _with_ceiling(row: Row, flops: float, matmul_flops: float) -> Row:
    """Add the operations per image (without the rewrite) and the fraction of the matrix product's rate."""
    if "img/s" not in row:
        return row
    percent = 100 * row["img/s"] * flops / matmul_flops if matmul_flops else 0.0
    return row | {"TFLOP/img": flops / 1e12, "% of ceiling": percent}


def _flops(model: Model, scene: Scene, side: int) -> float:
    """Count floating point operations of one image (without the rewrite), without computing."""
    with torch.device("meta"), torch.inference_mode(), FlopCounterMode(display=False) as counter:
        module = encoder_half(model, replace(scene, device="meta"), BF16, last=False)
        values = torch.empty(1, 3, side, side, dtype=BF16)
        latents_of(model, module, values)
    return float(counter.get_total_flops())


def _attended(
    scene: Scene, name: str, attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], exact: Tensor
) -> Row:
    tokens, width = inputs[0].shape[-2:]
    try:
        taken = seconds_per_call(scene, lambda: attend(*inputs))
        memory = peak_mib(scene, lambda: attend(*inputs))
        error = float((attend(*inputs).float() - exact).abs().max() / exact.std())
    except RuntimeError as error:
        return {"attention": name} | _failed(error)
    flops = 4 * tokens**2 * width
    return {"attention": name, "ms": 1000 * taken, "TFLOP/s": flops / taken / 1e12, "MiB": memory, "error": error}


def _apart(label: str, found: Tensor, other: Tensor) -> Row:
    apart, scale = (found.float() - other.float()), other.float().std()
    return {
        f"rms from {label}": float(apart.square().mean().sqrt() / scale),
        f"largest from {label}": float(apart.abs().max() / scale),
    }


def _failed(error: RuntimeError) -> Row:
    return {"failed": (str(error).splitlines() or [type(error).__name__])[0][:120]}


@contextlib.contextmanager
def _settings(variant: Variant) -> Iterator[None]:
    """Set torch's switches for one variant, and restore them."""
    matmul, conv, tries = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.cudnn.benchmark
    before = matmul.allow_tf32, conv.allow_tf32
    matmul.allow_tf32 = conv.allow_tf32 = variant.tf32
    torch.backends.cudnn.benchmark = variant.benchmark
    try:
        yield
    finally:
        matmul.allow_tf32, conv.allow_tf32 = before
        torch.backends.cudnn.benchmark = tries
