"""bf16 as training uses it: autocast on fp32 weights."""

from __future__ import annotations

import functools

import torch

from stability_probe.precisions.base import Precision
from stability_probe.precisions.casting import autocast, has_native_products
from stability_probe.precisions.formats import BF16, FP32

PRECISIONS = (
    Precision(
        name="bf16",
        summary="autocast: products in bf16 with fp32 sums, fp32 weights, norms and softmax in fp32",
        operands=BF16,
        gradients=BF16,
        weights=FP32,
        enter=functools.partial(autocast, dtype=torch.bfloat16),
        native=functools.partial(has_native_products, dtype=torch.bfloat16),
    ),
)
