"""Take the mean of each expert's logit over the tokens out of the router, or hold its logits within a limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stability_probe.interventions.bench import Bench

OF_THE_DATA = False


def repaired(bench: Bench, modules: list[str], limit: float | None = None) -> Bench:
    """The bench with those routers recentred, or with their logits scaled down to |logit| ≤ limit."""

    @contextmanager
    def changed() -> Iterator[None]:
        with ExitStack() as stack:
            for name in modules:
                stack.enter_context(recentred(bench.subject.module.get_submodule(name), limit))
            yield

    return bench.holding(changed)


@contextmanager
def recentred(router: nn.Module, limit: float | None = None) -> Iterator[None]:
    """Within this context the logits of the router are changed in each of its forwards.

    Every expert's mean logit over the tokens of the call becomes the same; with a limit, all logits are multiplied
    by min(1, limit / largest |logit|) instead.
    """
    mode = RouterChange(tuple(router.get_parameter("weight").shape), limit)

    def enter(*_: Any) -> None:
        mode.inside = True

    def leave(*_: Any) -> None:
        mode.inside = False

    handles = [
        router.register_forward_pre_hook(enter),
        router.register_forward_hook(leave, always_call=True),
    ]
    try:
        with mode:
            yield
    finally:
        for handle in handles:
            handle.remove()


class RouterChange(TorchFunctionMode):
    """Changes what `F.linear` returns for a weight of the router's shape, while `inside` the router.

    The call is known by the shape: some routers cast their weight first, which makes another tensor of it.
    """

    def __init__(self, shape: tuple[int, ...], limit: float | None) -> None:
        super().__init__()
        self.shape, self.limit, self.inside = shape, limit, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.inside and func is F.linear and len(args) > 1 and tuple(args[1].shape) == self.shape:
            return centred(result) if self.limit is None else held(result, self.limit)
        return result


def centred(logits: Tensor) -> Tensor:
    """(…, experts) logits without what each expert has over the others on average."""
    mean_E = logits.detach().flatten(0, -2).mean(0)
    return logits - (mean_E - mean_E.mean())


def held(logits: Tensor, limit: float) -> Tensor:
    return logits * (limit / logits.detach().abs().max().clamp_min(1e-30)).clamp(max=1.0)
