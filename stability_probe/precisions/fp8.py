"""fp8: E4M3 forward, E5M2 backward, with scales per tensor or per block."""

from __future__ import annotations

import dataclasses
import functools

import torch

from stability_probe.precisions.base import Precision
from stability_probe.precisions.formats import E4M3, E5M2, FP32
from stability_probe.precisions.quantised_linear import Recipe, quantised
from stability_probe.precisions.rounding import fp8_scaled, fp8_square

# DeepSeek-V3, section 3.3.2: 1×128 tiles of activations and gradients, 128×128 blocks of weights.
BLOCK = 128

PER_TENSOR = Recipe(
    activation=fp8_scaled,
    weight=fp8_scaled,
    gradient=lambda values, noise: fp8_scaled(values, torch.float8_e5m2),
)
PER_BLOCK = Recipe(
    activation=functools.partial(fp8_scaled, block=BLOCK),
    weight=functools.partial(fp8_square, block=BLOCK),
    gradient=lambda values, noise: fp8_scaled(values, torch.float8_e5m2, BLOCK),
)

_PER_TENSOR = Precision(
    name="fp8",
    summary="linear layers in E4M3 forward and E5M2 backward, one scale per tensor; the rest as bf16",
    operands=E4M3,
    gradients=E5M2,
    weights=FP32,
    enter=functools.partial(quantised, recipe=PER_TENSOR),
    native=lambda device: False,
)

PRECISIONS = (
    _PER_TENSOR,
    dataclasses.replace(
        _PER_TENSOR,
        name="fp8-block",
        summary="linear layers in E4M3 forward and E5M2 backward, scales per 1×128 tile and 128×128 weight block",
        enter=functools.partial(quantised, recipe=PER_BLOCK),
    ),
)
