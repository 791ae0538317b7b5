"""Triton kernels for channels-last images in half precision; imported only where Triton is installed.

A normalization reads its image twice and writes it once: SiLU and the bias of the convolution before it take no
further pass. Torch needs eight passes for the same work. Sums are float32, as are the scores of an attention.

Images are (B, C, H, W) in channels-last memory, so the channels of a pixel are neighbors. A program works on a tile
of whole pixels. Method of the softmax: one program for each row, as in Triton's tutorial on fused softmax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr, tensor

#: Values of a tile, and programs that add up one batch: a few for each multiprocessor.
_TILE, _PROGRAMS = 4096, 1024
#: Columns of a softmax row that fit into registers.
_MOST_COLUMNS = 32768
#: Rows of scores that are in memory at a time: 256 MiB for 1024x1024 pixels.
_QUERIES = 4096
#: Multiplications and additions are fused: Triton 3.9 warns if a kernel does not say it.
_FUSED = {"enable_fp_fusion": True}


@triton.jit
def _tile(
    first: tensor, pixels: tensor, CHANNELS: constexpr, WIDTH: constexpr, ROWS: constexpr
) -> tuple[tensor, tensor]:
    """Offsets of a tile in its image, and which of them exist."""
    row = first + tl.arange(0, ROWS)
    channel = tl.arange(0, WIDTH)
    offsets = row[:, None].to(tl.int64) * CHANNELS + channel[None, :]
    return offsets, (row < pixels)[:, None] & (channel < CHANNELS)[None, :]


@triton.jit
def _sums(
    x: tensor, bias: tensor, sums: tensor, pixels: tensor, CHANNELS: constexpr, WIDTH: constexpr, ROWS: constexpr
) -> None:
    """Sums of values and of squares for each channel, (B, tiles, 2, C)."""
    image, tile, tiles = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    channel = tl.arange(0, WIDTH)
    added = tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)[None, :]
    x += image.to(tl.int64) * pixels * CHANNELS
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(tile * ROWS, pixels, tiles * ROWS):
        offsets, inside = _tile(first, pixels, CHANNELS, WIDTH, ROWS)
        values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values + added, 0.0)
        total += values
        squares += values * values
    target = sums + (image * tiles + tile) * 2 * CHANNELS + channel
    tl.store(target, tl.sum(total, 0), mask=channel < CHANNELS)
    tl.store(target + CHANNELS, tl.sum(squares, 0), mask=channel < CHANNELS)


@triton.jit
def _factors(
    sums: tensor,
    weight: tensor,
    shift: tensor,
    factors: tensor,
    count: tensor,
    tiles: tensor,
    eps: tensor,
    CHANNELS: constexpr,
    MEMBERS: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
) -> None:
    """Factor and summand of each channel, (B, 2, C), for a group of ``MEMBERS`` channels with ``count`` values."""
    image, group = tl.program_id(0), tl.program_id(1)
    member = tl.arange(0, WIDTH)
    channel = group * MEMBERS + member
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    squares = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, tiles, ROWS):
        tile = first + tl.arange(0, ROWS)
        source = sums + (image * tiles + tile)[:, None] * 2 * CHANNELS + channel[None, :]
        inside = (tile < tiles)[:, None] & (member < MEMBERS)[None, :]
        total += tl.load(source, mask=inside, other=0.0)
        squares += tl.load(source + CHANNELS, mask=inside, other=0.0)
    mean = tl.sum(tl.sum(total, 1), 0) / count
    variance = tl.sum(tl.sum(squares, 1), 0) / count - mean * mean
    variance = tl.where(variance < 0.0, 0.0, variance)  # NaN stays
    factor = tl.load(weight + channel, mask=member < MEMBERS, other=0.0) / tl.sqrt(variance + eps)
    summand = tl.load(shift + channel, mask=member < MEMBERS, other=0.0) - mean * factor
    target = factors + image * 2 * CHANNELS + channel
    tl.store(target, factor, mask=member < MEMBERS)
    tl.store(target + CHANNELS, summand, mask=member < MEMBERS)


@triton.jit
def _scaled(
    x: tensor,
    bias: tensor,
    factors: tensor,
    out: tensor,
    pixels: tensor,
    SILU: constexpr,
    CHANNELS: constexpr,
    WIDTH: constexpr,
    ROWS: constexpr,
) -> None:
    """Values with bias, times the factor plus the summand of their channel, then SiLU."""
    image, tile = tl.program_id(1), tl.program_id(0)
    channel = tl.arange(0, WIDTH)
    exists = channel < CHANNELS
    added = tl.load(bias + channel, mask=exists, other=0.0)
    factor = tl.load(factors + image * 2 * CHANNELS + channel, mask=exists, other=0.0)
    summand = tl.load(factors + (image * 2 + 1) * CHANNELS + channel, mask=exists, other=0.0)
    start = image.to(tl.int64) * pixels * CHANNELS
    offsets, inside = _tile(tile * ROWS, pixels, CHANNELS, WIDTH, ROWS)
    values = tl.load(x + start + offsets, mask=inside, other=0.0).to(tl.float32)
    values = (values + added[None, :]) * factor[None, :] + summand[None, :]
    if SILU:
        values = values * tl.sigmoid(values)
    tl.store(out + start + offsets, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _added(
    x: tensor, other: tensor, bias: tensor, pixels: tensor, CHANNELS: constexpr, WIDTH: constexpr, ROWS: constexpr
) -> None:
    """Another image and a bias added to an image in place; ``pixels`` are those of the whole batch."""
    tile = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, WIDTH)
    added = tl.load(bias + channel, mask=channel < CHANNELS, other=0.0)
    offsets, inside = _tile(tile * ROWS, pixels, CHANNELS, WIDTH, ROWS)
    values = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(other + offsets, mask=inside, other=0.0).to(tl.float32) + added[None, :]
    tl.store(x + offsets, values.to(x.dtype.element_ty), mask=inside)


@triton.jit
def _softmax(scores: tensor, out: tensor, columns: tensor, scale: tensor, WIDTH: constexpr) -> None:
    """Softmax of one row of float32 scores."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    values = tl.load(scores + row * columns + column, mask=column < columns, other=float("-inf")) * scale
    values = tl.exp(values - tl.max(values, 0))
    values = values / tl.sum(values, 0)
    tl.store(out + row * columns + column, values.to(out.dtype.element_ty), mask=column < columns)


