"""A module with nanoGPT's parameter names and order, so that its checkpoints and optimizers fit as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """Layer norm with an optional bias, ε = 1e-5."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.layer_norm(x_BTD, self.weight.shape, self.weight, self.bias, 1e-5)


class SelfAttention(nn.Module):
    """Causal attention whose q, k and v come from one fused projection."""

    def __init__(self, width: int, n_head: int, bias: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.c_attn = nn.Linear(width, 3 * width, bias)
        self.c_proj = nn.Linear(width, width, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x_BTD).chunk(3, dim=-1)
        )
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        return self.c_proj(y_BHTK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width, bias)
        self.c_proj = nn.Linear(4 * width, width, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x_BTD)))


class Block(nn.Module):
    def __init__(self, width: int, n_head: int, bias: bool) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = SelfAttention(width, n_head, bias)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = MLP(width, bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attn(self.ln_1(x_BTD))
        return x_BTD + self.mlp(self.ln_2(x_BTD))


class NanoGPT(nn.Module):
    """GPT-2 as nanoGPT lays it out; `forward(idx)` returns logits (B, T, V) of every position.

    Raises:
        ValueError: sizes that make no model.
    """

    def __init__(self, n_layer: int, n_head: int, n_embd: int, block_size: int, vocab_size: int, bias: bool) -> None:
        super().__init__()
        if min(n_layer, n_head, n_embd, block_size, vocab_size) < 1 or n_embd % n_head:
            raise ValueError("sizes must be positive, and n_head must divide n_embd")
        self.block_size = block_size
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocab_size, n_embd),
                "wpe": nn.Embedding(block_size, n_embd),
                "h": nn.ModuleList(Block(n_embd, n_head, bias) for _ in range(n_layer)),
                "ln_f": LayerNorm(n_embd, bias),
            }
        )
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * n_layer) if "c_proj" in name else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, idx: Tensor) -> Tensor:
        n_positions = idx.shape[1]
        if n_positions > self.block_size:
            raise ValueError(f"{n_positions} positions, but the model's block_size is {self.block_size}")
        x_BTD = self.transformer["wte"](idx) + self.transformer["wpe"](torch.arange(n_positions, device=idx.device))
        for block in self.transformer["h"].children():
            x_BTD = block(x_BTD)
        return self.lm_head(self.transformer["ln_f"](x_BTD))


def nanogpt_from(model_args: Mapping[str, Any]) -> NanoGPT:
    """The module that `model_args` describe; keys that do not shape it (dropout) are left aside.

    Raises:
        KeyError, TypeError, ValueError: arguments missing or senseless.
    """
    names = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    return NanoGPT(**{name: int(model_args[name]) for name in names}, bias=bool(model_args.get("bias", True)))
