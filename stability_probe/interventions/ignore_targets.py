"""Take targets out of the loss. No new forward: every token's loss is known."""

from __future__ import annotations

import math

from stability_probe.interventions.bench import Bench, CannotRun, Reading
from stability_probe.replay import mean_loss

OF_THE_DATA = True


def trial(bench: Bench, spans: list[tuple[int, int, int]]) -> Reading:
    """Loss without the targets that sit at these positions (row, start, end); position p is the target of p − 1.

    Raises:
        CannotRun: no target would be left.
    """
    kept = bench.trace.has_target_BT.clone()
    for row, start, end in spans:
        kept[row, max(start - 1, 0) : max(end - 1, 0)] = False
    if not bool(kept.any()):
        raise CannotRun("no target would be left; give a healthy batch with --baseline")
    loss = mean_loss(bench.trace.token_loss_BT, kept)
    return {"loss": loss, "nonfinite": 0.0 if math.isfinite(loss) else 1.0}
