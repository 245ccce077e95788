"""Set single elements of a tensor to the tensor's median."""

from __future__ import annotations

import functools

from stability_probe.interventions.bench import Bench, Reading, swapped

OF_THE_DATA = False


def trial(bench: Bench, parameter: str, indices: list[tuple[int, ...]]) -> Reading:
    """Replay with those elements replaced."""
    tensor = bench.subject.module.get_parameter(parameter).detach().clone()
    median = tensor.flatten()[:: max(1, tensor.numel() // 65_536)].nanmedian()
    for index in indices:
        tensor[tuple(index)] = median
    return bench.read(functools.partial(swapped, bench.subject.module, {parameter: tensor}))
