"""Change the attention logits of every head in every attention call, for any model that calls softmax or SDPA."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from stability_probe.taps.attention import CHUNK, MASKED, MASKED_SUM, SOFTMAX, sdpa_arguments

# Takes logits (B, H, queries, keys) with masked places below MASKED_SUM, and the index of the first query.
Change = Callable[[Tensor, int], Tensor]


@dataclass(eq=False)
class AttentionChange(TorchFunctionMode):
    """Applies `change` to the logits of every attention call made inside one of the modules given to `on`."""

    change: Change
    depth: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def on(self, module: nn.Module, sites: list[str]) -> Iterator[None]:
        def enter(*_: Any) -> None:
            self.depth += 1

        def leave(*_: Any) -> None:
            self.depth -= 1

        handles = []
        for name in sites:
            part = module.get_submodule(name)
            handles += [part.register_forward_pre_hook(enter), part.register_forward_hook(leave, always_call=True)]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.depth and func is F.scaled_dot_product_attention:
            return attention(self.change, *args, **kwargs)
        if self.depth and func in SOFTMAX and args and isinstance(args[0], Tensor) and _is_attention(args, kwargs):
            return func(_changed(self.change, args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)


def _is_attention(args: Any, kwargs: Any) -> bool:
    logits = args[0]
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return logits.dim() in (3, 4) and axis in (-1, logits.dim() - 1) and logits.shape[-1] >= logits.shape[-2]


def _changed(change: Change, logits: Tensor) -> Tensor:
    return change(logits, 0) if logits.dim() == 4 else change(logits.unsqueeze(0), 0).squeeze(0)


def attention(change: Change, *args: Any, **kwargs: Any) -> Tensor:
    """What `F.scaled_dot_product_attention` returns, with changed logits; in chunks of query rows, without dropout."""
    query, key, value, mask, _, causal = sdpa_arguments(*args, **kwargs)
    heads, T, K = query.shape[-3:]
    S = key.shape[-2]
    scale = kwargs.get("scale") or 1.0 / math.sqrt(K)
    if key.shape[-3] != heads:
        key, value = (part.repeat_interleave(heads // part.shape[-3], dim=-3) for part in (key, value))
    if mask is not None:
        mask = mask.expand(*mask.shape[:-2], T, S)
    places = torch.arange(S, device=key.device)
    outputs = []
    for start in range(0, T, CHUNK):
        stop = min(start + CHUNK, T)
        logits = (query[..., start:stop, :].float() * scale) @ key.float().transpose(-1, -2)
        if causal:
            logits = logits.masked_fill(places > torch.arange(start, stop, device=key.device)[:, None], -math.inf)
        if mask is not None:
            part = mask[..., start:stop, :]
            logits = logits.masked_fill(~part, -math.inf) if part.dtype == torch.bool else logits + part.float()
            logits = logits.masked_fill(logits < MASKED, -math.inf)
        logits = change(logits, start)
        # SDPA gives zeros where a query sees no key.
        weights = logits.softmax(-1).masked_fill((logits == -math.inf).all(-1, keepdim=True), 0.0)
        outputs.append(weights.to(value.dtype) @ value)
    return torch.cat(outputs, dim=-2)


def allowed(logits: Tensor) -> Tensor:
    """True on keys that the query may see."""
    return ~(logits <= MASKED_SUM)
