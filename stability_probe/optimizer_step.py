"""One AdamW step, simulated: its size tensor by tensor, and its effect on the weights in memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stability_probe.checkpoints.base import OptimizerGroup, OptimizerState


@dataclass(frozen=True)
class TensorStep:
    """What the step does to one tensor (see `Measurements.parameters`)."""

    update_rms: float
    update_ratio: float
    g2_over_v: float
    eps_share: float
    impossible_share: float


@dataclass(frozen=True)
class StepSetting:
    """How the step is taken.

    Attributes:
        lr: replaces the groups' learning rates where it is not None; `lr_factor` multiplies either.
        clip_factor: what the gradient is multiplied by (1 where nothing is clipped).
        refresh: parameters whose v̂ is replaced by max(v̂, g²) before the step.
        eps: replaces the groups' ε where it is not None.
        in_bf16: the stepped weights are rounded to bf16, as where they are kept in it without an fp32 copy.
    """

    lr: float | None = None
    lr_factor: float = 1.0
    clip_factor: float = 1.0
    refresh: frozenset[str] = frozenset()
    eps: float | None = None
    in_bf16: bool = False


def clip_factor(global_grad_norm: float, grad_clip: float | None) -> float:
    """What `clip_grad_norm_` multiplies the gradient by."""
    if grad_clip is None or not math.isfinite(global_grad_norm):
        return 1.0
    return min(1.0, grad_clip / (global_grad_norm + 1e-6))


@torch.no_grad()
def adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    group: OptimizerGroup,
    *,
    lr: float,
    refresh: bool = False,
) -> Tensor:
    """The change of the weight in one AdamW step (Loshchilov & Hutter 2019, algorithm 2), as a new tensor.

    Args:
        grad: already clipped.
        step: updates done before this one.
        refresh: use max(v̂, g²) for the second moment, and no less than the first moment asks for (`moment_bound`):
            what it would be, had it kept up with the gradient.
    """
    beta1, beta2 = group.betas
    t = step + 1
    mean = exp_avg.float() * beta1 + grad * (1 - beta1)
    square = exp_avg_sq.float() * beta2 + grad * grad * (1 - beta2)
    v_hat = square / (1 - beta2**t)
    if refresh:
        v_hat = torch.maximum(v_hat, grad * grad)
        if bound := moment_bound(group.betas):
            v_hat = torch.maximum(v_hat, mean * mean / (bound * (1 - beta2**t)))
    denominator = v_hat.sqrt_().add_(group.eps)
    lr, decay = _in_fp32(lr), _in_fp32(lr * group.weight_decay)
    return mean.div_(1 - beta1**t).div_(denominator).mul_(-lr).sub_(weight, alpha=decay)


def _in_fp32(value: float) -> float:
    """The number as fp32 holds it: torch refuses larger ones, and a stored group may hold anything."""
    return math.copysign(math.inf, value) if abs(value) > torch.finfo(torch.float32).max else value


@torch.no_grad()
def tensor_steps(
    module: nn.Module, gradients: Mapping[str, Tensor], state: OptimizerState, setting: StepSetting
) -> dict[str, TensorStep]:
    """Size of the step in every tensor whose moments are known."""
    result = {}
    for name, weight, grad, update in updates(module, gradients, state, setting):
        group = state.groups[state.group_of[name]]
        v_hat = state.exp_avg_sq[name].float() / max(1 - group.betas[1] ** max(state.step[name], 1), 1e-12)
        mass = v_hat.double().sum().item()
        g2 = grad.double().square().sum().item()
        rms = update.double().square().mean().sqrt().item()
        weight_rms = weight.double().square().mean().sqrt().item()
        result[name] = TensorStep(
            update_rms=rms,
            update_ratio=rms / weight_rms if weight_rms > 0 else math.inf,
            g2_over_v=g2 / mass if mass > 0 else math.inf if g2 > 0 else math.nan,
            eps_share=(v_hat.sqrt() < 10 * group.eps).double().mean().item(),
            impossible_share=impossible_share(state.exp_avg[name], state.exp_avg_sq[name], group.betas),
        )
    return result


# Moments kept in bf16 or in eight bits are off by less, squared.
ROUNDED = 4.0


def moment_bound(betas: tuple[float, float]) -> float | None:
    """The largest m²/v of any sequence of gradients; None where there is no bound.

    With m = Σ (1 − β₁) β₁ᵏ g_k and v = Σ (1 − β₂) β₂ᵏ g_k², Cauchy and Schwarz give
    m² ≤ v · (1 − β₁)² / ((1 − β₂) (1 − β₁²/β₂)).
    """
    beta1, beta2 = betas
    return (1 - beta1) ** 2 / ((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 < 1 else None


@torch.no_grad()
def impossible_share(exp_avg: Tensor, exp_avg_sq: Tensor, betas: tuple[float, float]) -> float:
    """Share of elements whose first moment no gradients with that second moment make; NaN where there is no bound."""
    bound = moment_bound(betas)
    if not bound:
        return math.nan
    return (exp_avg.double().square() > ROUNDED * bound * exp_avg_sq.double()).double().mean().item()


@contextmanager
def stepped(
    module: nn.Module, gradients: Mapping[str, Tensor], state: OptimizerState, setting: StepSetting
) -> Iterator[None]:
    """Within this context the weights are those after the step; afterwards they are exactly the old ones."""
    parameters = dict(module.named_parameters())
    old = {name: parameters[name].data for name in gradients if name in state.exp_avg}
    try:
        for name, weight, _, update in updates(module, gradients, state, setting):
            parameters[name].data = weight + update
        yield
    finally:
        for name, data in old.items():
            parameters[name].data = data


def updates(
    module: nn.Module, gradients: Mapping[str, Tensor], state: OptimizerState, setting: StepSetting
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """(parameter, weight, clipped gradient, change of the weight) for every parameter whose moments are known."""
    for name, parameter in module.named_parameters():
        if name not in gradients or name not in state.exp_avg:
            continue
        group = state.groups[state.group_of[name]]
        if setting.eps is not None:
            group = dataclasses.replace(group, eps=setting.eps)
        weight = parameter.detach()
        grad = gradients[name] * setting.clip_factor
        lr = (group.lr if setting.lr is None else setting.lr) * setting.lr_factor
        device = weight.device
        update = adamw_update(
            weight,
            grad,
            state.exp_avg[name].to(device),
            state.exp_avg_sq[name].to(device),
            state.step[name],
            group,
            lr=lr,
            refresh=name in setting.refresh,
        )
        if setting.in_bf16:
            update = rounded_update(weight, update)
            weight = weight.bfloat16().float()
        yield name, weight, grad, update


def rounded_update(weight: Tensor, update: Tensor) -> Tensor:
    """What is left of the update where the weight is kept in bf16: steps of its grid, often none."""
    old = weight.bfloat16().float()
    return (old + update).bfloat16().float() - old
