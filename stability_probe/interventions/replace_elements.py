"""Set single elements of a tensor to the tensor's median."""

from __future__ import annotations

import functools

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, indices: list[tuple[int, ...]]) -> Bench:
    """The bench with those elements replaced."""
    tensor = bench.subject.module.get_parameter(parameter).detach().clone()
    median = tensor.flatten()[:: max(1, tensor.numel() // 65_536)].nanmedian()
    for index in indices:
        tensor[tuple(index)] = median
    return bench.holding(functools.partial(swapped, bench.subject.module, {parameter: tensor}))
