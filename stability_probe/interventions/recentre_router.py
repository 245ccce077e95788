"""Take the mean of each expert's logit over the tokens out of the router, or hold its logits within a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from stability_probe.interventions.bench import Bench, Reading

OF_THE_DATA = False


def trial(bench: Bench, modules: list[str], limit: float | None = None) -> Reading:
    """Replay with those routers recentred, or with their logits scaled down to |logit| ≤ limit."""

    @contextmanager
    def changed() -> Iterator[None]:
        with ExitStack() as stack:
            for name in modules:
                stack.enter_context(recentred(bench.subject.module.get_submodule(name), limit))
            yield

    return bench.read(changed)


@contextmanager
def recentred(router: nn.Module, limit: float | None = None) -> Iterator[None]:
    """Within this context the router's weight is replaced during each of its forwards.

    W − (W x̄ − mean) x̄ᵀ / ‖x̄‖² has the same logits up to what all tokens share: with x̄ the mean input of the call,
    every expert's mean logit is the same. With a limit, W × min(1, limit / largest |logit|) instead.
    """
    own = router.get_parameter("weight").data

    def enter(part: nn.Module, inputs: Any) -> None:
        hidden = inputs[0].detach().reshape(-1, own.shape[1])
        part.get_parameter("weight").data = centred(own, hidden) if limit is None else held(own, hidden, limit)

    def leave(part: nn.Module, *_: Any) -> None:
        part.get_parameter("weight").data = own

    handles = [
        router.register_forward_pre_hook(enter),
        router.register_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        router.get_parameter("weight").data = own


def centred(weight_ED: Tensor, hidden_ND: Tensor) -> Tensor:
    """The weight without what it answers to the mean input."""
    mean_D = hidden_ND.float().mean(0)
    answer_E = weight_ED.float() @ mean_D
    excess_E = answer_E - answer_E.mean()
    size = mean_D.square().sum().clamp_min(torch.finfo(torch.float32).tiny)
    return (weight_ED.float() - torch.outer(excess_E, mean_D) / size).to(weight_ED.dtype)


def held(weight_ED: Tensor, hidden_ND: Tensor, limit: float) -> Tensor:
    largest = (hidden_ND.float() @ weight_ED.float().T).abs().max().clamp_min(1e-30)
    return weight_ED * (limit / largest).clamp(max=1.0).to(weight_ED.dtype)
