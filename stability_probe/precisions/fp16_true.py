"""fp16 throughout: weights, activations and gradients, without an fp32 copy."""

from __future__ import annotations

import functools

import torch

from stability_probe.precisions.base import Precision
from stability_probe.precisions.casting import has_native_products, true_dtype
from stability_probe.precisions.formats import FP16

PRECISIONS = (
    Precision(
        name="fp16-true",
        summary="weights, activations and gradients all in fp16, without loss scaling",
        operands=FP16,
        gradients=FP16,
        weights=FP16,
        enter=functools.partial(true_dtype, dtype=torch.float16),
        native=functools.partial(has_native_products, dtype=torch.float16),
    ),
)
