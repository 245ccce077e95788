"""How much of its progress one AdamW step loses, to rounding and to ε: the excess of a plateau."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from stability_probe.checkpoints.base import OptimizerState
from stability_probe.measure import StepProgress
from stability_probe.optimizer_step import StepSetting, rounded_update, updates

# Far below any √v̂ that carries gradient: what Wortsman et al. (2023, section 3.4) found small enough at scale.
TINY_EPS = 1e-15
LISTED = 50


@torch.no_grad()
def gain(module: nn.Module, gradients: Mapping[str, Tensor], state: OptimizerState, setting: StepSetting) -> float:
    """−⟨gradient, update⟩ in nats: the first-order decrease of the loss by this step, weight decay included."""
    return -sum(_dot(gradients[name], update) for name, _, _, update in updates(module, gradients, state, setting))


def _dot(grad: Tensor, update: Tensor) -> float:
    return torch.dot(grad.flatten().double(), update.flatten().double()).item()


def lost_share(own: float, expected: float) -> float:
    """The share of the expected gain that the step does not make; above 1 where it climbs."""
    return 1.0 - own / expected


def reference(setting: StepSetting) -> StepSetting:
    """The step with weights in fp32 and ε far below √v̂."""
    return dataclasses.replace(setting, eps=TINY_EPS, in_bf16=False)


@torch.no_grad()
def step_progress(
    module: nn.Module,
    gradients: Mapping[str, Tensor],
    state: OptimizerState,
    setting: StepSetting,
    in_bf16: bool,
    reason: str,
) -> StepProgress | None:
    """The `step_progress` of `Measurements`; None where the reference step gains nothing."""
    steps = zip(
        updates(module, gradients, state, dataclasses.replace(setting, in_bf16=False)),
        updates(module, gradients, state, reference(setting)),
        strict=True,
    )
    expected = plain = rounded = own = 0.0
    vanishing, gone, moved = [], 0, 0
    for (name, weight, _, update), (_, _, _, full) in steps:
        grad = gradients[name]
        expected -= _dot(grad, full)
        plain -= _dot(grad, update)
        if in_bf16:
            rounded -= _dot(grad, rounded_update(weight, full))
            kept = rounded_update(weight, update)
            own -= _dot(grad, kept)
            lost, of = int(((kept == 0) & (update != 0)).sum()), int((update != 0).sum())
            vanishing.append((name, lost / max(of, 1)))
            gone, moved = gone + lost, moved + of
    if not expected > 0.0:
        return None
    return StepProgress(
        expected=expected,
        lost=lost_share(own if in_bf16 else plain, expected),
        lost_to_rounding=lost_share(rounded, expected) if in_bf16 else 0.0,
        lost_to_epsilon=lost_share(plain, expected),
        vanish_share=gone / max(moved, 1),
        vanishing=tuple(sorted(vanishing, key=lambda item: -item[1])[:LISTED]),
        in_bf16=in_bf16,
        in_bf16_reason=reason,
        eps=max((group.eps for group in state.groups), default=1e-8),
    )


def kept_in_bf16(run_precision: str, stored: Mapping[str, Tensor], state: OptimizerState) -> tuple[bool, str]:
    """Whether the run keeps its weights in bf16 without an fp32 copy, and how that is known.

    AdamW's moments have the dtype of the weights that it updates: bf16 moments beside bf16 weights mean that there
    is no fp32 copy. bf16 weights alone do not: they are often only a way of saving.
    """
    if run_precision == "bf16-true":
        return True, "the run is said to train in bf16-true"
    floats = [tensor.dtype for tensor in stored.values() if tensor.is_floating_point()]
    moments = [tensor.dtype for tensor in state.exp_avg.values()]
    if floats and moments and set(floats) == set(moments) == {torch.bfloat16}:
        return True, "the stored weights and AdamW's moments are all bf16"
    return False, ""
