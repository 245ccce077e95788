"""Adam's second moment is small where the gradient has just become large: the step is oversized."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._optimizer import gradient_is_usual, lagging, usual_lag, with_moments
from stability_probe.rules._tables import NAMED_AT_MOST, Record, is_number, layers_of, median, plural
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "ratio": Threshold(
        10, "sum g2 / sum v", "v follows the mean of g2, so healthy tensors scatter around 1, up to 5.8",
        "Wortsman et al., Stable and low-precision training for large-scale vision-language models, 2023, section 3.4 "
        "(RMS of g2/v against spikes)",
    ),
    "x_others": Threshold(
        100, "x the lower quartile over tensors", "a batch that is hard as a whole raises all tensors together; one "
        "that is stale stands alone",
        "python benchmarks/healthy_ranges.py --optimizer docs",
    ),
    "some_damage": Threshold(
        0.0, "nats", "a vector that lags is dangerous where the step with it does any harm, or cannot be tried",
        "python benchmarks/healthy_ranges.py --optimizer docs (a healthy step lowers the loss)",
    ),
    "latent_x_others": Threshold(
        1e3, "x the lower quartile over tensors", "a step 30 times the usual size is waiting for any gradient at all",
        "an update scales with the root of g2/v",
    ),
    "latent_x_others_alone": Threshold(
        1e5, "x the lower quartile over tensors", "without a baseline or log nobody knows whether the gradient is the "
        "usual one: a corrupt weight makes ratios of 800 in its layer",
        "a weight x 5 000 in a little model, measured: 787 in three tensors",
    ),
    "tensors": Threshold(
        0.6, "of the tensors", "where most tensors lag, the whole state is another run's: optimizer-state-mismatch",
        "the lower quartile is a reference up to three quarters of stale tensors",
    ),
    "damage": Threshold(
        0.05, "nats", "a step of a healthy run changes the loss of a healthy batch by less",
        "python benchmarks/healthy_ranges.py --optimizer docs (at most 0.0014)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Stale second moment",
    claim="In a few tensors Adam's second moment is far below the square of the gradient: the next step is oversized.",
    mechanism=(
        "Adam divides by the root of an average of past squared gradients. A tensor whose gradients were small for "
        "longer than that average remembers, and then meet a large one, is divided by the past: its step is many "
        "times the learning rate. Clipping by global norm shrinks gradient and step alike, and leaves the ratio. "
        "After the step the average has caught up, which is why such spikes heal by themselves, or do not, when the "
        "step has thrown the weights far enough."
    ),
    signature=(
        "The sum of squared gradients over the sum of second moments is ten and more in a few tensors and ordinary in "
        "the others; one simulated step raises the loss of a healthy batch. The size of the update alone misleads: "
        "while the first moment is cold a single step is bounded by (1 - b1) / root(1 - b2), 0.45 at b2 = 0.95."
    ),
    false_alarms=(
        "A bad row raises gradients too; dropped, the ratio is ordinary again, and then the row is the cause. A "
        "learning rate that is too high damages through all tensors alike. A tensor just created has no history."
    ),
    proof="The step is simulated again with the second moment of those tensors raised to the squared gradient.",
    remedies=(
        Remedy("Resume before the step and skip the batch, or take the step with a third of the learning rate."),
        Remedy("Lower beta2 (0.95 instead of 0.999), so that the average follows sooner."),
        Remedy("Raise epsilon to 1e-6 or 1e-5, or clip updates by their own size (StableAdamW)."),
    ),
    references=(
        "Molybog et al., A Theory on Adam Instability in Large-Scale Machine Learning, 2023",
        "Wortsman et al., Stable and low-precision training for large-scale vision-language models, 2023, section 3",
        "Shazeer and Stern, Adafactor, 2018, sections 5 and 6 (update clipping)",
    ),
)  # fmt: skip


def _order(value: float) -> float:
    return value if math.isfinite(value) else 1e30


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = with_moments(m)
    usual = usual_lag(rows)
    limit = max(t["ratio"].value, t["x_others"].value * usual)
    hot = sorted((row for row in rows if row["g2_over_v"] >= limit), key=lambda row: -_order(row["g2_over_v"]))
    if not hot or len(hot) > t["tensors"].value * len(rows) or not is_number(usual):
        return []
    damage = m.step_effect.damage if m.step_effect is not None else math.nan
    least = t["latent_x_others" if gradient_is_usual(m) else "latent_x_others_alone"].value
    lag = [row for row in hot if lagging(row) >= least * max(usual, 1.0)]
    # A gain or bias of which the step, tried, makes nothing is no danger by itself.
    latent = any(len(row["shape"]) >= 2 for row in lag) or bool(lag and not damage <= t["some_damage"].value)
    if not (damage > 0 or latent):
        return []
    return [_suspect(m, hot, len(rows), usual, damage, latent, t)]


def _suspect(
    m: Measurements, hot: list[Record], known: int, usual: float, damage: float, latent: bool, t: dict[str, Threshold]
) -> Suspect:
    worst = hot[0]
    layers = layers_of(hot)
    counted = {layer: sum(int(row["layer"]) == layer for row in hot) for layer in layers}
    main = max(counted, key=lambda layer: counted[layer]) if counted else None
    place = f"layer {main}" if len(layers) == 1 else f"layers {', '.join(map(str, layers[:6]))}" if layers else ""
    ratio = worst["g2_over_v"]
    size = f"{ratio:.3g} times" if math.isfinite(ratio) else "infinitely above"
    effect = f"; one step moves the loss by {damage:+.2f} nats" if is_number(damage) else ""
    evidence = [
        Evidence(f"sum g2 / sum v of {worst['parameter']}", ratio, "", usual, "lower quartile over all tensors",
                 max(t["ratio"].value, t["x_others"].value * usual), t["ratio"].source),
        Evidence("tensors past the limit", len(hot), f"of {known}"),
    ]  # fmt: skip
    if is_number(worst["update_ratio"]):
        evidence.append(Evidence(f"update rms / weight rms of {worst['parameter']}", worst["update_ratio"], ""))
    if m.step_effect is not None:
        evidence.append(
            Evidence(f"loss after one step, {m.step_effect.measured_on}", damage, "nats more", 0.0, "before it",
                     t["damage"].value, t["damage"].source)
        )  # fmt: skip
    names = [row["parameter"] for row in hot]
    where = f" in {place}" if place else ""
    return Suspect(
        cause=RULE.slug,
        summary=f"Squared gradients are {size} the second moment in {worst['parameter']} ({plural(len(hot), 'tensor')}"
        f"{where}; median of all {median(row['g2_over_v'] for row in with_moments(m)):.2g}){effect}.",
        location=Location(layer=main, layers=layers, parameters=tuple(names[:NAMED_AT_MOST])),
        evidence=tuple(evidence),
        plans=(
            Plan("simulated_step", {"refresh": names, "lr_factor": 1.0},
                 f"second moment of {plural(len(names), 'tensor')} raised to the squared gradient"),
        ),
        strength=math.log10(max(_order(ratio), 10.0)),
        measures=("step_damage",),
        latent=latent,
    )  # fmt: skip


def _stale(ratio: float, **more: float) -> list[Record]:
    layer = {row["parameter"]: {"g2_over_v": ratio, **more} for row in _cases.parameters() if row["layer"] == 2}
    return _cases.parameters(layer, everywhere={"g2_over_v": 1.1, "update_ratio": 1e-3})


RULE = Rule(
    slug="stale-second-moment",
    order=801,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "one layer's second moment divided by a million, and the step does damage",
            {"parameters": _stale(1e6), "step_effect": {"damage": 2.4, "damage_refreshed": -0.01}},
            True,
        ),
        Case("the ratio alone, far past the others", {"parameters": _stale(5e3), "baseline_grad_norm": 1.1}, True),
        Case("the ratio alone, without any reference", {"parameters": _stale(2e6)}, True),
        Case(
            "near miss: a ratio of 800 that a corrupt weight makes, and a step without damage",
            {"parameters": _stale(800.0), "step_effect": {"damage": -0.01}},
            False,
        ),
        Case(
            "an untouched second moment of zero",
            {"parameters": _stale(float("inf")), "step_effect": {"damage": 0.9}},
            True,
        ),
        Case(
            "near miss: a hard batch raises all tensors",
            {"parameters": _cases.parameters(everywhere={"g2_over_v": 400.0}), "step_effect": {"damage": 0.4}},
            False,
        ),
        Case(
            "near miss: the ratio is high, the step does no damage",
            {"parameters": _stale(200.0), "step_effect": {"damage": -0.01}},
            False,
        ),
        Case(
            "near miss: only this batch's gradient is large, the moment fits the baseline's",
            {"parameters": _stale(5e3, grad_norm=10.0, baseline_grad_norm=0.1), "step_effect": {"damage": -0.01}},
            False,
        ),
    ),
)
