"""fp32: the reference. TF32 is off, so a product keeps 24 significant bits on every device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from stability_probe.precisions.base import Fp32Inside, Precision, Setting
from stability_probe.precisions.formats import FP32


@contextmanager
def _enter(setting: Setting) -> Iterator[Fp32Inside]:
    products = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        yield lambda module: nullcontext()
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


PRECISIONS = (
    Precision(
        name="fp32",
        summary="fp32 weights, activations and products; TF32 off",
        operands=FP32,
        gradients=FP32,
        weights=FP32,
        enter=_enter,
        native=lambda device: True,
    ),
)
