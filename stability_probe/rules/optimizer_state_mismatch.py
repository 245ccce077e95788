"""The optimizer's moments belong to other parameters or to another run."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from stability_probe.judge import Case, Page, Plan, Rule, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._optimizer import IMPOSSIBLE, NEARLY_ALL, moments_are_torn, with_moments
from stability_probe.rules._tables import NAMED_AT_MOST, Record, median, plural, times
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import Measurements

THRESHOLDS = {
    "ratio": Threshold(
        100, "sum g2 / sum v, median over tensors", "a healthy state is near 1; a batch ten times as hard reaches this "
        "only with a gradient norm ten times the usual, which is checked",
        "python benchmarks/healthy_ranges.py --optimizer docs (medians 0.3 to 1.4)",
    ),
    "tensors": Threshold(
        NEARLY_ALL, "of the tensors over 10", "a few stale tensors are stale-second-moment", "rule stale-second-moment"
    ),
    "ordinary_gradient": Threshold(
        3, "x the reference's gradient norm", "with an unusual gradient the batch is to blame, not the state",
        "python benchmarks/healthy_ranges.py (gradient norms over five kinds of text)",
    ),
    "impossible": IMPOSSIBLE,
    "few_counted": Threshold(
        0.1, "1 - beta2^counter", "only a counter this small changes the step: its bias correction then multiplies the "
        "second moments by ten and more",
        "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 3",
    ),
    "more_in_it": Threshold(
        3, "x what the counter leaves of the second moments, median over tensors", "moments of the run's own age are "
        "at 1; those of an optimizer that was started anew on purpose are as young as it counts",
        "python benchmarks/healthy_ranges.py --optimizer docs (medians of sum g2 / sum v 0.3 to 1.4)",
    ),
    "counted_steps": Threshold(
        20, "steps of the run", "below, a few skipped steps are half of them",
        "torch.amp.GradScaler skips a step at each halving of its scale",
    ),
    "damage": Threshold(
        0.05, "nats", "a step of a healthy run changes the loss of a healthy batch by less",
        "python benchmarks/healthy_ranges.py --optimizer docs (at most 0.0014)",
    ),
}  # fmt: skip

PAGE = Page(
    title="Optimizer state mismatch",
    claim="The second moments are far below the squared gradients in nearly all tensors: they are not this run's.",
    mechanism=(
        "After a restart the state may be loaded in another order of parameters, scaled differently, or started from "
        "zero while the step counter, and with it the bias correction, says that it is warm. Every update is then too "
        "large by the root of the lag: the first steps after the restart throw the whole model, and the loss jumps by "
        "nats on any batch, even at a small learning rate."
    ),
    signature=(
        "The sum of squared gradients over the sum of second moments far above 1 in nearly all tensors, with an "
        "ordinary gradient; one simulated step raises the loss of a healthy batch by a lot. Or first moments that no "
        "gradients with such second moments could have made, which needs no reference; moments of another shape than "
        "their parameter; a counter far from the checkpoint's own step, "
        "under second moments that so few updates cannot have made."
    ),
    false_alarms=(
        "Where only some tensors lag it is `stale-second-moment`. A batch with huge gradients lags everywhere as "
        "well: the gradient norm is compared with the baseline's or the log's first. A learning rate that is too "
        "high does damage with moments that fit. An optimizer that was started anew on purpose counts from zero too, "
        "and its moments are new."
    ),
    proof="The step is simulated with the second moments of all tensors raised to the squared gradient.",
    remedies=(
        Remedy("Restore the optimizer's state of the same step; check the order of its parameters by name."),
        Remedy("If it is lost: start the moments anew, with their step at zero, and warm up the learning rate again."),
        Remedy("Compare shapes, norms and step counters of the state with the model before the first step."),
    ),
    references=(
        "PyTorch, torch.optim.Optimizer.load_state_dict: parameters are matched by position",
        "Kingma and Ba, Adam: A Method for Stochastic Optimization, 2015, section 3 (bias correction)",
    ),
)


def _lag_everywhere(m: Measurements, rows: list[Record], lag: float, t: dict[str, Threshold]) -> bool:
    usual = _usual_gradient(m)
    unusual = usual is not None and m.global_grad_norm > t["ordinary_gradient"].value * usual
    # Without any reference a flagged batch may be what makes all gradients large.
    unusual = unusual or (usual is None and any(m.rows["flags"]))
    return lag >= t["ratio"].value and _high(rows) >= t["tensors"].value * len(rows) and not unusual


def _usual_gradient(m: Measurements) -> float | None:
    logged = m.log.usual_grad_norm if m.log is not None else None
    return m.baseline_grad_norm if m.baseline_grad_norm is not None else logged


def _high(rows: list[Record]) -> int:
    return sum(not row["g2_over_v"] < 10 for row in rows)


def _misfit(m: Measurements) -> Suspect:
    first, count = m.optimizer_misfits[0], len(m.optimizer_misfits)
    return Suspect(
        cause=RULE.slug,
        summary=f"The moments of {plural(count, 'parameter')} have another shape than the parameter ({first}).",
        location=Location(
            parameters=tuple(said.rpartition(": stored ")[0] for said in m.optimizer_misfits[:NAMED_AT_MOST])
        ),
        evidence=(
            Evidence("parameters whose moments have another shape", count, "", 0, "a state of this model"),
            Evidence("the first of them", first),
        ),
        strength=10.0,
        latent=True,
    )


def _counter(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    """A counter of updates that began again over moments that did not."""
    lag = median(row["g2_over_v"] for row in with_moments(m))
    facts, run = m.optimizer or {}, m.checkpoint_step
    counted, groups = facts.get("step"), facts.get("groups")
    if counted is None or not groups or run is None or not counted < run or run < t["counted_steps"].value:
        return []
    left = 1 - groups[0]["betas"][1] ** max(counted, 1)
    if not (left <= t["few_counted"].value and lag <= t["more_in_it"].value * left):
        return []
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"The optimizer has counted {plural(int(counted), 'update')}, the checkpoint is of step {run}, and "
            f"the second moments are {times(1.0, lag):.2g} times what so few updates leave.",
            location=Location(),
            evidence=(
                Evidence("updates by the optimizer's counter", counted, "", run, "step of the checkpoint"),
                Evidence("sum g2 / sum v, median over tensors", lag, "", 1.0, "a state that follows the gradient",
                         t["more_in_it"].value * left, t["more_in_it"].source),
            ),
            strength=1.0,
            latent=True,
        )
    ]  # fmt: skip


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    if m.optimizer_misfits:
        return [_misfit(m)]
    return _moments(m, t) or _counter(m, t)


def _moments(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    rows = with_moments(m)
    lag = median(row["g2_over_v"] if math.isfinite(row["g2_over_v"]) else 1e30 for row in rows)
    damage = m.step_effect.damage if m.step_effect is not None else math.nan
    harmful, torn = damage >= t["damage"].value, moments_are_torn(rows)
    if not (torn or (_lag_everywhere(m, rows, lag, t) and harmful)):
        return []
    names = [row["parameter"] for row in rows]
    usual = _usual_gradient(m)
    reference = (usual, "ordinary gradient norm") if usual is not None else (None, "")
    said = (
        "First moments are larger than any gradients with these second moments make them"
        if torn
        else f"Squared gradients are {min(lag, 1e30):.3g} times the second moments in {_high(rows)} of {len(rows)} "
        "tensors"
    )
    impossible = [row["impossible_share"] for row in rows]
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{said}; one step moves the loss by {damage:+.2f} nats.",
            location=Location(),
            evidence=(
                Evidence("sum g2 / sum v, median over tensors", lag, "", 1.0, "a state that follows the gradient",
                         t["ratio"].value, t["ratio"].source),
                Evidence("elements with an impossible first moment, median over tensors", median(impossible), "", 0.0,
                         "moments of one run", t["impossible"].value, t["impossible"].source),
                Evidence("global gradient norm", m.global_grad_norm, "", *reference),
                Evidence("loss after one step", damage, "nats more", 0.0, "before it", t["damage"].value,
                         t["damage"].source),
            ),
            plans=(
                Plan("simulated_step", {"refresh": names, "lr_factor": 1.0},
                     "second moments of all tensors raised to the squared gradient"),
            ) * harmful,
            strength=max(math.log10(max(lag, 1.0)), 1.0),
            measures=("step_damage",),
            latent=not harmful,
        )
    ]  # fmt: skip


_ALL = _cases.parameters(everywhere={"g2_over_v": 4e4})
_OWN = _cases.parameters(everywhere={"g2_over_v": 1.1})
_OLD = _cases.parameters(everywhere={"g2_over_v": 0.004})


def _counted(step: int) -> dict[str, Any]:
    return {"step": step, "groups": [{"betas": (0.9, 0.999)}]}


RULE = Rule(
    slug="optimizer-state-mismatch",
    order=104,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "moments of another run, the gradient as usual",
            {"parameters": _ALL, "step_effect": {"damage": 3.6}, "baseline_grad_norm": 1.1},
            True,
        ),
        Case(
            "moments started from zero behind a warm counter",
            {"parameters": _cases.parameters(everywhere={"g2_over_v": float("inf")}), "step_effect": {"damage": 5.0}},
            True,
        ),
        Case(
            "near miss: a batch with ten times the usual gradient",
            {"parameters": _ALL, "step_effect": {"damage": 0.6}, "baseline_grad_norm": 0.1},
            False,
        ),
        Case(
            "near miss: one layer lags",
            {
                "parameters": [
                    {**row, "g2_over_v": 4e4 if row["layer"] == 2 else 1.1} for row in _cases.parameters()
                ],
                "step_effect": {"damage": 2.0},
            },
            False,
        ),
        Case(
            "a counter of 3 over old moments, beside a checkpoint of step 360",
            {"parameters": _OLD, "optimizer": _counted(3), "checkpoint_step": 360},
            True,
        ),
        Case(
            "near miss: started anew 3 steps ago, with moments of its own",
            {"parameters": _OWN, "optimizer": _counted(3), "checkpoint_step": 360},
            False,
        ),
        Case(
            "near miss: a few skipped steps",
            {"parameters": _OLD, "optimizer": _counted(352), "checkpoint_step": 360},
            False,
        ),
        Case(
            "near miss: a state that counts further than the run",
            {"parameters": _OLD, "optimizer": _counted(45_000), "checkpoint_step": 360},
            False,
        ),
        Case("near miss: no step is stated", {"parameters": _OLD, "optimizer": _counted(3)}, False),
        Case("moments of other shapes", {"optimizer_misfits": ("wte.weight: stored (3, 8), model (8, 3)",)}, True),
        Case("near miss: the step does no damage", {"parameters": _ALL, "step_effect": {"damage": -0.01}}, False),
        Case(
            "first moments that these second moments rule out, before the step has done harm",
            {
                "parameters": _cases.parameters(everywhere={"g2_over_v": 1.1, "impossible_share": 0.9}),
                "step_effect": {"damage": -0.01},
            },
            True,
        ),
        Case(
            "near miss: in one layer alone",
            {
                "parameters": [
                    {**row, "g2_over_v": 1.1, "impossible_share": 0.9 if row["layer"] == 2 else 0.0}
                    for row in _cases.parameters()
                ],
                "step_effect": {"damage": 0.2},
            },
            False,
        ),
    ),
)  # fmt: skip
