"""Clamp one channel of a module's output, or all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stability_probe.interventions.bench import Bench

OF_THE_DATA = False


def repaired(bench: Bench, module: str, channel: int | None, limit: float) -> Bench:
    """The bench with that channel of the module's output (None: every channel) clamped to ±limit."""
    part = bench.subject.module.get_submodule(module)
    return bench.holding(functools.partial(clamped, part, channel, limit))


@contextmanager
def clamped(part: nn.Module, channel: int | None, limit: float) -> Iterator[None]:
    """Within this context |output[..., channel]| ≤ limit; None stands for all channels."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        tensor = output[0] if isinstance(output, tuple) else output
        mask = torch.full(tensor.shape[-1:], channel is None, dtype=torch.bool, device=tensor.device)
        if channel is not None:
            mask[channel] = True
        held = torch.where(mask, tensor.clamp(-limit, limit), tensor)
        return (held, *output[1:]) if isinstance(output, tuple) else held

    handle = part.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()
