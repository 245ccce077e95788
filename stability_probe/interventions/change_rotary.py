"""Rotary positions with another base or stretch, or with the other order of the pairs inside a head."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.interventions.bench import Bench, CannotRun, swapped
from stability_probe.models.anatomy import Attention

OF_THE_DATA = False


def repaired(bench: Bench, theta: float | None = None, stretch: float = 1.0, layout: str | None = None) -> Bench:
    """The bench with rotary base `theta` and positions divided by `stretch`, or with query and key weights reordered.

    Args:
        layout: "halves" takes weights stored as neighbouring pairs (2i, 2i + 1) to halves (i, i + d/2);
            "pairs" the other way.

    Raises:
        CannotRun: the rotary frequencies, or the layout of the projections, are not known.
    """
    module, sites = bench.subject.module, bench.subject.anatomy.attention

    @contextmanager
    def changed() -> Iterator[None]:
        with ExitStack() as stack:
            if theta is not None:
                stack.enter_context(with_theta(module, theta, stretch))
            if layout is not None:
                stack.enter_context(swapped(module, reordered(module, sites, layout)))
            yield

    return bench.holding(changed)


@contextmanager
def with_theta(module: nn.Module, theta: float, stretch: float = 1.0) -> Iterator[None]:
    """Within this context the rotary frequencies are θ^(−2i/d) / stretch.

    Raises:
        CannotRun: there are no frequencies that can be changed.
    """
    old: list[tuple[Any, str, Any]] = []
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if name == "inv_freq" and buffer is not None:
                width = 2 * buffer.numel()
                exponents = torch.arange(0, width, 2, dtype=torch.float32, device=buffer.device) / width
                old.append((part._buffers, name, buffer))
                part._buffers[name] = (theta**-exponents / stretch).to(buffer.dtype)
    config = getattr(module, "config", None)
    own = dataclasses.is_dataclass(config) and getattr(config, "positions", "") == "rotary"
    if not old and own and hasattr(config, "rope_theta") and stretch == 1.0:
        old.append((vars(module), "config", config))
        module.config = dataclasses.replace(config, rope_theta=theta)  # type: ignore[assignment, type-var]
    if not old:
        raise CannotRun("the model has no rotary frequencies in a buffer named inv_freq")
    try:
        yield
    finally:
        for owner, name, value in old:
            owner[name] = value


def reordered(module: nn.Module, sites: tuple[Attention, ...], layout: str) -> dict[str, Tensor]:
    """New query and key weights (and biases) by name, each head's output features in the other order.

    Raises:
        CannotRun: a projection is fused, or the head width is not known.
    """
    new = {}
    for site in sites:
        width = site.head_width
        if site.query is None or site.key is None or width is None or site.query_norm or site.key_norm:
            raise CannotRun(f"the layout of the query and key projections of {site.name} is not known")
        pairs = torch.arange(width)
        order = pairs.view(-1, 2).T.flatten() if layout == "halves" else pairs.view(2, -1).T.flatten()
        for owner in (site.query, site.key):
            for name in (f"{owner}.weight", f"{owner}.bias"):
                if name in dict(module.named_parameters()):
                    tensor = module.get_parameter(name).detach()
                    new[name] = tensor.unflatten(0, (-1, width))[:, order.to(tensor.device)].flatten(0, 1)
    if not new:
        raise CannotRun("no query and key projections were found")
    return new
