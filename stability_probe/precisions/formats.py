"""Number formats: their limits, their spacing, and how many values fall outside them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Format:
    """A binary floating-point format.

    Attributes:
        max: largest finite value.
        min_normal: smallest value with all its significant bits.
        smallest_subnormal: spacing of the values under `min_normal`.
        significand_bits: significant bits of a normal value, the implicit one included.
    """

    name: str
    max: float
    min_normal: float
    smallest_subnormal: float
    significand_bits: int

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest: 2^−significand_bits."""
        return 2.0**-self.significand_bits

    def spacing(self, magnitude: float) -> float:
        """Distance between neighbouring values in the binade of |magnitude| (an ulp)."""
        size = abs(magnitude)
        if size < self.min_normal or not math.isfinite(size):
            return self.smallest_subnormal if math.isfinite(size) else math.nan
        exponent = math.frexp(size)[1] - 1
        return 2.0 ** (exponent - self.significand_bits + 1)

    def headroom_bits(self, absmax: float) -> float:
        """Doublings left before `absmax` passes the format's limit; negative where it has."""
        if not math.isfinite(absmax):
            return -math.inf
        return math.log2(self.max / absmax) if absmax > 0 else math.inf


def _of(dtype: torch.dtype, name: str) -> Format:
    info = torch.finfo(dtype)
    bits = 1 - round(math.log2(info.eps))
    return Format(name, info.max, info.smallest_normal, info.smallest_normal * info.eps, bits)


FP32 = _of(torch.float32, "fp32")
BF16 = _of(torch.bfloat16, "bf16")
FP16 = _of(torch.float16, "fp16")
E4M3 = _of(torch.float8_e4m3fn, "E4M3")
E5M2 = _of(torch.float8_e5m2, "E5M2")
# OCP Microscaling Formats v1.0, section 5.3.3: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
E2M1 = Format("E2M1", 6.0, 1.0, 0.5, 2)


@dataclass(frozen=True)
class RangeShares:
    """Shares of a tensor's elements that a format cannot hold well. 0-d fp32 tensors on its device.

    Attributes:
        overflow: |x| above the largest finite value; infinities and NaN count here.
        underflow: non-zero, yet rounded to zero (at or under half the smallest subnormal).
        subnormal: kept, with fewer significant bits.
    """

    overflow: Tensor
    underflow: Tensor
    subnormal: Tensor


@torch.no_grad()
def range_shares(values: Tensor, fmt: Format, scale: float = 1.0) -> RangeShares:
    """How much of `values` (any shape), times `scale`, does not fit `fmt`. Zeros fit."""
    size = values.detach().float().abs()
    if scale != 1.0:
        size = size * scale
    count = max(size.numel(), 1)
    small = (size < fmt.min_normal) & (size > 0)
    gone = small & (size <= fmt.smallest_subnormal / 2)
    fits = size <= fmt.max
    return RangeShares(1.0 - fits.sum() / count, gone.sum() / count, (small.sum() - gone.sum()) / count)


def fp16_loss_scale(grad_absmax: float) -> float:
    """The largest power of two that keeps gradients of this size under half of fp16's limit; 1 at least.

    Half, because the next batch is not this one: a scaler that sits at the limit skips every other step.
    """
    if not 0 < grad_absmax < math.inf:
        return 1.0
    return max(1.0, 2.0 ** math.floor(math.log2(FP16.max / 2 / grad_absmax)))
