"""NVFP4: E2M1 values with E4M3 scales per 16 values and an fp32 scale per tensor.

The recipe of NVIDIA, "Pretraining Large Language Models with NVFP4" (2025): 16×16 blocks for weights, so that
forward and backward see the same ones; stochastic rounding of gradients; a random Hadamard transform of both
operands of the weight gradient.
"""

from __future__ import annotations

import functools

from torch import Generator, Tensor

from stability_probe.precisions.base import Precision
from stability_probe.precisions.formats import E2M1, FP32
from stability_probe.precisions.quantised_linear import SEED, Recipe, quantised
from stability_probe.precisions.rounding import hadamard, nvfp4, nvfp4_square


def _mix(values: Tensor) -> Tensor:
    # The same signs for both operands and for every product, as in the recipe (appendix C.2).
    return hadamard(values, Generator(values.device).manual_seed(SEED))


RECIPE = Recipe(
    activation=nvfp4,
    weight=nvfp4_square,
    gradient=lambda values, noise: nvfp4(values, noise),
    mix=_mix,
)

PRECISIONS = (
    Precision(
        name="nvfp4",
        summary="linear layers in E2M1 with two-level scales, stochastic gradients; the rest as bf16",
        operands=E2M1,
        gradients=E2M1,
        weights=FP32,
        enter=functools.partial(quantised, recipe=RECIPE),
        native=lambda device: False,
    ),
)
