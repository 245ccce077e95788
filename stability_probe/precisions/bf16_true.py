"""bf16 throughout: weights, activations and gradients, without an fp32 copy."""

from __future__ import annotations

import functools

import torch

from stability_probe.precisions.base import Precision
from stability_probe.precisions.casting import has_native_products, true_dtype
from stability_probe.precisions.formats import BF16

PRECISIONS = (
    Precision(
        name="bf16-true",
        summary="weights, activations and gradients all in bf16",
        operands=BF16,
        gradients=BF16,
        weights=BF16,
        enter=functools.partial(true_dtype, dtype=torch.bfloat16),
        native=functools.partial(has_native_products, dtype=torch.bfloat16),
    ),
)
