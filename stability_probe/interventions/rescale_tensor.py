"""Multiply a whole tensor by a factor."""

from __future__ import annotations

import functools

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, factor: float) -> Bench:
    """The bench with the tensor × factor."""
    tensor = bench.subject.module.get_parameter(parameter).detach() * factor
    return bench.holding(functools.partial(swapped, bench.subject.module, {parameter: tensor}))
