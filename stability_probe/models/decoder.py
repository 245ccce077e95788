"""The package's own small decoder-only transformer: every design choice that changes how a run diverges."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODEL_TYPE = "stability_probe_decoder"


@dataclass(frozen=True)
class DecoderConfig:
    """The decoder's shape. Defaults are GPT-2's choices.

    Attributes:
        n_kv_head: heads of keys and values; n_head must be a multiple (grouped-query attention). None: n_head.
        d_ff: width of the MLP. None: 4 · d_model.
        max_positions: rows of the learned position table, the longest sequence that the model takes.
        attention_softcap: attention logits become c · tanh(logits / c), before the mask.
        output_softcap: the same for the output logits.
        hyper_streams: parallel residual streams, mixed by a learnable matrix per block; 1 is the plain residual.
    """

    vocab_size: int
    n_layer: int
    n_head: int
    d_model: int
    n_kv_head: int | None = None
    d_ff: int | None = None
    max_positions: int = 1024
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10_000.0
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_placement: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-5
    mlp: Literal["gelu", "swiglu"] = "gelu"
    qk_norm: bool = False
    attention_softcap: float | None = None
    output_softcap: float | None = None
    tied: bool = True
    bias: bool = False
    hyper_streams: int = 1

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "n_layer", "n_head", "d_model", "max_positions", "hyper_streams", "kv_heads", "width")
        wrong = [name for name in sizes if not isinstance(getattr(self, name), int) or getattr(self, name) < 1]
        if wrong:
            raise ValueError(f"{wrong[0]} must be a positive whole number, not {getattr(self, wrong[0])!r}")
        if self.d_model % self.n_head or self.n_head % self.kv_heads:
            raise ValueError("n_head must divide d_model, and n_kv_head must divide n_head")
        if self.positions == "rotary" and self.head_dim % 2:
            raise ValueError("rotary positions need an even head width")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def width(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_head

    def to_dict(self) -> dict[str, Any]:
        """For `config.json`, or the "config" of a `.pt` file: such a checkpoint loads without `--model`."""
        return {"model_type": MODEL_TYPE, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> DecoderConfig:
        """The inverse of `to_dict`.

        Raises:
            ValueError: a key that this version does not know, or a value that makes no model.
            TypeError: a required key is missing.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(stored) - known - {"model_type"})
        if unknown:
            raise ValueError(f"unknown settings: {', '.join(unknown)}")
        return cls(**{name: value for name, value in stored.items() if name in known})


_CHOICES = {
    "positions": ("learned", "rotary"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_placement": ("pre", "post"),
    "mlp": ("gelu", "swiglu"),
}


class Attention(nn.Module):
    """Causal self-attention. A query always sees itself, so a padded row never divides by zero."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        kv_width = config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.d_model, config.d_model, config.bias)
        self.k_proj = nn.Linear(config.d_model, kv_width, config.bias)
        self.v_proj = nn.Linear(config.d_model, kv_width, config.bias)
        self.o_proj = nn.Linear(config.d_model, config.d_model, config.bias)
        if config.qk_norm:
            self.q_norm = nn.RMSNorm(config.head_dim, config.norm_eps)
            self.k_norm = nn.RMSNorm(config.head_dim, config.norm_eps)

    def forward(self, x_BTD: Tensor, allowed_B1TT: Tensor | None, angles_BTK: Tensor | None) -> Tensor:
        q_BHTK, k_BHTK, v_BHTK = (
            projected.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for projected in (self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD))
        )
        if self.config.qk_norm:
            q_BHTK, k_BHTK = self.q_norm(q_BHTK), self.k_norm(k_BHTK)
        if angles_BTK is not None:
            q_BHTK, k_BHTK = rotate(q_BHTK, angles_BTK), rotate(k_BHTK, angles_BTK)
        if self.config.attention_softcap is None:
            y_BHTK = F.scaled_dot_product_attention(
                q_BHTK,
                k_BHTK,
                v_BHTK,
                attn_mask=allowed_B1TT,
                is_causal=allowed_B1TT is None,
                enable_gqa=self.config.kv_heads != self.config.n_head,
            )
        else:
            y_BHTK = capped_attention(q_BHTK, k_BHTK, v_BHTK, allowed_B1TT, self.config.attention_softcap)
        return self.o_proj(y_BHTK.transpose(1, 2).flatten(2))


def capped_attention(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor, allowed: Tensor | None, cap: float) -> Tensor:
    """Attention with logits c · tanh(logits / c) before the mask (Gemma 2, arXiv:2408.00118, section 2)."""
    repeats = q_BHTK.shape[1] // k_BHTK.shape[1]
    k_BHTK, v_BHTK = (heads.repeat_interleave(repeats, dim=1) for heads in (k_BHTK, v_BHTK))
    if allowed is None:
        allowed = causal(q_BHTK.shape[2], q_BHTK.device)
    logits_BHTT = q_BHTK @ k_BHTK.transpose(-1, -2) / math.sqrt(q_BHTK.shape[-1])
    logits_BHTT = cap * torch.tanh(logits_BHTT / cap)
    weights_BHTT = F.softmax(logits_BHTT.masked_fill(~allowed, -math.inf), dim=-1, dtype=torch.float32)
    return weights_BHTT.to(v_BHTK.dtype) @ v_BHTK


def causal(n_positions: int, device: torch.device) -> Tensor:
    """Bool (T, T): True where a query (row) may see a key (column)."""
    return torch.ones(n_positions, n_positions, dtype=torch.bool, device=device).tril()


def rotate(x_BHTK: Tensor, angles_BTK: Tensor) -> Tensor:
    """Rotary positions on the two halves of the head (RoFormer, arXiv:2104.09864; halves as in Llama)."""
    cos, sin = angles_BTK.cos().unsqueeze(1), angles_BTK.sin().unsqueeze(1)
    first, second = x_BHTK.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BHTK.dtype)


class MLP(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gated = config.mlp == "swiglu"
        if self.gated:
            self.gate_proj = nn.Linear(config.d_model, config.width, config.bias)
        self.up_proj = nn.Linear(config.d_model, config.width, config.bias)
        self.down_proj = nn.Linear(config.width, config.d_model, config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        up = self.up_proj(x_BTD)
        return self.down_proj(F.silu(self.gate_proj(x_BTD)) * up if self.gated else F.gelu(up))


class Block(nn.Module):
    """Attention and MLP with their residual connections, or what they add to mixed residual streams."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm_first = config.norm_placement == "pre"
        self.attn_norm = make_norm(config)
        self.attn = Attention(config)
        self.mlp_norm = make_norm(config)
        self.mlp = MLP(config)
        if config.hyper_streams > 1:
            # As the plain residual at first: streams unmixed, read as their mean, all written alike.
            n = config.hyper_streams
            self.stream_mix = nn.Parameter(torch.eye(n))
            self.stream_read = nn.Parameter(torch.full((n,), 1 / n))
            self.stream_write = nn.Parameter(torch.ones(n))

    def forward(self, x: Tensor, allowed: Tensor | None, angles: Tensor | None) -> Tensor:
        """Takes and returns (B, T, D), or (B, T, n, D) with hyper-connections (arXiv:2409.19606)."""
        if not hasattr(self, "stream_mix"):
            return self.transform(x, allowed, angles)
        read_BTD = torch.einsum("n,btnd->btd", self.stream_read, x)
        added_BTD = self.transform(read_BTD, allowed, angles) - read_BTD
        return torch.einsum("mn,btnd->btmd", self.stream_mix, x) + torch.einsum(
            "n,btd->btnd", self.stream_write, added_BTD
        )

    def transform(self, x_BTD: Tensor, allowed: Tensor | None, angles: Tensor | None) -> Tensor:
        if self.norm_first:
            x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), allowed, angles)
            return x_BTD + self.mlp(self.mlp_norm(x_BTD))
        x_BTD = self.attn_norm(x_BTD + self.attn(x_BTD, allowed, angles))
        return self.mlp_norm(x_BTD + self.mlp(x_BTD))


