"""Number the positions as they should be: 0, 1, 2, … from the first real token of each row."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from stability_probe.batches.base import Batch
from stability_probe.interventions.bench import Bench, CannotRun

OF_THE_DATA = False


def repaired(bench: Bench) -> Bench:
    """The bench with positions 0 … T−1.

    Raises:
        CannotRun: the model's forward takes no position ids.
    """
    if "position_ids" not in bench.subject.takes:
        raise CannotRun("the model's forward takes no position_ids")
    batch = dataclasses.replace(bench.batch, position_ids_BT=plain_positions(bench.batch))
    return dataclasses.replace(bench, batch=batch)


def plain_positions(batch: Batch) -> Tensor:
    """(B, T): real tokens counted from 0 on; padding before them is at 0 too."""
    if batch.mask_BT is None:
        return torch.arange(batch.ids_BT.shape[1]).expand_as(batch.ids_BT).clone()
    start = batch.mask_BT.int().argmax(1, keepdim=True)
    return (torch.arange(batch.ids_BT.shape[1]) - start).clamp_min(0)
