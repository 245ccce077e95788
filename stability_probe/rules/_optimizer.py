"""How far the stored second moments lag behind the gradient, tensor by tensor."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Skip, Threshold
from stability_probe.rules._tables import Record, is_number, quantile, records

if TYPE_CHECKING:
    from stability_probe.measure import Measurements


IMPOSSIBLE = Threshold(
    0.5, "of a tensor's elements", "moments of one run have none: m2 <= v x a constant of the betas",
    "stability_probe/optimizer_step.py, moment_bound (Cauchy and Schwarz)",
)  # fmt: skip
NEARLY_ALL = 0.75  # of the tensors: where fewer disagree, those tensors are the matter


def moments_are_torn(rows: list[Record]) -> bool:
    """Whether first and second moments cannot come from the same gradients, in nearly all tensors."""
    known = [row["impossible_share"] for row in rows if is_number(row["impossible_share"])]
    return bool(known) and sum(share >= IMPOSSIBLE.value for share in known) >= NEARLY_ALL * len(known)


def no_moments(m: Measurements) -> str:
    """Why nothing can be said about the step, and what to supply."""
    return m.optimizer_missing or "no usable optimizer state beside the checkpoint; give it with --optimizer PATH"


def lagging(row: Record) -> float:
    """Sum g² over sum v̂ of one tensor, for a gradient of ordinary size.

    Where the tensor's gradient on the baseline batch is known and smaller, the ratio is brought down to it: a
    gradient that only this batch makes is the data's doing, not a stale moment.
    """
    ratio, now, usual = row["g2_over_v"], row["grad_norm"], row["baseline_grad_norm"]
    if math.isnan(ratio) or not (math.isfinite(usual) and math.isfinite(now) and now > 0):
        return ratio
    return ratio * min(1.0, (usual / now) ** 2)


def gradient_is_usual(m: Measurements) -> bool:
    """Whether something says that this batch's gradient is what the run knows: then v̂ should have known it too."""
    usual = m.baseline_grad_norm
    if usual is None and m.log is not None:
        usual = m.log.usual_grad_norm
    return usual is not None and m.global_grad_norm <= 3 * usual


def with_moments(m: Measurements) -> list[Record]:
    """Tensors whose second moment is known.

    Raises:
        Skip: there is none.
    """
    known = [row for row in records(m.parameters) if not math.isnan(row["g2_over_v"])]
    if not known:
        raise Skip(no_moments(m))
    return known


def usual_lag(rows: list[Record]) -> float:
    """Lower quartile of g²/v̂ over the tensors: up to three quarters of them may be stale without moving it."""
    return quantile((row["g2_over_v"] for row in rows), 0.25)
