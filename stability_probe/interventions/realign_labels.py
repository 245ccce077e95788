"""Move the targets, so that each position predicts its next token again. The logits are already known."""

from __future__ import annotations

import dataclasses
import math

import torch

from stability_probe.interventions.bench import Bench, Reading
from stability_probe.replay import moved_targets

OF_THE_DATA = False


def trial(bench: Bench, offset: int, rows: list[int] | None = None) -> Reading:
    """Loss with the targets of these rows (of all rows, where none is named) moved by `offset` positions."""
    moved = set(rows or range(len(bench.trace.offset_sums)))
    total, count = 0.0, 0
    for row, sums in enumerate(bench.trace.offset_sums):
        loss, targets = sums[offset if row in moved else 0]
        total, count = total + loss, count + targets
    loss = total / count if count else math.nan
    return {"loss": loss, "nonfinite": 0.0 if math.isfinite(loss) else 1.0}


def repaired(bench: Bench, offset: int, rows: list[int] | None = None) -> Bench:
    """The bench with the targets themselves moved, for replays with another change on top."""
    old_BT, moved = bench.batch.targets_BT, set(rows or range(len(bench.batch.targets_BT)))
    new = [moved_targets(row_T, offset) if row in moved else row_T for row, row_T in enumerate(old_BT)]
    return dataclasses.replace(bench, batch=dataclasses.replace(bench.batch, targets_BT=torch.stack(new)))
