"""The step at this learning rate damages healthy text; a smaller one does not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._optimizer import gradient_is_usual, moments_are_torn, no_moments, usual_lag
from stability_probe.rules._tables import finite, is_number, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "damage": Threshold(
        0.05, "nats", "a step of a healthy run changes the loss of a healthy batch by less",
        "python benchmarks/healthy_ranges.py --optimizer docs (at most 0.0014)",
    ),
    "quarter": Threshold(
        0.25, "of the damage at a quarter of the rate", "along a descent direction the damage is quadratic in the "
        "rate: a quarter of it does a sixteenth, or helps",
        "second-order expansion of the loss along the step; Gilmer et al., A Loss Curvature Perspective on Training "
        "Instability in Deep Learning, 2021",
    ),
    "stale": Threshold(
        100, "x the lower quartile of g2/v", "where single tensors stand out that far, their moment is the cause",
        "rule stale-second-moment, x_others",
    ),
    "everywhere": Threshold(
        100, "lower quartile of g2/v", "with an ordinary gradient a state that lags this far everywhere makes steps "
        "ten times too large at any rate: optimizer-state-mismatch",
        "rule optimizer-state-mismatch, ratio",
    ),
    "peak": Threshold(
        0.9, "of the largest rate so far", "at the peak the rate is the first thing to suspect",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023, section 2",
    ),
}  # fmt: skip

PAGE = Page(
    title="Learning rate too high",
    claim="One optimizer step at this learning rate raises the loss of a healthy batch; a smaller one would not.",
    mechanism=(
        "A step lowers the loss while it is short against the curvature. Past twice the inverse of the largest "
        "curvature it climbs the other side. Warm-up keeps the rate below that edge while the weights move to flatter "
        "places; where it is too short, or the peak too high, the edge is crossed just as the rate reaches its peak. "
        "The gradients of all layers grow together, and the loss jumps on every batch, not on a special one."
    ),
    signature=(
        "The simulated step with the stored moments raises the baseline loss at the run's rate and hardly at a "
        "quarter of it. All layers are moderately hot, none stands out. In the log the rate is at or near its peak."
    ),
    false_alarms=(
        "A few tensors with a second moment far below their squared gradient do the same damage: "
        "`stale-second-moment`. A bad batch gives a bad step at any rate. A planned rise of the rate costs some loss "
        "that comes back. Without the optimizer's state nothing can be said."
    ),
    proof="The step is simulated at a half and a quarter of the rate: the damage is gone.",
    remedies=(
        Remedy("Resume from before the rise with a learning rate 20 to 40 % lower."),
        Remedy("Warm up for longer: one to two per cent of the run's steps."),
        Remedy("Clip the gradient by global norm at 1.0 or 0.5, if the run does not."),
    ),
    references=(
        "Gilmer et al., A Loss Curvature Perspective on Training Instability in Deep Learning, 2021",
        "Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, 2021",
        "Wortsman et al., Small-scale proxies for large-scale Transformer training instabilities, 2023",
    ),
)  # fmt: skip


def _single_tensors(m: Measurements, t: dict[str, Threshold]) -> bool:
    """Whether a few tensors' moments stand out: then they, not the rate, are to blame."""
    rows = records(m.parameters)
    ratios = finite(row["g2_over_v"] for row in rows)
    usual = usual_lag(rows)
    return any(ratio >= max(10.0, t["stale"].value * usual) for ratio in ratios) if is_number(usual) else False


