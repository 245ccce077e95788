"""Set single elements of a tensor to the tensor's median."""

from __future__ import annotations

from contextlib import AbstractContextManager

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, parameter: str, indices: list[tuple[int, ...]]) -> Bench:
    """The bench with those elements replaced."""
    module = bench.subject.module

    def changed() -> AbstractContextManager[None]:
        tensor = module.get_parameter(parameter).detach().clone()
        median = tensor.flatten()[:: max(1, tensor.numel() // 65_536)].nanmedian()
        for index in indices:
            tensor[tuple(index)] = median
        return swapped(module, {parameter: tensor})

    return bench.holding(changed)
