"""The replay is healthy and the log is not: the cause lies outside checkpoint and batch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stability_probe.judge import Case, Page, Rule, Skip, Suspect, Threshold
from stability_probe.rules import _cases
from stability_probe.rules._tables import is_number, log_margin, records
from stability_probe.schema import Evidence, Location, Remedy

if TYPE_CHECKING:
    from stability_probe.measure import LogFacts, Measurements

THRESHOLDS = {
    "margin": Threshold(
        0.5, "nats over the usual loss", "batches of one run differ by less; less may be the batch's own",
        "the same margin as the state excess of the verdict",
    ),
    "sigmas": Threshold(
        6, "robust standard deviations of the logged loss", "the spike rule of long runs",
        "OLMo-core: a step is skipped at 6 standard deviations over 128 steps",
    ),
    "grad_ratio": Threshold(
        5, "x the usual logged gradient norm", "ordinary steps of a run stay within a factor of two or three",
        "the published checklist calls a gradient norm over five times the baseline large",
    ),
    "same_batch": Threshold(
        0.1, "nats between logged and replayed loss", "a saved batch is often one rank's micro-batch: only where its "
        "loss is the logged one are their gradient norms comparable",
        "the standard error of the mean loss over 2 000 tokens of spread 3 nats is 0.07",
    ),
    "clean_within": Threshold(
        0.02, "relative", "rounding of logged values to two or three digits", "logs print three significant digits"
    ),
    "exactly": Threshold(
        0.002, "relative", "a loss of four digits that is off by a clean factor is no chance",
        "logs print three significant digits and more",
    ),
    "unexplained": Threshold(
        0.5, "of what the log shows over the usual", "a replay that shows less than half of it does not show it",
        "the share from which on an intervention is said to explain",
    ),
    "clean_ratio": Threshold(
        1.8, "x", "a clean factor counts from two on, and only where the replay itself is at the usual norm",
        "the smallest number of ranks or accumulation steps that can go missing is two",
    ),
}  # fmt: skip

PAGE = Page(
    title="Not reproduced",
    claim="The replay of this batch on this checkpoint is healthy, and the run's log says that it was not.",
    mechanism=(
        "What cannot be repeated from weights and data was made by something else: a gradient that is averaged over "
        "the wrong count, a race between streams, a kernel that differs from the reference, a collective that lost a "
        "rank, a device that computes wrongly, or a log, batch and checkpoint that do not belong to the same step. "
        "A ratio of gradient norms that is a clean 2, 4, 8 … points to normalisation: ranks, accumulation steps or "
        "the loss scale counted once too often."
    ),
    signature=(
        "A logged loss or gradient norm that is not finite, or far above the usual, at the step; a replayed loss at "
        "the usual value and finite gradients."
    ),
    false_alarms=(
        "A saved batch is often one rank's part of the step, so its gradient norm is smaller or larger than the "
        "logged one by itself: norms count only where the losses agree. fp16 logs may hold norms times the loss "
        "scale, and an fp16 overflow reproduces in fp16 only. A checkpoint from before several steps does not hold "
        "the damage that they did: replay one that is right before the step."
    ),
    proof="None can be given from these files; the two sets of numbers side by side are the evidence.",
    remedies=(
        Remedy("Check that checkpoint, batch and log belong to the same step: the checkpoint before the update, and "
               "the batch that the update used."),
        Remedy("Replay on another node and device, and compare bit for bit with the first.", "dcgmi diag -r 3"),
        Remedy("Where the ratio is a clean factor, check the normalisation of loss and gradient: ranks, accumulation, "
               "loss scale."),
        Remedy("Replay with the training's own kernels through --model, against the reference attention."),
    ),
    references=(
        "Grattafiori et al., The Llama 3 Herd of Models, 2024, section 3.3.4 (hardware faults)",
        "Hochschild et al., Cores that don't count, HotOS 2021",
        "Hugging Face, Fixing Gradient Accumulation, 2024 (averaging over the wrong count)",
    ),
)  # fmt: skip


def clean_factor(ratio: float, within: float) -> str:
    """'2^k' or a small whole number that `ratio` is, or its inverse; empty where it is neither."""
    if not (is_number(ratio) and ratio > 0):
        return ""
    for value, sign in ((ratio, ""), (1 / ratio, "1/")):
        power = round(math.log2(value)) if value >= 1 else 0
        if power >= 1 and abs(value / 2**power - 1) <= within:
            return f"{sign}{2**power} = {sign}2^{power}"
        whole = round(value)
        if 2 <= whole <= 12 and abs(value / whole - 1) <= within:
            return f"{sign}{whole}"
    return ""


def _nearer(logged: float, own: float, fp32: float, least: float) -> bool:
    """Whether the run's own precision gives the logged number, and fp32 is at least `least` away from it."""
    return abs(fp32 - logged) >= least and abs(own - logged) < 0.5 * abs(fp32 - logged)


