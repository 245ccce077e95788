"""Constrain hyper-connection mixing matrices, so that their product cannot amplify."""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.interventions.bench import Bench, swapped
from stability_probe.mitigations import sinkhorn

OF_THE_DATA = False


def repaired(bench: Bench, parameters: list[str], how: str = "sinkhorn") -> Bench:
    """The bench with those matrices made doubly stochastic ("sinkhorn") or divided by their spectral norm ("norm")."""
    module = bench.subject.module
    change = doubly_stochastic if how == "sinkhorn" else unit_norm
    return bench.holding(lambda: swapped(module, {n: change(module.get_parameter(n).detach()) for n in parameters}))


def doubly_stochastic(matrix: Tensor) -> Tensor:
    """The Sinkhorn projection of the matrix's positive part; what is not positive becomes as good as 0."""
    return sinkhorn(matrix.double().clamp_min(1e-9)).to(matrix.dtype)


def unit_norm(matrix: Tensor) -> Tensor:
    """The matrix over its spectral norm, where that is above 1."""
    return matrix / torch.linalg.matrix_norm(matrix.float(), 2).clamp_min(1.0).to(matrix.dtype)
