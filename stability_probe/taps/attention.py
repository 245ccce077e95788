"""Attention logits and entropy of every head, for any model that calls softmax or SDPA.

A `TorchFunctionMode` sees the calls themselves, so one tap serves fused and eager attention alike.
The logits are computed again in fp32, in chunks of query rows: no (B, H, T, T) tensor is ever kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CHUNK = 128
# Masks are −inf, finfo.min or a large round number such as −1e4 or −1e9; no learned logit or bias goes there.
MASKED = -9_999.0
# The same seen after a logit was added to it; the largest logits, on the other side, are never hidden by this.
MASKED_SUM = -5_000.0
# exp(−80) is 2e-35: a key that far below the maximum weighs nothing, and 0 · −inf is never formed.
FLOOR = -80.0


@dataclass(frozen=True)
class HeadStatistics:
    """Statistics of one attention call. All on the device of the model, fp32.

    Attributes:
        max_logit_BH: largest |logit| before softmax over allowed keys (after soft-cap where the model has one).
        query_BH, key_BH: where it is.
        entropy_BH: nats, mean over the queries of the later half that see at least two keys.
        top_weight_BH: mean over the same queries of the largest attention weight.
        top_key_share_BH: share of the same queries whose largest weight is on the most popular key.
        blind_BH: queries that no key is allowed for.
    """

    max_logit_BH: Tensor
    query_BH: Tensor
    key_BH: Tensor
    entropy_BH: Tensor
    top_weight_BH: Tensor
    top_key_share_BH: Tensor
    blind_BH: Tensor


@dataclass(frozen=True)
class _Chunk:
    """A span of queries. `logits` and `biased` may be overwritten by who asked for it.

    Attributes:
        logits, biased: (B, H, t, S) without and with additive biases; may be one tensor.
        allowed: bool, broadcastable to them.
        free: leading keys that every query of the span may look at: no mask is applied to them.
    """

    logits: Tensor
    biased: Tensor
    allowed: Tensor
    free: int = 0

    def hide(self, values: Tensor, filler: float) -> Tensor:
        """`values` with `filler` in place of the keys that are not allowed, in place."""
        values[..., self.free :].masked_fill_(~self.allowed[..., self.free :], filler)
        return values


Chunk = Callable[[int, int], _Chunk]


def statistics_from_qk(
    query_BHTK: Tensor,
    key_BHSK: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    first_query: int = 0,
    peaks_only: bool = False,
) -> HeadStatistics:
    """Statistics from queries and keys, as `F.scaled_dot_product_attention` would use them.

    Args:
        mask: bool (True = allowed) or additive float, broadcastable to (B, H, T, S). Additive values at or
            below −9 999 count as masked; other biases (ALiBi) shape the weights but not `max_logit`.
        causal: query t sees keys 0…t (as SDPA's `is_causal`).
        first_query: queries before it are left padding and do not count.
        peaks_only: leave the softmax out, and with it entropies and weights (NaN): a quarter of the time.
    """
    _, H, T, K = query_BHTK.shape
    S = key_BHSK.shape[2]
    scale = 1.0 / math.sqrt(K) if scale is None else scale
    key = key_BHSK.float()
    if key.shape[1] != H:
        key = key.repeat_interleave(H // key.shape[1], dim=1)
    key_t = key.transpose(-1, -2).contiguous()
    positions = torch.arange(S, device=key.device)
    if mask is not None:
        while mask.dim() < 4:
            mask = mask.unsqueeze(0)

    def chunk(start: int, stop: int) -> _Chunk:
        visible = min(stop, S) if causal else S
        logits = (query_BHTK[:, :, start:stop].float() * scale) @ key_t[..., :visible]
        allowed = torch.ones((1, 1, 1, visible), dtype=torch.bool, device=key.device)
        biased = logits
        if causal:
            allowed = allowed & (positions[:visible] <= torch.arange(start, stop, device=key.device)[:, None])
        if mask is not None:
            part = mask[:, :, start:stop] if mask.shape[2] > 1 else mask
            part = part[..., :visible]
            if part.dtype == torch.bool:
                allowed = allowed & part
            else:
                allowed = allowed & (part > MASKED)
                biased = logits + part.float()
        return _Chunk(logits, biased, allowed, free=start + 1 if causal and mask is None else 0)

    return _statistics(chunk, first_query, T, peaks_only)


def statistics_from_logits(logits_BHTS: Tensor, first_query: int = 0, *, peaks_only: bool = False) -> HeadStatistics:
    """Statistics from the tensor that an eager model hands to softmax, mask already added."""
    T = logits_BHTS.shape[2]

    def chunk(start: int, stop: int) -> _Chunk:
        logits = logits_BHTS[:, :, start:stop].to(torch.float32, copy=True)
        return _Chunk(logits, logits, ~(logits <= MASKED_SUM))

    return _statistics(chunk, first_query, T, peaks_only)


@torch.no_grad()
def _statistics(chunk: Chunk, first: int, T: int, peaks_only: bool) -> HeadStatistics:
    half = T if peaks_only else first + (T - first) // 2
    peaks, queries, keys, blind = [], [], [], []
    entropies, tops, top_keys, counted = [], [], [], []
    for start, stop in _spans(first, half, T):
        part = chunk(start, stop)
        logits = part.hide(part.logits, 0.0)
        peak, query = torch.maximum(logits.amax(-1), -logits.amin(-1)).max(dim=-1)
        peaks.append(peak)
        queries.append(query + start)
        row = logits.gather(2, query[..., None, None].expand(-1, -1, 1, logits.shape[-1])).squeeze(2)
        keys.append(row.abs().argmax(-1))
        shape = logits.shape[:-1]
        blind.append((~part.allowed.any(-1)).expand(shape).sum(-1))
        if start < half:
            continue
        visible = part.hide(part.biased, -math.inf)
        highest, where = visible.max(dim=-1)
        distance = visible.sub_(highest[..., None]).clamp_min_(FLOOR)
        weights = distance.exp()
        total = weights.sum(-1)
        entropies.append(total.log() - weights.mul_(distance).sum(-1) / total)
        tops.append(1.0 / total)
        top_keys.append(where)
        counted.append((part.allowed.sum(-1) >= 2).expand(shape))
    max_logit, span = torch.stack(peaks).max(dim=0)
    query, key = (torch.stack(found).gather(0, span[None]).squeeze(0) for found in (queries, keys))
    if peaks_only:
        unknown = torch.full_like(max_logit, math.nan)
        return HeadStatistics(max_logit, query, key, unknown, unknown, unknown, torch.stack(blind).sum(0))
    valid = torch.cat(counted, dim=-1)
    entropy, top, where = (torch.cat(parts, dim=-1) for parts in (entropies, tops, top_keys))
    many = valid.sum(-1).clamp_min(1)
    none = valid.sum(-1) == 0

    def mean(values: Tensor) -> Tensor:
        return (values.masked_fill(~valid, 0.0).sum(-1) / many).masked_fill(none, math.nan)

    popular = where.masked_fill(~valid, -1).mode(dim=-1, keepdim=True).values
    shares = mean(entropy), mean(top), mean((where == popular).float())
    return HeadStatistics(max_logit, query, key, *shares, torch.stack(blind).sum(0))


def _spans(first: int, half: int, T: int) -> Iterator[tuple[int, int]]:
    """Chunks of query rows that never straddle the middle, where the later half begins."""
    for begin, end in ((first, half), (half, T)):
        for start in range(begin, end, CHUNK):
            yield start, min(start + CHUNK, end)


@dataclass(eq=False)
class AttentionTap(TorchFunctionMode):
    """Records the statistics of every attention call made inside one of the `sites` modules.

    Attributes:
        record: called with (layer, statistics) once per call.
        first_query: first position of the row that is not left padding.
        peaks_only: as in `statistics_from_qk`.
    """

    record: Callable[[int, HeadStatistics], None]
    stack: list[int] = field(default_factory=list)
    first_query: int = 0
    peaks_only: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def on(self, module: nn.Module, sites: dict[str, int]) -> Iterator[None]:
        """Within this context every attention call inside the modules `sites` (name → layer) is recorded."""

        def enter(layer: int) -> Callable[..., None]:
            return lambda *_: self.stack.append(layer)

        def leave(*_: Any) -> None:
            self.stack.pop()

        handles = []
        for name, layer in sites.items():
            part = module.get_submodule(name)
            handles += [
                part.register_forward_pre_hook(enter(layer)),
                part.register_forward_hook(leave, always_call=True),
            ]
        try:
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.stack and (statistics := self._measure(func, args, kwargs)) is not None:
            self.record(self.stack[-1], statistics)
        return func(*args, **kwargs)

    def _measure(self, func: Any, args: Any, kwargs: Any) -> HeadStatistics | None:
        if func is F.scaled_dot_product_attention:
            query, key, _, mask, _, causal = sdpa_arguments(*args, **kwargs)
            if query.dim() == 4:
                return statistics_from_qk(
                    query,
                    key,
                    scale=kwargs.get("scale"),
                    mask=mask,
                    causal=causal,
                    first_query=self.first_query,
                    peaks_only=self.peaks_only,
                )
        elif func in SOFTMAX:
            logits = args[0] if args else kwargs.get("input")
            axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if isinstance(logits, Tensor) and axis in (-1, logits.dim() - 1):
                if logits.dim() == 3:  # (B·H, T, S), as older eager models fold it
                    logits = logits.unsqueeze(0)
                if logits.dim() == 4 and logits.shape[-1] >= logits.shape[-2]:
                    return statistics_from_logits(logits, self.first_query, peaks_only=self.peaks_only)
        return None


SOFTMAX = (F.softmax, torch.softmax, Tensor.softmax)


def sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, float, bool]:
    return query, key, value, attn_mask, dropout_p, is_causal
