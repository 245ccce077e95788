"""Multiply many tensors, each by a factor of its own: to a recipe's width, or by a depth scaling."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager

from stability_probe.interventions.bench import Bench, swapped

OF_THE_DATA = False


def repaired(bench: Bench, factors: Mapping[str, float]) -> Bench:
    """The bench with each named parameter × its factor."""
    module = bench.subject.module

    def changed() -> AbstractContextManager[None]:
        return swapped(module, {name: module.get_parameter(name).detach() * factor for name, factor in factors.items()})

    return bench.holding(changed)
