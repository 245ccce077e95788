"""Subtract log Z from the logits before they are rounded. Both roundings are known from the fp32 replay."""

from __future__ import annotations

from stability_probe.interventions.bench import Bench, CannotRun, Reading

OF_THE_DATA = False


def trial(bench: Bench, precision: str = "bf16") -> Reading:
    """The precision gap without the part that rounding the drifted logits adds to it.

    Raises:
        CannotRun: the batch was not replayed in this precision, or the logits are too small to matter.
    """
    gap = bench.measurements.precisions.get(precision)
    if gap is None or gap.rounding_gap is None or gap.recentred_gap is None:
        raise CannotRun(f"needs a replay in {precision} of logits that its spacing can swallow")
    return {"precision_gap": max(0.0, gap.token_gap - max(0.0, gap.rounding_gap - gap.recentred_gap))}