def make_norm(config: DecoderConfig) -> nn.Module:
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, config.norm_eps, bias=config.bias)


class Decoder(nn.Module):
    """Decoder-only language model: `forward(input_ids)` returns logits.

    Weights start as N(0, 0.02²), the projections into the residual stream narrower by 1/√(2 · n_layer)
    (GPT-2, section 2.3); biases at 0, norms at 1.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.position_embed = nn.Embedding(config.max_positions, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # Post-norm blocks end normalised.
        self.final_norm = make_norm(config) if config.norm_placement == "pre" else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.apply(_initialise)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.n_layer))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Logits of the next token.

        Args:
            input_ids: (B, T) token ids.
            attention_mask: (B, T), non-zero on real tokens; no query sees the others, except a padded one itself.
            position_ids: (B, T); 0…T−1 where absent.

        Returns:
            (B, T, V), in the dtype of the weights.

        Raises:
            ValueError: more positions than the model was made for.
        """
        n_positions = input_ids.shape[1]
        if n_positions > self.config.max_positions:
            raise ValueError(f"{n_positions} positions, but the model has max_positions {self.config.max_positions}")
        if position_ids is None:
            position_ids = torch.arange(n_positions, device=input_ids.device).unsqueeze(0)
        x = self.embed(input_ids)
        angles_BTK = None
        if self.config.positions == "learned":
            x = x + self.position_embed(position_ids)
        else:
            angles_BTK = rotary_angles(position_ids, self.config.head_dim, self.config.rope_theta)
        allowed_B1TT = None if attention_mask is None else visible(attention_mask)
        if self.config.hyper_streams > 1:
            x = x.unsqueeze(2).expand(-1, -1, self.config.hyper_streams, -1)
        for block in self.blocks:
            x = block(x, allowed_B1TT, angles_BTK)
        if self.config.hyper_streams > 1:
            x = x.mean(dim=2)
        logits_BTV = self.head(self.final_norm(x))
        cap = self.config.output_softcap
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)


def rotary_angles(position_ids_BT: Tensor, head_dim: int, theta: float) -> Tensor:
    """Angles (B, T, head_dim / 2) in radians, in fp32: a position times a frequency needs more than bf16's 8 bits."""
    exponents = torch.arange(0, head_dim, 2, device=position_ids_BT.device, dtype=torch.float32) / head_dim
    return position_ids_BT.unsqueeze(-1).float() * theta**-exponents


def visible(mask_BT: Tensor) -> Tensor:
    """Bool (B, 1, T, T): causal, real keys only, and every position sees itself."""
    n_positions = mask_BT.shape[1]
    itself = torch.eye(n_positions, dtype=torch.bool, device=mask_BT.device)
    return (causal(n_positions, mask_BT.device) & mask_BT.bool()[:, None, None, :]) | itself


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