def _explained_elsewhere(m: Measurements, log: LogFacts, t: dict[str, Threshold]) -> bool:
    """Whether the replay does hold what the log shows, only not in the fp32 loss before the step."""
    logged = log.logged_loss if log.logged_loss is not None else math.nan
    own = m.precisions.get(m.run_precision)
    if own is not None and (not is_number(own.loss) or _nearer(logged, own.loss, m.loss, t["margin"].value)):
        return True
    norm = log.logged_grad_norm if log.logged_grad_norm is not None else math.nan
    if own is not None and _nearer(norm, own.global_grad_norm, m.global_grad_norm, m.global_grad_norm):
        return True
    no_targets = any(row["valid_targets"] == 0 for row in records(m.rows))
    if no_targets and not is_number(logged):
        return True
    # One more step, simulated, gives the logged loss: then the optimizer's rules have the cause.
    damage = m.step_effect.damage if m.step_effect is not None else 0.0
    return logged - m.loss >= t["margin"].value and damage >= t["unexplained"].value * (logged - m.loss)


def _same_gradient(m: Measurements, log: LogFacts, within: float) -> bool:
    """Whether the logged gradient norm is that of this very batch, in fp32 or in the run's precision."""
    own = m.precisions.get(m.run_precision)
    norms = [m.global_grad_norm, own.global_grad_norm if own is not None else math.nan]
    logged = log.logged_grad_norm if log.logged_grad_norm is not None else math.nan
    return any(abs(norm - logged) <= within * norm for norm in norms)


def _loss(m: Measurements, log: LogFacts, t: dict[str, Threshold]) -> tuple[str, list[Evidence], float] | None:
    logged, usual = log.logged_loss, log.usual_loss
    if logged is None or usual is None:
        return None
    factor = clean_factor(logged / m.loss, t["exactly"].value) if is_number(logged) and m.loss > 0 else ""
    # However the log scatters, it does not scatter by exactly two, nor away from a batch with the very same gradient.
    same = _same_gradient(m, log, t["exactly"].value)
    margin = t["margin"].value if factor or same else log_margin(m, t["margin"].value, t["sigmas"].value)
    usual_margin = log_margin(m, t["margin"].value, t["sigmas"].value)
    healthy = m.loss <= usual + usual_margin
    filtered = logged == 0.0 and usual > t["margin"].value  # a NaN that the trainer's filter logged as zero
    apart = max(t["margin"].value, t["unexplained"].value * (logged - usual)) if is_number(logged) else math.nan
    high = is_number(logged) and logged >= usual + margin and logged - m.loss >= apart
    low = (
        is_number(logged) and usual - logged >= margin and m.loss - logged >= margin and m.loss >= usual - usual_margin
    )
    if not healthy or not (high or low or filtered or not is_number(logged)):
        return None
    said = "0.0 (a NaN, filtered)" if filtered else f"{logged:.3f} nats" if is_number(logged) else "not finite"
    evidence = [
        Evidence("logged loss at the step", logged, "nats", usual, "usual loss in the log", usual + margin,
                 t["margin"].source),
        Evidence("replayed loss, fp32", m.loss, "nats", usual, "usual loss in the log"),
    ]  # fmt: skip
    strength = abs(logged - m.loss) / margin if high or low else 10.0
    note = f": {factor} times as much" if factor else ", with the same gradient norm" if same else ""
    return (
        f"The log has a loss of {said} at step {log.step}, the replay {m.loss:.3f} (usual {usual:.3f}){note}",
        evidence,
        strength,
    )


def _grad_norm(m: Measurements, log: LogFacts, t: dict[str, Threshold]) -> tuple[str, list[Evidence], float] | None:
    logged, usual = log.logged_grad_norm, log.usual_grad_norm
    if logged is None or m.run_precision.startswith(
        "fp16"
    ):  # a loss scale overflows by design, and its norms are scaled
        return None
    same = log.logged_loss is not None and abs(m.loss - log.logged_loss) <= t["same_batch"].value
    norm = m.global_grad_norm
    if not is_number(logged):
        wrong, said, strength = True, "not finite", 10.0
        factor = ""
    elif usual is None or not usual > 0 or not same or not norm > 0:
        return None
    else:
        factor = clean_factor(logged / norm, t["clean_within"].value)
        ordinary = norm <= 2 * usual
        large = logged >= t["grad_ratio"].value * usual
        normal = abs(math.log(norm / usual)) <= math.log(1.3)
        clean = bool(factor) and normal and not 1 / t["clean_ratio"].value < logged / usual < t["clean_ratio"].value
        wrong, said, strength = ordinary and (large or clean), f"{logged:.3g}", logged / norm
    if not wrong:
        return None
    note = f", {factor} times as much" if factor else ""
    evidence = [
        Evidence("logged gradient norm at the step", logged, "", usual, "usual norm in the log",
                 None if usual is None else t["grad_ratio"].value * usual, t["grad_ratio"].source),
        Evidence("replayed gradient norm, fp32", norm, "", usual, "usual norm in the log"),
    ]  # fmt: skip
    if factor:
        evidence.append(Evidence("logged over replayed gradient norm", factor, "", source=t["clean_within"].source))
    summary = f"The log has a gradient norm of {said} at step {log.step}, the replay {norm:.3g}{note}"
    return summary, evidence, strength


