"""Multiply the attention logits of every head of every layer."""

from __future__ import annotations

import torch
from torch import Tensor

from stability_probe.interventions.bench import Bench, CannotRun
from stability_probe.taps.attention_change import AttentionChange, Change, allowed

OF_THE_DATA = False


def repaired(bench: Bench, factor: float) -> Bench:
    """The bench with all attention logits × factor; masked places stay masked.

    Raises:
        CannotRun: the model has no attention module that is known.
    """
    sites = [site.name for site in bench.subject.anatomy.attention]
    if not sites:
        raise CannotRun("no attention module was found in this model")
    return bench.holding_attention(lambda: AttentionChange(rescaled(factor)).on(bench.subject.module, sites))


def rescaled(factor: float) -> Change:
    """A change that multiplies allowed logits."""

    def change(logits: Tensor, _start: int) -> Tensor:
        return torch.where(allowed(logits), logits * factor, logits)

    return change
