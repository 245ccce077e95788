"""The fixes, as functions to import: each one small, pure and with its source.

They return new tensors; write them back under `torch.no_grad()`.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from stability_probe.precisions.rounding import round_to_bf16_stochastic


def qk_clip_factors(
    max_logit_H: Tensor, tau: float = 100.0, alpha: float = 0.5, n_kv_heads: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What to multiply each head's query and key weights by so that its logits stay under `tau`.

    γ = τ / S_max where that is under 1 (Kimi K2 technical report, section 2.1, QK-Clip). Where several query heads
    share a key head, γ goes onto the queries alone: the key belongs to healthy heads too.

    Args:
        max_logit_H: each query head's largest |logit| before softmax, non-negative.
        alpha: share of γ, as an exponent, that the queries take.
        n_kv_heads: number of key heads where it differs from the number of query heads.

    Returns:
        γ (H,), the query factors (H,) and the key factors (n_kv_heads,).
    """
    gamma_H = (tau / max_logit_H.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    if n_kv_heads is not None and n_kv_heads != gamma_H.numel():
        return gamma_H, gamma_H, torch.ones(n_kv_heads, dtype=gamma_H.dtype, device=gamma_H.device)
    return gamma_H, gamma_H**alpha, gamma_H ** (1 - alpha)


def qk_clip(
    query_weight: Tensor, key_weight: Tensor, max_logit_H: Tensor, tau: float = 100.0, alpha: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key weights after QK-Clip, and γ.

    Args:
        query_weight: (H·K, D) as `nn.Linear` stores it, or (H, …) with the heads in front.
        key_weight: likewise, with its own number of heads under grouped-query attention.
        max_logit_H: see `qk_clip_factors`.
    """
    heads = max_logit_H.numel()
    n_kv = key_weight.shape[0] if key_weight.dim() > 2 else key_weight.shape[0] * heads // query_weight.shape[0]
    gamma_H, query_factor, key_factor = qk_clip_factors(max_logit_H, tau, alpha, n_kv)
    return _scale_heads(query_weight, query_factor), _scale_heads(key_weight, key_factor), gamma_H


def _scale_heads(weight: Tensor, factor_H: Tensor) -> Tensor:
    heads = weight.unflatten(0, (factor_H.numel(), -1))
    return (heads * factor_H.view(-1, *[1] * (heads.dim() - 1))).reshape(weight.shape)


def z_loss(logits: Tensor, coefficient: float = 1e-4) -> Tensor:
    """coefficient · log² Z for each position of (…, V) logits, in fp32 (PaLM, section 5: 1e-4).

    Cross-entropy is blind to a constant added to all logits; this pulls log Z back to 0.
    """
    return coefficient * logits.float().logsumexp(-1).square()


def recentre(logits: Tensor) -> Tensor:
    """(…, V) logits minus their log Z, in fp32: the same distribution at a level where bf16 resolves it."""
    return logits.float() - logits.float().logsumexp(-1, keepdim=True)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """cap · tanh(logits / cap): bounded, and the identity near 0 (Gemma 2: 50 in attention, 30 at the output)."""
    return cap * torch.tanh(logits / cap)


def sinkhorn(matrix: Tensor, iterations: int = 20) -> Tensor:
    """A positive (…, n, n) matrix made doubly stochastic by normalising rows and columns in turn.

    The spectral norm of the result is 1, and of products of such results too: residual streams mixed by it are
    not amplified with depth (mHC uses 20 iterations).
    """
    for _ in range(iterations):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def clip_embedding_norm(weight_VD: Tensor, max_norm: float) -> Tensor:
    """An embedding table whose rows have at most this norm; shorter rows are untouched, zero rows too."""
    norm = weight_VD.float().norm(dim=-1, keepdim=True)
    factor = (max_norm / norm.clamp_min(torch.finfo(torch.float32).tiny)).clamp(max=1.0)
    return (weight_VD * factor).to(weight_VD.dtype)


def clip_factor(global_grad_norm: float, max_norm: float) -> float:
    """What global-norm clipping multiplies every gradient by."""
    return min(1.0, max_norm / global_grad_norm) if global_grad_norm > 0 else 1.0


def adam_update_size(lr: float, beta1: float, grad: float, v_sqrt: float, eps: float = 0.0) -> float:
    """|Δθ| of one parameter when a gradient arrives on cold momentum: lr · (1 − β₁) · |g| / (√v̂ + ε).

    √v̂ is the stale one, from before the step: it is what makes a sudden gradient an oversized update.
    """
    return lr * (1 - beta1) * abs(grad) / (v_sqrt + eps)


def stochastic_bf16_update(weight: Tensor, update: Tensor, generator: Generator) -> Tensor:
    """weight + update as bf16, rounded up or down in proportion: small updates survive on average.

    Rounding to nearest loses every update under half a bf16 ulp of its weight (2^−9 of it, at most).
    """
    return round_to_bf16_stochastic(weight.float() + update.float(), generator).to(torch.bfloat16)
