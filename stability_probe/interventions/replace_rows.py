"""Bring rows of a table back to the size of the others."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, rows: list[int]) -> Bench:
    """The bench with those rows rescaled to the median row norm; a zero row becomes the mean row."""
    module = bench.subject.module

    def changed() -> AbstractContextManager[None]:
        table = module.get_parameter(parameter).detach().clone()
        norms = torch.linalg.vector_norm(table, dim=1, keepdim=True)
        median = norms.median()
        fixed = table[rows] * (median / norms[rows].clamp_min(1e-30))
        table[rows] = torch.where(norms[rows] > 0, fixed, table.mean(0))
        return swapped(module, {parameter: table})

    return bench.holding(changed)
