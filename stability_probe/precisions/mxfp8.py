"""MXFP8: E4M3 everywhere, with a power-of-two (E8M0) scale per 32 values along the summed axis."""

from __future__ import annotations

import functools

from stability_probe.precisions.base import Precision
from stability_probe.precisions.formats import E4M3, FP32
from stability_probe.precisions.quantised_linear import Recipe, quantised
from stability_probe.precisions.rounding import mxfp8

# E4M3 for gradients too: with a scale per 32 values, range is no longer what they lack (Mishra et al. 2025,
# "Recipes for Pre-training LLMs with MXFP8", section 3).
RECIPE = Recipe(activation=mxfp8, weight=mxfp8, gradient=lambda values, noise: mxfp8(values))

PRECISIONS = (
    Precision(
        name="mxfp8",
        summary="linear layers in E4M3 with a power-of-two scale per 32 values; the rest as bf16",
        operands=E4M3,
        gradients=E4M3,
        weights=FP32,
        enter=functools.partial(quantised, recipe=RECIPE),
        native=lambda device: False,
    ),
)
