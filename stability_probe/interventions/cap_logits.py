"""Apply a soft-cap to logits, or take one away: c · tanh(x / c), and its inverse."""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.interventions.bench import Bench, CannotRun
from stability_probe.mitigations import softcap
from stability_probe.taps.attention_change import AttentionChange, allowed

OF_THE_DATA = False
# atanh is infinite at the cap itself; fp32 logits this close to it cannot be told from it.
SATURATED = 1.0 - 1e-6


def repaired(bench: Bench, cap: float, where: str = "output", remove: bool = False) -> Bench:
    """The bench with the cap applied to (or removed from) the output logits, or all attention logits.

    Raises:
        CannotRun: `where` is "attention", and no attention module is known.
    """
    change = without_cap if remove else softcap
    if where == "output":
        return bench.holding(change_logits=lambda logits: change(logits, cap))
    sites = [site.name for site in bench.subject.anatomy.attention]
    if not sites:
        raise CannotRun("no attention module was found in this model")

    def changed(logits: Tensor, _start: int) -> Tensor:
        return torch.where(allowed(logits), change(logits, cap), logits)

    return bench.holding_attention(lambda: AttentionChange(changed).on(bench.subject.module, sites))


def without_cap(logits: Tensor, cap: float) -> Tensor:
    """The logits that c · tanh(x / c) was applied to."""
    return cap * torch.atanh((logits / cap).clamp(-SATURATED, SATURATED))
