"""Hold the unit that is largest where a projection is entered: one inside an MLP can drive its whole output."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stability_probe.interventions.bench import Bench, CannotRun

OF_THE_DATA = False


def repaired(bench: Bench, module: str) -> Bench:
    """The bench with the largest channel of the module's input held to the median channel's largest value.

    Raises:
        CannotRun: the module is no projection, and may be called with anything.
    """
    part = bench.subject.module.get_submodule(module)
    if getattr(getattr(part, "weight", None), "ndim", 0) != 2 or isinstance(part, nn.Embedding):
        raise CannotRun(f"{module} is no projection")
    return bench.holding(functools.partial(clamped_largest_input, part))


@contextmanager
def clamped_largest_input(part: nn.Module) -> Iterator[None]:
    """Within this context, in every call, the channel c of the largest |input[..., c]| is held to that of the median.

    All other channels stay as they are: a healthy model hardly feels the loss of one unit.
    """

    def hook(_module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args:  # called by keyword: the replay fails here, rather than pass for one with a repair
            raise TypeError("a projection that is called by keyword")
        if not args[0].numel():  # an expert that no token was sent to
            return None
        largest_C = args[0].detach().abs().flatten(0, -2).amax(0)
        limits_C = torch.full_like(largest_C, math.inf)
        limits_C[largest_C.argmax()] = largest_C.median()
        return (args[0].clamp(-limits_C, limits_C), *args[1:])

    handle = part.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()
