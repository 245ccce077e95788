"""What bf16 weights without an fp32 copy make of one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from stability_probe.checkpoints.base import OptimizerState
from stability_probe.compare.result import UpdateReport
from stability_probe.precisions.rounding import round_to_bf16_stochastic

# Adam's usual learning rates for pretraining; with cold statistics each element moves by about the rate itself.
RATES = (1e-3, 1e-4, 1e-5)
# Elements looked at in each tensor: of ten tensors together, a share is known to 0.3 percentage points.
SAMPLE = 4_000


@torch.no_grad()
def survival(weight: Tensor, update: Tensor, generator: Generator) -> tuple[int, int, float, float, float]:
    """How bf16 weights take an fp32 update: elements that should move, that do not (nearest), and progress.

    Returns:
        moving, lost, ⟨u, u⟩, ⟨u, applied by rounding to nearest⟩, ⟨u, applied by stochastic rounding⟩.
    """
    stored = weight.detach().to(torch.bfloat16).float()
    moving = update != 0
    nearest = (stored + update).to(torch.bfloat16).float() - stored
    drawn = round_to_bf16_stochastic(stored + update, generator) - stored
    u = update.double()
    products = (torch.stack([(u * v.double()).sum() for v in (update, nearest, drawn)])).tolist()
    return int(moving.sum()), int((moving & (nearest == 0)).sum()), products[0], products[1], products[2]


def update_reports(model: nn.Module, state: OptimizerState | None, lr: float | None) -> tuple[UpdateReport, ...]:
    """One row from the stored moments where they are known; else one per usual learning rate, with |update| = lr."""
    samples = [Sample.of(name, parameter) for name, parameter in model.named_parameters()]
    if state is not None and state.kind == "adamw" and state.exp_avg_sq:
        return (_report(samples, "stored moments" + (f" at lr {lr:g}" if lr else ""), state, lr),)
    rates = (lr,) if lr else RATES
    return tuple(_report(samples, f"|update| = lr {rate:g}", None, rate) for rate in rates)


@dataclass(frozen=True)
class Sample:
    """Every stride-th element of one parameter, on the CPU."""

    name: str
    stride: int
    weight: Tensor

    @classmethod
    def of(cls, name: str, parameter: Tensor) -> Sample:
        stride = max(1, parameter.numel() // SAMPLE) | 1  # odd: columns of a power-of-two width are all visited
        return cls(name, stride, _every(parameter, stride).cpu())


def _report(samples: list[Sample], source: str, state: OptimizerState | None, lr: float | None) -> UpdateReport:
    updates = [_update(sample, state, lr) for sample in samples]
    known = [(s.weight.float(), update) for s, update in zip(samples, updates, strict=True) if update is not None]
    if not known:
        return UpdateReport(source, math.nan, math.nan, math.nan)
    weights, steps = (torch.cat(parts) for parts in zip(*known, strict=True))
    moving, lost, size, nearest, drawn = survival(weights, steps, Generator().manual_seed(0))
    if not moving:
        return UpdateReport(source, math.nan, math.nan, math.nan)
    return UpdateReport(source, lost / moving, nearest / size, drawn / size)


def _every(values: Tensor, stride: int) -> Tensor:
    """Every stride-th element in row-major order, gathered without a copy of the rest."""
    if values.dim() == 0 or stride == 1 or values.is_contiguous():
        return values.detach().reshape(-1)[::stride]
    index = torch.arange(0, values.numel(), stride, device=values.device)
    return values.detach()[torch.unravel_index(index, values.shape)]


@torch.no_grad()
def _update(sample: Sample, state: OptimizerState | None, lr: float | None) -> Tensor | None:
    """AdamW's step for the elements of a sample; None where its moments are not known."""
    weight, name = sample.weight, sample.name
    if state is None:
        return torch.full_like(weight, lr or 0.0, dtype=torch.float32)
    if name not in state.exp_avg or name not in state.exp_avg_sq:
        return None
    group = state.groups[state.group_of[name]]
    beta1, beta2 = group.betas
    t = max(state.step.get(name, 1), 1)
    mean = _every(state.exp_avg[name], sample.stride).cpu().float() / (1 - beta1**t)
    square = _every(state.exp_avg_sq[name], sample.stride).cpu().float() / (1 - beta2**t)
    rate = group.lr if lr is None else lr
    return -rate * (mean / (square.sqrt() + group.eps) + group.weight_decay * weight)
