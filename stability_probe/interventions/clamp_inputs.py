"""Hold what enters a projection: one unit inside an MLP can drive every channel of its output at once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from stability_probe.interventions.bench import Bench, CannotRun

OF_THE_DATA = False


def repaired(bench: Bench, module: str, times: float) -> Bench:
    """The bench with each channel of the module's input held to ±`times` the median channel's largest value.

    Raises:
        CannotRun: the module is no projection, and may be called with anything.
    """
    part = bench.subject.module.get_submodule(module)
    if getattr(getattr(part, "weight", None), "ndim", 0) != 2 or isinstance(part, nn.Embedding):
        raise CannotRun(f"{module} is no projection")
    return bench.holding(functools.partial(clamped_inputs, part, times))


@contextmanager
def clamped_inputs(part: nn.Module, times: float) -> Iterator[None]:
    """Within this context |input[..., c]| ≤ times × median over channels of the call's largest |input|."""

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args:  # called by keyword: the replay fails here, rather than pass for one with a repair
            raise TypeError("a projection that is called by keyword")
        limit = times * args[0].detach().abs().flatten(0, -2).amax(0).median()
        return (args[0].clamp(-limit, limit), *args[1:])

    handle = part.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
