"""Hyper-connection mixing matrices, and how much their product amplifies the residual streams."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.models.anatomy import Anatomy

NAMES = re.compile(r"mix|hyper|h_res|alpha_res|stream", re.IGNORECASE)
MOST_STREAMS = 64


def mixing_parameters(module: nn.Module, anatomy: Anatomy) -> dict[str, Tensor]:
    """Square (n, n) parameters of the blocks that are named like mixing matrices, in order of depth."""
    return {
        name: parameter.detach()
        for name, parameter in module.named_parameters()
        if parameter.dim() == 2
        and 1 < parameter.shape[0] == parameter.shape[1] <= MOST_STREAMS
        and anatomy.layer_of(name) >= 0
        and NAMES.search(name.rsplit(".", 1)[-1])
    }


def mixing_table(module: nn.Module, anatomy: Anatomy) -> tuple[dict[str, Any], ...]:
    """The `mixing` of `Measurements`. A doubly stochastic matrix has spectral norm 1, and so have products of them."""
    found: list[dict[str, Any]] = []
    product: Tensor | None = None
    for name, matrix in mixing_parameters(module, anatomy).items():
        wide = matrix.double().cpu()
        same = product is not None and product.shape == wide.shape
        product = wide @ product if same and product is not None else wide
        finite = bool(wide.isfinite().all()) and bool(product.isfinite().all())
        found.append(
            {
                "parameter": name,
                "layer": anatomy.layer_of(name),
                "size": wide.shape[0],
                "spectral_norm": torch.linalg.matrix_norm(wide, 2).item() if finite else float("nan"),
                "product_norm": torch.linalg.matrix_norm(product, 2).item() if finite else float("nan"),
            }
        )
    return tuple(found)
