"""Leave the targets inside some spans out of the loss. The losses of all tokens are already known."""

from __future__ import annotations

import math

from stability_probe.interventions.bench import Bench, Reading

OF_THE_DATA = True


def trial(bench: Bench, spans: list[tuple[int, int, int]]) -> Reading:
    """Loss without the targets that sit at positions [start, end) of the row; position p is predicted at p − 1."""
    kept_BT = bench.trace.has_target_BT.clone()
    for row, start, end in spans:
        kept_BT[row, max(start - 1, 0) : max(end - 1, 0)] = False
    losses = bench.trace.token_loss_BT[kept_BT]
    loss = losses.double().mean().item() if losses.numel() else math.nan
    return {"loss": loss, "nonfinite": 0.0 if math.isfinite(loss) else 1.0}
