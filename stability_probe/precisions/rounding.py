"""Rounding to low-precision grids, as pure functions. Every result is fp32 and lies on the grid.

Stochastic rounding takes its random numbers from an explicit generator, so that a replay repeats.
Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0, MXFP8); NVIDIA, "Pretraining Large Language Models
with NVFP4" (2025), sections 2 and 4 (two-level scales, 16×16 blocks, stochastic rounding, Hadamard).
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from stability_probe.precisions.formats import E2M1, E4M3, Format

E2M1_GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NVFP4_BLOCK = 16
MX_BLOCK = 32


def round_to_e2m1(values: Tensor, generator: Generator | None = None) -> Tensor:
    """Values of any shape on the E2M1 grid, saturated at ±6.

    Args:
        generator: where given, a value between two grid points goes to the upper one with a probability
            equal to its distance from the lower one, in steps; otherwise to the nearest, ties to even.
    """
    size = values.float().abs().clamp(max=E2M1.max)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    units = size / step
    if generator is None:
        # Grid points alternate between even and odd mantissa in every binade, and so do whole units of a step.
        rounded = units.round()
    else:
        rounded = (units + torch.rand(size.shape, generator=generator, device=size.device)).floor()
    return torch.copysign(rounded * step, values.float())


def round_to_fp8(values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Nearest E4M3 or E5M2 value, saturated at the format's limit (a bare cast makes E4M3 overflow NaN)."""
    limit = torch.finfo(dtype).max
    return values.float().clamp(-limit, limit).to(dtype).float()


def round_to_bf16_stochastic(values: Tensor, generator: Generator) -> Tensor:
    """One of the two bf16 neighbours, the nearer with the larger probability: unbiased. Not finite stays as it is.

    The 16 low bits of the fp32 pattern are the distance from the lower neighbour, in 2^−16 of a bf16 ulp.
    """
    bits = values.float().contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    rounded = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(torch.isfinite(values), rounded, values.float())


def nvfp4(values: Tensor, generator: Generator | None = None, tensor_scale: Tensor | float | None = None) -> Tensor:
    """Quantised and dequantised in blocks of 16 along the last axis: E2M1 values, E4M3 block scales.

    Args:
        tensor_scale: the fp32 scale of the whole tensor; by default the largest block scale becomes E4M3's
            largest value, and 1.0 stores the block scales as they are.
    """
    blocks, length = _blocks(values, NVFP4_BLOCK)
    scale = _nvfp4_scale(blocks.abs().amax(-1, keepdim=True), tensor_scale)
    return _unblock(round_to_e2m1(_divide(blocks, scale), generator) * scale, length, values)


def nvfp4_square(weight: Tensor, tensor_scale: Tensor | float | None = None) -> Tensor:
    """The same in 16×16 blocks of a (rows, columns) weight: the transpose quantises to the same values."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % NVFP4_BLOCK, 0, -rows % NVFP4_BLOCK))
    blocks = padded.reshape(padded.shape[0] // NVFP4_BLOCK, NVFP4_BLOCK, padded.shape[1] // NVFP4_BLOCK, NVFP4_BLOCK)
    scale = _nvfp4_scale(blocks.abs().amax((1, 3), keepdim=True), tensor_scale)
    return (round_to_e2m1(_divide(blocks, scale)) * scale).reshape(padded.shape)[:rows, :columns]


def _nvfp4_scale(absmax: Tensor, tensor_scale: Tensor | float | None) -> Tensor:
    """Scales of blocks, E4M3 times the tensor's scale; 0 where a block is zero beside the tensor's maximum."""
    if tensor_scale is None:
        tensor_scale = (absmax.max() / (E4M3.max * E2M1.max)).clamp_min(torch.finfo(torch.float32).tiny)
    return round_to_fp8(absmax / E2M1.max / tensor_scale) * tensor_scale


def _divide(blocks: Tensor, scale: Tensor) -> Tensor:
    return blocks / torch.where(scale == 0, math.inf, scale)


def mxfp8(values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Quantised and dequantised in blocks of 32 along the last axis: FP8 values, power-of-two (E8M0) scales.

    The scale is 2^(⌊log2 absmax⌋ − ⌊log2 max⌋) (OCP MX v1.0, section 6.3): values between the format's limit and
    the next power of two saturate.
    """
    blocks, length = _blocks(values, MX_BLOCK)
    absmax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(absmax).exponent - 1 - math.floor(math.log2(torch.finfo(dtype).max))
    scale = torch.where(absmax > 0, torch.ldexp(torch.ones_like(absmax), exponent.clamp(-127, 127)), 1.0)
    return _unblock(round_to_fp8(blocks / scale, dtype) * scale, length, values)


def fp8_scaled(values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, block: int | None = None) -> Tensor:
    """Quantised and dequantised with fp32 scales that map each maximum to the format's limit.

    Args:
        block: elements along the last axis that share a scale; None for one scale for the whole tensor.
    """
    blocks, length = _blocks(values, block or max(values.shape[-1], 1))
    absmax = blocks.abs().amax(-1, keepdim=True) if block else blocks.abs().max()
    scale = torch.where(absmax > 0, absmax / torch.finfo(dtype).max, 1.0)
    return _unblock(round_to_fp8(blocks / scale, dtype) * scale, length, values)


def fp8_square(weight: Tensor, block: int = 128) -> Tensor:
    """A (rows, columns) weight in E4M3 with one fp32 scale per block × block (DeepSeek-V3, section 3.3.2)."""
    rows, columns = weight.shape
    padded = F.pad(weight.float(), (0, -columns % block, 0, -rows % block))
    blocks = padded.reshape(padded.shape[0] // block, block, padded.shape[1] // block, block)
    absmax = blocks.abs().amax((1, 3), keepdim=True)
    scale = torch.where(absmax > 0, absmax / E4M3.max, 1.0)
    return (round_to_fp8(blocks / scale) * scale).reshape(padded.shape)[:rows, :columns]


def hadamard(values: Tensor, generator: Generator, size: int = 16) -> Tensor:
    """Random Hadamard transform in blocks of `size` along the last axis (padded with zeros to a whole block).

    Orthogonal: with the same signs on both operands a product along that axis is unchanged, while an outlier
    is spread over its block. The signs are drawn from `generator`.
    """
    signs = torch.randint(0, 2, (size,), generator=generator, device=values.device).float() * 2 - 1
    blocks, _ = _blocks(values, size)
    matrix = _hadamard_matrix(size).to(values.device)
    return ((blocks * signs) @ matrix).flatten(-2)


@functools.lru_cache(maxsize=4)
def _hadamard_matrix(size: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)


def round_to_format(values: Tensor, fmt: Format) -> Tensor:
    """Nearest value of any format, ties to even, saturating nowhere: what passes the limit becomes infinite."""
    wide = values.detach().double()
    exponent = torch.frexp(wide).exponent - 1
    smallest = math.frexp(fmt.min_normal)[1] - 1
    step = torch.ldexp(torch.ones_like(wide), exponent.clamp_min(smallest) - fmt.significand_bits + 1)
    rounded = (wide / step).round() * step
    return torch.where(rounded.abs() > fmt.max, torch.copysign(torch.full_like(wide, math.inf), wide), rounded).float()


def _blocks(values: Tensor, size: int) -> tuple[Tensor, int]:
    """(…, length) as (…, blocks, size), padded with zeros."""
    length = values.shape[-1]
    return F.pad(values.float(), (0, -length % size)).unflatten(-1, (-1, size)), length


def _unblock(blocks: Tensor, length: int, like: Tensor) -> Tensor:
    return blocks.flatten(-2)[..., :length].reshape(like.shape)
