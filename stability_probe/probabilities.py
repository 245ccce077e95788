"""How far apart two token distributions are, and whether a format can tell the likeliest tokens apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from stability_probe.precisions.formats import Format


def total_variation(logits: Tensor, other: Tensor) -> Tensor:
    """½ Σ|p − q| between the softmax of two (…, V) logits, in fp32: 0 where alike, 1 where disjoint."""
    return 0.5 * (logits.float().softmax(-1) - other.float().softmax(-1)).abs().sum(-1)


@dataclass(frozen=True)
class Head:
    """The likeliest tokens of each position: enough to compare distributions without keeping all logits.

    Attributes:
        tokens: (N, k) token ids. probabilities: (N, k) their softmax over the whole vocabulary, fp32.
    """

    tokens: Tensor
    probabilities: Tensor


@torch.no_grad()
def likeliest(logits_NV: Tensor, log_z_N: Tensor, k: int = 128) -> Head:
    """The k likeliest tokens of each position."""
    top, tokens = logits_NV.topk(min(k, logits_NV.shape[-1]), dim=-1)
    return Head(tokens, (top.float() - log_z_N.unsqueeze(-1)).exp())


@torch.no_grad()
def head_variation(head: Head, logits_NV: Tensor, log_z_N: Tensor) -> Tensor:
    """(N,) total variation to the distribution of `logits_NV`, with all tokens outside `head` taken as one.

    A lower bound of the whole distance, exact where one distribution is above the other on all those tokens.
    """
    other = (logits_NV.gather(-1, head.tokens).float() - log_z_N.unsqueeze(-1)).exp()
    rest = (head.probabilities.sum(-1) - other.sum(-1)).abs()
    return 0.5 * ((head.probabilities - other).abs().sum(-1) + rest)


@torch.no_grad()
def spacing_at(values: Tensor, fmt: Format) -> Tensor:
    """Distance between neighbouring values of `fmt` at each |value|, elementwise (the tensor form of `spacing`)."""
    size = values.float().abs().clamp_min(fmt.min_normal)
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - fmt.significand_bits)


@torch.no_grad()
def unresolved(logits_NV: Tensor, fmt: Format) -> Tensor:
    """(N,) True where the two largest logits are closer than one spacing of `fmt` at their size."""
    top = logits_NV.float().topk(min(2, logits_NV.shape[-1]), dim=-1).values
    return (top[:, 0] - top[:, -1]) < spacing_at(top[:, 0], fmt)
