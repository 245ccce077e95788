"""Multiply a whole tensor by a factor."""

from __future__ import annotations

import functools

from stability_probe.interventions.bench import Bench, Reading, swapped

OF_THE_DATA = False


def trial(bench: Bench, parameter: str, factor: float) -> Reading:
    """Replay with the tensor × factor."""
    tensor = bench.subject.module.get_parameter(parameter).detach() * factor
    return bench.read(functools.partial(swapped, bench.subject.module, {parameter: tensor}))
