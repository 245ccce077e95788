"""Replay in another precision, or with single modules kept in fp32."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.interventions.bench import Bench, Reading, reading_of
from stability_probe.replay import replay
from stability_probe.tables import precision_gap

OF_THE_DATA = False


def trial(bench: Bench, precision: str = "bf16", modules: list[str] | None = None) -> Reading:
    """Replay in `precision`; with `modules`, those alone compute in fp32."""
    extra = functools.partial(in_fp32, bench.subject.module, modules or [])
    trace = bench.reduced.get(precision) if not modules else None
    if trace is None:
        trace = replay(bench.subject, bench.batch, precision, detail=False, microbatch=bench.microbatch, extra=extra)
    return {**reading_of(trace), "precision_gap": precision_gap(bench.trace, trace).token_gap}


@contextmanager
def in_fp32(module: nn.Module, names: list[str]) -> Iterator[None]:
    """Within this context the named modules ignore autocast and get their floating inputs in fp32."""
    with ExitStack() as stack:
        for name in names:
            part = module.get_submodule(name)
            own = part.__dict__.get("forward")
            part.forward = functools.partial(_fp32_forward, part.forward)
            stack.callback(_restore_forward, part, own)
        yield


def _restore_forward(part: nn.Module, own: Any) -> None:
    if own is None:
        del part.forward
    else:
        part.forward = own


def _fp32_forward(forward: Any, *args: Any, **kwargs: Any) -> Any:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value

    devices = [value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    with torch.autocast(devices[0] if devices else "cpu", enabled=False):
        return forward(*map(widen, args), **{key: widen(value) for key, value in kwargs.items()})