def _whole_state(m: Measurements, t: dict[str, Threshold]) -> bool:
    if moments_are_torn(records(m.parameters)):
        return True
    known = sorted(row["g2_over_v"] for row in records(m.parameters) if not math.isnan(row["g2_over_v"]))
    return bool(known) and known[len(known) // 4] >= t["everywhere"].value and gradient_is_usual(m)


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    effect = m.step_effect
    if effect is None:
        raise Skip(no_moments(m))
    factor = min(effect.damage_by_lr, default=1.0)
    if not effect.damage >= t["damage"].value or factor > 0.25 or _single_tensors(m, t) or _whole_state(m, t):
        return []
    least = effect.damage_by_lr[factor]
    if not least <= t["quarter"].value * effect.damage:
        return []
    at_peak = ""
    evidence = [
        Evidence(f"loss after one step at {effect.lr:.3g}, {effect.measured_on}", effect.damage, "nats more", 0.0,
                 "before it", t["damage"].value, t["damage"].source),
        *(
            Evidence(f"the same at {share:g} x the rate", value, "nats more")
            for share, value in sorted(effect.damage_by_lr.items(), reverse=True)
        ),
    ]  # fmt: skip
    if m.log is not None and m.log.logged_lr is not None and m.log.peak_lr:
        share = m.log.logged_lr / m.log.peak_lr
        if share >= t["peak"].value:
            at_peak = f"; the rate is at {share:.0%} of its peak"
        evidence.append(
            Evidence("rate at this step, of the peak so far", share, "", threshold=t["peak"].value,
                     source=t["peak"].source)
        )  # fmt: skip
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"One step at a learning rate of {effect.lr:.3g} raises the loss of {_which(effect.measured_on)} "
            f"by {effect.damage:.2f} nats, {factor:g} of it by {least:+.2f}{at_peak}.",
            location=Location(),
            evidence=tuple(evidence),
            plans=tuple(
                Plan("simulated_step", {"refresh": [], "lr_factor": share}, f"the step at {share:g} x the rate")
                for share in sorted({0.5, 0.25, factor}, reverse=True)
            ),
            strength=effect.damage / t["damage"].value,
            measures=("step_damage",),
        )
    ]


def _which(measured_on: str) -> str:
    return measured_on if measured_on.startswith("this") else f"the {measured_on}"


_EVEN = _cases.parameters(everywhere={"g2_over_v": 1.2, "update_ratio": 0.02})
_HOT = {"damage": 0.9, "damage_by_lr": {0.5: 0.12, 0.25: -0.02}, "lr": 3e-2}
RULE = Rule(
    slug="learning-rate-too-high",
    order=803,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case("the rate is ten times too high", {"parameters": _EVEN, "step_effect": _HOT}, True),
        Case(
            "hundreds of times: a quarter of the rate does the same harm, a hundredth none",
            {
                "parameters": _EVEN,
                "step_effect": {**_HOT, "damage": 2.4, "damage_by_lr": {0.5: 2.4, 0.25: 2.1, 0.05: 0.9, 0.01: 0.02}},
            },
            True,
        ),
        Case(
            "at the end of the warm-up",
            {
                "parameters": _EVEN, "step_effect": {**_HOT, "damage": 0.2, "damage_by_lr": {0.5: 0.03, 0.25: 0.0}},
                "log": {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05, "logged_lr": 3e-2, "peak_lr": 3e-2},
            },
            True,
        ),
        Case("near miss: a healthy step", {"parameters": _EVEN, "step_effect": {}}, False),
        Case(
            "near miss: a smaller step does as much damage: it does not point downhill",
            {
                "parameters": _EVEN,
                "step_effect": {**_HOT, "damage_by_lr": {0.5: 0.8, 0.25: 0.75, 0.05: 0.72, 0.01: 0.7}},
            },
            False,
        ),
        Case(
            "near miss: the second moments of all tensors are another run's",
            {
                "parameters": _cases.parameters(everywhere={"g2_over_v": 1e9}),
                "step_effect": _HOT, "baseline_grad_norm": 1.1,
            },
            False,
        ),
        Case(
            "near miss: no gradients make such first and second moments",
            {
                "parameters": _cases.parameters(everywhere={"g2_over_v": 1e9, "impossible_share": 0.9}),
                "step_effect": _HOT,
            },
            False,
        ),
        Case(
            "near miss: one tensor's second moment is stale",
            {
                "parameters": _cases.parameters(
                    {"model.layers.1.mlp.up_proj.weight": {"g2_over_v": 1e6}}, everywhere={"g2_over_v": 1.2}
                ),
                "step_effect": _HOT,
            },
            False,
        ),
    ),
)  # fmt: skip
