"""fp16 by autocast on fp32 weights, without and with loss scaling."""

from __future__ import annotations

import dataclasses
import functools

import torch

from stability_probe.precisions.base import Precision
from stability_probe.precisions.casting import autocast, has_native_products
from stability_probe.precisions.formats import FP16, FP32

# GradScaler's initial scale; training lowers it on overflow, and so does a comparison that sees one.
INITIAL_SCALE = 2.0**16

_PLAIN = Precision(
    name="fp16",
    summary="autocast: products in fp16 with fp32 sums, fp32 weights; no loss scaling, so small gradients vanish",
    operands=FP16,
    gradients=FP16,
    weights=FP32,
    enter=functools.partial(autocast, dtype=torch.float16),
    native=functools.partial(has_native_products, dtype=torch.float16),
)

PRECISIONS = (
    _PLAIN,
    dataclasses.replace(
        _PLAIN,
        name="fp16-scaled",
        summary="fp16 by autocast with the loss scaled up before the backward pass",
        loss_scale=INITIAL_SCALE,
    ),
)
