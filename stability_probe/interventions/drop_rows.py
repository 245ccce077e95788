"""Leave rows out of the batch. No new forward: the per-row pass has their losses and gradients."""

from __future__ import annotations

import math

import torch

from stability_probe.interventions.bench import Bench, CannotRun, Reading, reading_of
from stability_probe.replay import Trace, mean_loss

OF_THE_DATA = True


def trial(bench: Bench, rows: list[int]) -> Reading:
    """Loss and gradient norm of the batch without the rows.

    Raises:
        CannotRun: nothing would be left and there is no baseline batch to stand in.
    """
    kept = [row for row in range(bench.batch.ids_BT.shape[0]) if row not in set(rows)]
    if not any(bool(bench.trace.has_target_BT[row].any()) for row in kept):
        if bench.healthy is None:
            raise CannotRun("no row would be left; give a healthy batch with --baseline")
        return reading_of(bench.healthy[1])
    loss = mean_loss(bench.trace.token_loss_BT[kept], bench.trace.has_target_BT[kept])
    norm = grad_norm_of(bench.trace, kept)
    reading: Reading = {"loss": loss, "nonfinite": 0.0 if math.isfinite(loss) else 1.0}
    if norm is not None:
        reading["grad_norm"] = norm
        reading["nonfinite"] = 0.0 if math.isfinite(loss) and math.isfinite(norm) else 1.0
    return reading


def grad_norm_of(trace: Trace, kept: list[int]) -> float | None:
    """Gradient norm of a batch of only these rows, from the rows' sketches (linear, so no cancellation)."""
    tap = trace.gradients
    if tap is None or not all(row in tap.row_sketch for row in kept):
        return None
    total = torch.stack([tap.row_sketch[row] for row in kept]).double().sum(0)
    targets = int(trace.has_target_BT[kept].sum())
    return total.norm().item() * trace.valid_targets / max(targets, 1)