def _age(m: Measurements, log: LogFacts) -> str:
    """A checkpoint of several steps before does not hold what happened in between, and the reader must know."""
    if m.checkpoint_step is None or log.step is None or log.step - m.checkpoint_step <= 1:
        return ""
    gap = log.step - m.checkpoint_step
    return f" The checkpoint is {gap} steps older than the batch: replay one from right before the step."


def examine(m: Measurements, t: dict[str, Threshold]) -> list[Suspect]:
    log = m.log
    if log is None or (log.logged_loss is None and log.logged_grad_norm is None):
        if log is not None and log.step is not None and log.last_step is not None:
            raise Skip(
                f"the log holds steps {log.first_step}–{log.last_step} and says nothing about step {log.step}; "
                "give the part that holds it"
            )
        raise Skip("the log says nothing about this step; give the run's log with --log and the step with --step")
    if not is_number(m.loss) or m.grad_nonfinite or _explained_elsewhere(m, log, t):
        return []
    found = _loss(m, log, t) or _grad_norm(m, log, t)
    if not found:
        return []
    said, evidence, strength = found
    return [
        Suspect(
            cause=RULE.slug,
            summary=f"{said}.{_age(m, log)}",
            location=Location(),
            evidence=tuple(evidence),
            strength=max(strength, 1.0),
            decisive=True,
        )
    ]


_LOG = {"step": 400, "usual_loss": 3.4, "loss_spread": 0.05, "usual_grad_norm": 1.0}
RULE = Rule(
    slug="not-reproduced",
    order=1001,
    page=PAGE,
    thresholds=THRESHOLDS,
    examine=examine,
    cases=(
        Case(
            "an older checkpoint is said to be one",
            {"log": {**_LOG, "logged_loss": 6.0, "logged_grad_norm": 1.1}, "checkpoint_step": 380},
            True,
        ),
        Case("the log has a NaN, the replay 3.4", {"log": {**_LOG, "logged_loss": _cases.NAN}}, True),
        Case("the log has 7.9, the replay 3.4", {"log": {**_LOG, "logged_loss": 7.9}}, True),
        Case("the log has half of it: a mean over twice the count", {"log": {**_LOG, "logged_loss": 1.7}}, True),
        Case("near miss: an easy batch, here as well", {"log": {**_LOG, "logged_loss": 1.7}, "loss": 1.72}, False),
        Case("a NaN logged as 0.0", {"log": {**_LOG, "logged_loss": 0.0}}, True),
        Case(
            "the gradient norm is eight times the replayed one, the loss agrees",
            {"log": {**_LOG, "logged_loss": 3.41, "logged_grad_norm": 8.0}},
            True,
        ),
        Case(
            "a clean factor of two",
            {"log": {**_LOG, "logged_loss": 3.41, "logged_grad_norm": 2.0}},
            True,
        ),
        Case(
            "the log scatters by 0.4 and stands 2.4 over its usual, the replay 0.35",
            {"log": {**_LOG, "usual_loss": 3.05, "loss_spread": 0.39, "logged_loss": 5.45}},
            True,
        ),
        Case(
            "near miss: the replay shows more than half of it",
            {"log": {**_LOG, "usual_loss": 3.05, "loss_spread": 0.39, "logged_loss": 5.45}, "loss": 4.4},
            False,
        ),
        Case(
            "a nat over the replay under the very same gradient norm",
            {"log": {**_LOG, "loss_spread": 0.4, "logged_loss": 4.4, "logged_grad_norm": 1.0}},
            True,
        ),
        Case(
            "near miss: the same under another gradient norm",
            {"log": {**_LOG, "loss_spread": 0.4, "logged_loss": 4.4, "logged_grad_norm": 1.1}},
            False,
        ),
        Case(
            "near miss: a log whose gradient norms are all zero",
            {"log": {**_LOG, "usual_grad_norm": 0.0, "logged_loss": 3.41, "logged_grad_norm": 0.0}},
            False,
        ),
        Case("near miss: the log agrees", {"log": {**_LOG, "logged_loss": 3.52, "logged_grad_norm": 1.2}}, False),
        Case("near miss: the replay is as bad as the log", {"log": {**_LOG, "logged_loss": 7.9}, "loss": 7.8}, False),
        Case(
            "near miss: a micro-batch: another loss, so the norms say nothing",
            {"log": {**_LOG, "logged_loss": 3.7, "logged_grad_norm": 8.0}},
            False,
        ),
        Case(
            "near miss: the fp16 replay has the NaN",
            {
                "log": {**_LOG, "logged_loss": _cases.NAN}, "run_precision": "fp16",
                "precisions": {"fp16": {"loss": _cases.NAN, "nonfinite": 40}},
            },
            False,
        ),
        Case(
            "the loss agrees to the last digit, and the next step does some harm",
            {"log": {**_LOG, "logged_loss": 3.4000001, "logged_grad_norm": 32.0}, "step_effect": {"damage": 0.01}},
            True,
        ),
        Case(
            "near miss: the simulated step explains it",
            {"log": {**_LOG, "logged_loss": 5.4}, "step_effect": {"damage": 1.8}},
            False,
        ),
    ),
)  # fmt: skip