def normalize(
    x: Tensor, bias: Tensor, groups: int, weight: Tensor, shift: Tensor, eps: float, *, silu: bool, out: Tensor
) -> Tensor:
    """Group normalization of ``x + bias``, then SiLU, into ``out``, which may be ``x``.

    ``x`` and ``out`` are (B, C, H, W) in channels-last memory; bias, weight and shift are (C,) in float32.
    """
    batch, channels = x.shape[:2]
    pixels, shape = _shape(x)
    tiles = min(triton.cdiv(pixels, shape["ROWS"]), max(_PROGRAMS // batch, 1))
    sums = torch.empty(batch, tiles, 2, channels, device=x.device)
    _sums[(batch, tiles)](x, bias, sums, pixels, **shape)
    factors = torch.empty(batch, 2, channels, device=x.device)
    members = channels // groups
    width = triton.next_power_of_2(members)
    rows = max(_TILE // width, 1) if tiles * width > _TILE else triton.next_power_of_2(tiles)
    options = _FUSED | {"CHANNELS": channels, "MEMBERS": members, "WIDTH": width, "ROWS": rows}
    _factors[(batch, groups)](sums, weight, shift, factors, float(pixels * members), tiles, eps, **options)
    _scaled[(triton.cdiv(pixels, shape["ROWS"]), batch)](x, bias, factors, out, pixels, SILU=silu, **shape)
    return out


def add(x: Tensor, other: Tensor, bias: Tensor) -> Tensor:
    """``x + other + bias`` in place of ``x``; shapes as in :func:`normalize`."""
    pixels, shape = _shape(x)
    pixels *= len(x)
    _added[(triton.cdiv(pixels, shape["ROWS"]),)](x, other, bias, pixels, **shape)
    return x


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one head, (B, N, C): products in half precision, scores and softmax in float32."""
    out = torch.empty_like(q)
    scale = q.shape[-1] ** -0.5
    for image in range(len(q)):
        for first in range(0, q.shape[1], _QUERIES):
            rows = slice(first, first + _QUERIES)
            scores = _product(q[image, rows], k[image].T)
            torch.mm(_probabilities(scores, scale, q.dtype), v[image], out=out[image, rows])
    return out


def _shape(x: Tensor) -> tuple[int, dict[str, int]]:
    """Pixels of an image, and options of kernels on its tiles."""
    channels = x.shape[1]
    width = triton.next_power_of_2(x.shape[1])
    return x.shape[2] * x.shape[3], _FUSED | {"CHANNELS": channels, "WIDTH": width, "ROWS": max(_TILE // width, 1)}


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in float32; the CPU has no such product of half precision."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _probabilities(scores: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    rows, columns = scores.shape
    if columns > _MOST_COLUMNS:
        return scores.mul_(scale).softmax(-1).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=scores.device)
    width = triton.next_power_of_2(columns)
    warps = 16 if width > _TILE else 4
    _softmax[(rows,)](scores, out, columns, scale, WIDTH=width, num_warps=warps, **_FUSED)
    return out
