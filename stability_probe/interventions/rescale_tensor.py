"""Multiply a whole tensor by a factor."""

from __future__ import annotations

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, factor: float) -> Bench:
    """The bench with the tensor × factor."""
    module = bench.subject.module
    return bench.holding(lambda: swapped(module, {parameter: module.get_parameter(parameter).detach() * factor}))
