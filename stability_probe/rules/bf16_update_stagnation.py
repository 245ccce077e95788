"""Weights kept in bf16 do not move: the updates are smaller than half a step of their grid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules._optimizer import no_moments
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "vanish": Threshold(
        0.5, "of the updates that are not zero", "where most of them round away the step is no longer the optimizer's",
        "a bf16 weight has 8 significant bits: an update under 2^-9 of it (0.002) leaves it where it is",
    ),
    "lost": Threshold(
        0.5, "of the step's first-order gain", "what the plateau is made of: half of the progress is rounded away",
        "the same half that the verdict asks of an explained share",
    ),
}  # fmt: skip

PAGE = Page(
    title="bf16 update stagnation",
    claim="The weights are kept in bf16 without an fp32 copy, and most updates are too small to change them.",
    mechanism=(
        "Neighbouring bf16 numbers differ by one part in 128 to 256. Late in a run an update is a thousandth of its "
        "weight or less; added to a bf16 weight it rounds back to where it was, step after step. Only weights near "
        "zero still move. The loss goes flat as the learning rate decays, as if the run had converged, and a larger "
        "rate brings noise instead of progress."
    ),
    signature=(
        "Weights and moments stored in bf16 (or a run that is said to train so); a simulated AdamW step most of "
        "whose updates vanish on the bf16 grid, and that gains far less to first order than the same step in fp32."
    ),
    false_alarms=(
        "A checkpoint saved in bf16 says nothing by itself: the moments' format tells whether an fp32 copy exists. A "
        "converged run, or a learning rate of zero, gains nothing in fp32 either. Early in a run updates are large "
        "enough. Stochastic rounding keeps small updates on average, and a replay cannot see it."
    ),
    proof="The AdamW step is simulated with fp32 weights: the lost progress comes back.",
    remedies=(
        Remedy("Keep an fp32 copy of the weights in the optimizer (autocast on fp32 weights does this)."),
        Remedy("Round stochastically.",
               "stability_probe.mitigations.stochastic_bf16_update(weight, update, generator)"),
        Remedy("Carry the rounding error along (Kahan summation) where memory for a second bf16 tensor is free."),
    ),
    references=(
        "Zamirai et al., Revisiting BFloat16 Training, 2020 (arXiv:2010.06192)",
        "Micikevicius et al., Mixed Precision Training, 2018, section 3.1",
    ),
)  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    progress = m.step_progress
    if progress is None:
        raise Skip(no_moments(m))
    if not progress.in_bf16:
        return []
    if not (progress.vanish_share >= t["vanish"].value and progress.lost_to_rounding >= t["lost"].value):
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{progress.vanish_share:.0%} of the updates vanish in the bf16 weights, and with them "
            f"{min(progress.lost_to_rounding, 1.0):.0%} of the step's progress.",
            location=Location(parameters=tuple(name for name, _ in progress.vanishing[:16])),
            evidence=(
                Evidence("updates that round away", progress.vanish_share, "", threshold=t["vanish"].value,
                         source=t["vanish"].source),
                Evidence("first-order gain of the step lost to rounding", progress.lost_to_rounding, "",
                         threshold=t["lost"].value, source=t["lost"].source),
                Evidence("first-order gain of the step in fp32", progress.expected, "nats"),
                Evidence("the weights' format", progress.in_bf16_reason),
            ),
            plans=(Plan("simulated_progress", {"in_fp32": True}, "the step with fp32 weights"),),
            strength=progress.vanish_share / t["vanish"].value,
            measures=("lost_progress",),
        )
    ]  # fmt: skip


_STUCK = {
    "lost": 0.93, "lost_to_rounding": 0.93, "vanish_share": 0.95, "in_bf16": True,
    "vanishing": (("model.layers.0.mlp.up_proj.weight", 0.97),), "in_bf16_reason": "weights and moments are bf16",
}  # fmt: skip
RULE = Rule(
    slug="bf16-update-stagnation",
    order=403,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("late in a run in pure bf16", {"step_progress": _STUCK}, True),
        Case(
            "two thirds of the updates vanish",
            {"step_progress": {**_STUCK, "vanish_share": 0.66, "lost": 0.55, "lost_to_rounding": 0.55}},
            True,
        ),
        Case("near miss: an fp32 copy exists", {"step_progress": {**_STUCK, "in_bf16": False}}, False),
        Case(
            "near miss: a warm rate, few updates vanish",
            {"step_progress": {**_STUCK, "vanish_share": 0.2, "lost": 0.02, "lost_to_rounding": 0.02}},
            False,
        ),
        Case(
            "near miss: the progress is lost to epsilon",
            {"step_progress": {**_STUCK, "vanish_share": 0.1, "lost": 0.95, "lost_to_rounding": 0.0}},
            False,
        ),
    ),
)
