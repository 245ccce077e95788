"""The six-step debugging checklist, every box answered from what was measured.

`pass`: looked at, in order. `fail`: looked at, not in order (in step 2: this category applies).
`unknown`: cannot be told from what was given; `needs` says what to supply. Where `needs` is empty the question does not
arise here, and `measured` says why (`Box.applies` is then false).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stability_probe.schema import Box, BoxStatus, Verdict

if TYPE_CHECKING:
    from stability_probe.measure import LogFacts, Measurements, PrecisionGap

GRADIENT_JUMP = 5.0  # × the usual gradient norm: where published spike checklists draw the line
GRADIENT_DEAD = 1e-6  # gradient norm of a whole model; published checklists call less than this vanished
GRADIENT_FADED = 1e-3  # × the usual gradient norm
# OLMo-core and levanter skip a step at six standard deviations of the recent loss.
LOSS_SIGMAS = 6.0
# Nats, where no log gives a spread to count in. A choice: five times the 0.1 nats at which window means are alerted
# on, because one batch varies more than the mean of a window.
LOSS_JUMP = 0.5
# × the median layer's gradient norm. Healthy SmolLM2-135M on code and prose: at most 2.4 for a layer's parameters.
LAYER_JUMP = 10.0
LOGIT_LIMIT = 100.0  # τ of QK-clip (Kimi K2 report, 2025)
ALERT = 0.1  # nats: the smallest rise of the loss that published checklists set an alert on
WARMUP_WINDOW = 50  # steps around the end of warm-up, and a tenth of its length: where LR spikes gather

_WRITTEN_DOWN = "The incident is written down: what failed, why, what fixed it"
_LOG = "--log with the run's log"
_STEP = "--step with the step that consumed the batch"
_REFERENCE = "--baseline with a healthy batch, or --log with the run's log"

_IN_DATA = frozenset(
    {
        "no-valid-labels",
        "label-misalignment",
        "padding-in-loss",
        "token-id-out-of-range",
        "tokenizer-mismatch",
        "repeated-tokens",
        "garbage-tokens",
        "duplicate-examples",
        "boilerplate",
        "numeric-runs",
        "data-shift",
    }
)
_IN_CHECKPOINT = frozenset(
    {
        "nonfinite-weights",
        "corrupt-weights",
        "checkpoint-mismatch",
        "optimizer-state-mismatch",
        "attention-logit-growth",
        "qk-norm-gain-growth",
        "logit-drift",
        "embedding-row-outlier",
        "residual-growth",
        "activation-outlier",
        "init-scale",
        "router-collapse",
    }
)
_OUTSIDE = frozenset({"not-reproduced", "nondeterministic-replay"})
_IN_LR = frozenset({"learning-rate-too-high", "stale-second-moment"})
_IN_PRECISION = frozenset({"fp16-overflow", "bf16-precision-loss", "logit-drift"})
_SIGNALS = {
    "attention-logit-growth": "the largest attention logit of every head",
    "attention-scale": "the largest attention logit of every head",
    "qk-norm-gain-growth": "the largest gain of q_norm and k_norm",
    "logit-drift": "mean log Z of the output logits",
    "embedding-row-outlier": "the largest embedding row norm",
    "activation-outlier": "absmax of every block's output",
    "residual-growth": "rms of every block's output",
    "fp16-overflow": "absmax of every block's output, and the loss scale",
    "stale-second-moment": "update rms over weight rms, by tensor",
    "learning-rate-too-high": "update rms over weight rms, by tensor",
    "nonfinite-weights": "a non-finite count of every tensor at every checkpoint",
    "corrupt-weights": "absmax of every tensor at every checkpoint",
    "router-collapse": "router load entropy and router log Z",
}


@dataclass(frozen=True)
class ChecklistFacts:
    """Exactly what the checklist reads; None (or empty) where it is not known.

    Attributes:
        loss, grad_norm: of the replay in fp32; nats, and the global norm before clipping.
        n_rows: rows of the batch.
        layer_grad_norms: (layer, gradient norm of its parameters).
        hottest_head: (layer, head, largest attention logit).
        flagged: (row, slugs) of the rows that the token audit flags.
        precisions: gap of each replayed precision to fp32.
        damage: rise of the loss after one simulated optimizer step, nats.
        source: where the batch came from, as the incident folder tells.
        run_precision: what the run trained in, as the user said; None where that is only assumed.
    """

    verdict: Verdict
    loss: float
    grad_norm: float
    n_rows: int
    step: int | None = None
    checkpoint_step: int | None = None
    log: LogFacts | None = None
    baseline_loss: float | None = None
    baseline_grad_norm: float | None = None
    layer_grad_norms: tuple[tuple[int, float], ...] = ()
    hottest_head: tuple[int, int, float] | None = None
    flagged: tuple[tuple[int, tuple[str, ...]], ...] = ()
    precisions: tuple[tuple[str, PrecisionGap], ...] = ()
    lr: float | None = None
    grad_clip: float | None = None
    damage: float | None = None
    has_optimizer: bool = False
    source: str = ""
    run_precision: str | None = None
    qk_norm: bool = False
    attention_softcap: float | None = None
    log_z_mean: float = 0.0

    @property
    def usual_loss(self) -> float | None:
        return self.log.usual_loss if self.log and self.log.usual_loss is not None else self.baseline_loss

    @property
    def usual_grad_norm(self) -> float | None:
        logged = self.log.usual_grad_norm if self.log else None
        return logged if logged is not None else self.baseline_grad_norm

    @property
    def loss_is_up(self) -> bool | None:
        """Whether the replayed loss stands out of the run's (else the baseline's); None without a reference."""
        if not math.isfinite(self.loss):
            return True
        if self.usual_loss is None:
            return None
        spread = self.log.loss_spread if self.log else None
        return self.loss - self.usual_loss > (LOSS_SIGMAS * spread if spread else LOSS_JUMP)

    @property
    def grad_ratio(self) -> float | None:
        """Replayed gradient norm over the usual one; None without a reference."""
        return self.grad_norm / self.usual_grad_norm if self.usual_grad_norm else None


def facts_from(
    measurements: Measurements,
    verdict: Verdict,
    *,
    step: int | None = None,
    checkpoint_step: int | None = None,
    lr: float | None = None,
    grad_clip: float | None = None,
    source: dict[str, Any] | None = None,
    run_precision: str | None = None,
) -> ChecklistFacts:
    """The facts of a replay. `lr` is the option or the checkpoint's; the log's is used where it is None."""
    log = measurements.log
    heads = [row for row in _records(measurements.heads) if not _is_nan(row["max_logit"])]
    hottest = max(heads, key=lambda row: row["max_logit"], default=None)
    return ChecklistFacts(
        verdict=verdict,
        loss=float(measurements.loss),
        grad_norm=float(measurements.global_grad_norm),
        n_rows=len(measurements.rows),
        step=step if step is not None or log is None else log.step,
        checkpoint_step=checkpoint_step,
        log=log,
        baseline_loss=measurements.baseline_loss,
        baseline_grad_norm=measurements.baseline_grad_norm,
        layer_grad_norms=_layer_grad_norms(_records(measurements.parameters)),
        hottest_head=(int(hottest["layer"]), int(hottest["head"]), float(hottest["max_logit"])) if hottest else None,
        flagged=tuple(
            (int(row["row"]), tuple(row["flags"])) for row in _records(measurements.rows) if len(row.get("flags", ()))
        ),
        precisions=tuple(measurements.precisions.items()),
        lr=lr if lr is not None or log is None else log.logged_lr,
        grad_clip=grad_clip,
        damage=measurements.step_effect.damage if measurements.step_effect else None,
        has_optimizer=measurements.optimizer is not None,
        source=", ".join(f"{key} {value}" for key, value in (source or {}).items()),
        run_precision=run_precision,
        qk_norm=measurements.qk_norm,
        attention_softcap=measurements.attention_softcap,
        log_z_mean=float(measurements.log_z_mean),
    )


def _records(frame: Any) -> list[dict[str, Any]]:
    return frame.to_dict("records")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _layer_grad_norms(parameters: list[dict[str, Any]]) -> tuple[tuple[int, float], ...]:
    squares: dict[int, float] = {}
    for row in parameters:
        if row["layer"] >= 0:
            squares[int(row["layer"])] = squares.get(int(row["layer"]), 0.0) + float(row["grad_norm"]) ** 2
    return tuple((layer, math.sqrt(square)) for layer, square in sorted(squares.items()))


# --- the boxes ----------------------------------------------------------------------------------


def answer(facts: ChecklistFacts) -> tuple[Box, ...]:
    """Every box of the six steps, in order."""
    return (
        *_establish(facts),
        *_categories(facts),
        *_isolate(facts),
        *_root_cause(facts),
        *_mitigate(facts),
        *_prevent(facts),
    )


def written_down(boxes: Iterable[Box], files: Iterable[object]) -> tuple[Box, ...]:
    """The boxes once it is known where the report goes: the incident is then written down."""
    names = ", ".join(map(str, files))
    done = Box(5, _WRITTEN_DOWN, "pass", names)
    return tuple(done if names and box.item == _WRITTEN_DOWN else box for box in boxes)


def _not_applicable(step: int, item: str, why: str) -> Box:
    return Box(step, item, "unknown", why)


def _status(is_good: bool) -> BoxStatus:
    return "pass" if is_good else "fail"


def _n(value: float) -> str:
    return f"{value:.4g}"


def _times(ratio: float) -> str:
    return f"{ratio:.3g}×"


def _establish(facts: ChecklistFacts) -> Iterable[Box]:
    log = facts.log
    item = "The log shows loss and gradient norm at their usual level at this step"
    if log is None or log.logged_loss is None:
        yield Box(1, item, "unknown", "", _lacking_in_the_log(facts))
    elif log.usual_loss is None and log.usual_grad_norm is None:
        yield Box(1, item, "unknown", f"loss {_n(log.logged_loss)}", "a log that begins some steps before this one")
    else:
        pairs = [
            ("loss", log.logged_loss, log.usual_loss),
            ("gradient norm", log.logged_grad_norm, log.usual_grad_norm),
        ]
        told = [f"{name} {_n(value)}" + _usual(usual) for name, value, usual in pairs if value is not None]
        yield Box(1, item, _status(not _logged_spike(facts)), "; ".join(told))

    rows = facts.verdict.location.rows
    where = f"in this batch the cause sits in {len(rows)} of {facts.n_rows} rows" if rows else ""
    yield Box(
        1, "Every rank tells the same, not one shard alone", "unknown", where, "the batches of other ranks: replay each"
    )

    item = "No NaN or Inf in the logged loss and gradient norm"
    if log is None:
        yield Box(1, item, "unknown", "", _LOG)
    else:
        steps = ", ".join(map(str, log.nonfinite_steps[:5])) + (" …" if len(log.nonfinite_steps) > 5 else "")
        yield Box(1, item, _status(not log.nonfinite_steps), f"steps {steps}" if steps else "none")

    item = f"Gradient norm of the batch within {GRADIENT_JUMP:g}× its usual value"
    if not math.isfinite(facts.grad_norm):
        yield Box(1, item, "fail", f"replayed {facts.grad_norm}")
    elif facts.grad_ratio is None:
        yield Box(1, item, "unknown", f"replayed {_n(facts.grad_norm)}", _REFERENCE)
    else:
        measured = (
            f"replayed {_n(facts.grad_norm)}, {_times(facts.grad_ratio)} the usual {_n(facts.usual_grad_norm or 0)}"
        )
        yield Box(1, item, _status(facts.grad_ratio <= GRADIENT_JUMP), measured)


def _lacking_in_the_log(facts: ChecklistFacts) -> str:
    """What would tell the logged loss of the batch's step, where it is not known."""
    log = facts.log
    if log is None:
        return _LOG
    if facts.step is None:
        return _STEP
    holds = f": this one holds steps {log.first_step}–{log.last_step}" if log.last_step is not None else ""
    return f"a log with the loss of step {facts.step}{holds}"


def _usual(value: float | None) -> str:
    return f" (usual {_n(value)})" if value is not None else ""


def _logged_spike(facts: ChecklistFacts) -> bool:
    log = facts.log
    if log is None or log.logged_loss is None:
        return False
    if not math.isfinite(log.logged_loss):
        return True
    if log.usual_loss is not None:
        limit = LOSS_SIGMAS * log.loss_spread if log.loss_spread else LOSS_JUMP
        if log.logged_loss - log.usual_loss > limit:
            return True
    if log.logged_grad_norm is None or not log.usual_grad_norm:
        return False
    return not log.logged_grad_norm <= GRADIENT_JUMP * log.usual_grad_norm  # a NaN is a spike


def _categories(facts: ChecklistFacts) -> Iterable[Box]:
    up, ratio, norm = facts.loss_is_up, facts.grad_ratio, facts.grad_norm
    finite = math.isfinite(norm)
    loss = f"loss {_n(facts.loss)}{_usual(facts.usual_loss)}"
    grad = f"gradient norm {_n(norm)}{_usual(facts.usual_grad_norm)}"

    def category(item: str, applies: bool | None, measured: str, needs: str) -> Box:
        if applies is None:
            return Box(2, item, "unknown", measured, needs)
        return Box(2, item, _status(not applies), ("applies: " if applies else "no: ") + measured)

    lacks_reference = up is None or (ratio is None and finite)
    jumped = None if lacks_reference else bool(up) and finite and (ratio or 0.0) > GRADIENT_JUMP
    ordinary = None if lacks_reference else bool(up) and finite and (ratio or 0.0) <= GRADIENT_JUMP
    yield category("Loss up, gradient norm ordinary: the data", ordinary, f"{loss}, {grad}", _REFERENCE)
    yield category(
        f"Loss up, gradient norm over {GRADIENT_JUMP:g}×: an oversized update", jumped, f"{loss}, {grad}", _REFERENCE
    )
    yield category("Gradient norm not finite: overflow or stored NaN", not finite, grad, "")
    faded = norm < GRADIENT_DEAD or (ratio is not None and ratio < GRADIENT_FADED)
    yield category("Gradient norm near zero: it vanishes, or the model never learned", finite and faded, grad, "")

    item = "The spike stands at the end of warm-up, with the LR at its peak: warm-up too short"
    log = facts.log
    if log is None or log.warmup_end is None or facts.step is None:
        yield category(item, None, "", _LOG if log is None else "learning rates in the log, and --step")
    else:
        window = max(WARMUP_WINDOW, log.warmup_end / 10)
        near = abs(facts.step - log.warmup_end) <= window
        measured = f"step {facts.step}; the LR reached its peak {_n(log.peak_lr or 0)} at step {log.warmup_end}"
        yield category(item, near and up is not False, measured, "")


def _isolate(facts: ChecklistFacts) -> Iterable[Box]:
    yield _before_spike_box(facts)
    yield _agreement_box(facts)

    item = "No layer's gradient stands out"
    if not facts.layer_grad_norms:
        yield Box(3, item, "unknown", "", "a model whose blocks can be told apart by name")
    else:
        yield _layers_box(item, facts.layer_grad_norms)

    item = f"Every head's attention logits stay under {LOGIT_LIMIT:g}"
    if facts.hottest_head is None:
        yield Box(3, item, "unknown", "", "a model whose attention calls scaled_dot_product_attention or softmax")
    else:
        layer, head, logit = facts.hottest_head
        yield Box(3, item, _status(logit <= LOGIT_LIMIT), f"hottest: layer {layer} head {head} with {_n(logit)}")


def _before_spike_box(facts: ChecklistFacts) -> Box:
    item = "The checkpoint is from before the spike"
    log, step = facts.log, facts.step
    known = ", ".join(map(str, log.spike_steps[-3:])) if log is not None else ""
    others = f"the log's spikes: step {known}" if known else ""
    if step is None:
        return Box(3, item, "unknown", others, _STEP)
    if log is not None and step not in log.spike_steps and not _logged_spike(facts):
        if log.logged_loss is None:
            return Box(3, item, "unknown", others, _lacking_in_the_log(facts))
        here = f"the log has no spike at step {step}"
        return Box(3, item, "unknown", f"{here}; {others}", _STEP) if others else _not_applicable(3, item, here)
    if log is None and facts.verdict.cause == "none":
        return _not_applicable(3, item, f"nothing shows a spike at step {step}")
    if facts.checkpoint_step is None:
        return Box(3, item, "unknown", "", "a checkpoint that stores its step")
    age = step - facts.checkpoint_step
    measured = f"checkpoint of step {facts.checkpoint_step}, batch of step {step}"
    older = f", {age} steps later" if age > 1 else ""
    return Box(3, item, _status(age >= 0), measured + older)


def _agreement_box(facts: ChecklistFacts) -> Box:
    item = "Forward and backward replayed on the exact batch, and the log agrees"
    log = facts.log
    logged = log.logged_loss if log else None
    measured = f"loss {_n(facts.loss)}, gradient norm {_n(facts.grad_norm)}"
    if facts.verdict.cause == "nondeterministic-replay":
        return Box(3, item, "fail", f"{measured}; another replay of the same batch differs")
    if log is None or logged is None:
        return Box(3, item, "unknown", measured, _lacking_in_the_log(facts))
    limit = max(LOSS_SIGMAS * (log.loss_spread or 0.0), LOSS_JUMP)
    replayed = (facts.loss, *(gap.loss for _, gap in facts.precisions))
    agrees = any(_as_logged(loss, logged, limit) for loss in replayed)
    measured += f"; logged {_n(logged)}"
    return Box(3, item, _status(agrees and facts.verdict.cause != "not-reproduced"), measured)


def _as_logged(loss: float, logged: float, limit: float) -> bool:
    """Whether a replay, in fp32 or in a precision of the run, gives what the log says, as far as batches differ."""
    if not math.isfinite(logged):
        return not math.isfinite(loss)
    return abs(loss - logged) <= limit


def _layers_box(item: str, norms: tuple[tuple[int, float], ...]) -> Box:
    broken = [layer for layer, norm in norms if not math.isfinite(norm)]
    if broken:
        return Box(
            3,
            item,
            "fail",
            f"not finite in layers {', '.join(map(str, broken[:8]))}; backward meets {broken[-1]} first",
        )
    layer, worst = max(norms, key=lambda pair: pair[1])
    median = statistics.median(norm for _, norm in norms)
    ratio = worst / median if median else 1.0
    return Box(
        3,
        item,
        _status(ratio <= LAYER_JUMP),
        f"largest: layer {layer} with {_n(worst)}, {_times(ratio)} the median layer",
    )


def _root_cause(facts: ChecklistFacts) -> Iterable[Box]:
    item = "The token audit finds nothing in the batch"
    told = "; ".join(f"row {row}: {', '.join(flags)}" for row, flags in facts.flagged[:4])
    more = f" and {len(facts.flagged) - 4} more rows" if len(facts.flagged) > 4 else ""
    yield Box(4, item, _status(not facts.flagged), told + more if told else f"{facts.n_rows} rows, none flagged")

    item = "The shard and documents of the batch are known"
    if facts.source:
        yield Box(4, item, "pass", facts.source)
    else:
        yield Box(4, item, "unknown", "", '"source" in incident.json: the shard and the documents')

    yield _precision_box(facts)

    item = "The learning rate fits this step"
    if facts.lr is None:
        yield Box(4, item, "unknown", "", "--lr, or --log with learning rates")
    else:
        peak = facts.log.peak_lr if facts.log else None
        parts = [f"LR {_n(facts.lr)}", f"peak {_n(peak)}" if peak else ""]
        parts += [f"one step changes the loss by {facts.damage:+.4g} nats" if facts.damage is not None else ""]
        measured = ", ".join(part for part in parts if part)
        if facts.damage is None and facts.verdict.cause not in _IN_LR:
            needs = "a checkpoint with optimizer state, to try the step" if not facts.has_optimizer else _REFERENCE
            yield Box(4, item, "unknown", measured, needs)
        else:
            harmless = facts.damage is None or facts.damage <= ALERT
            yield Box(4, item, _status(harmless and facts.verdict.cause not in _IN_LR), measured)


def _precision_box(facts: ChecklistFacts) -> Box:
    item = "fp32 and the run's precision agree"
    own = facts.run_precision
    gaps = [(name, gap) for name, gap in facts.precisions if own is None or name == own]
    told = "; ".join(f"{name}: {_n(gap.token_gap)} nats per token, {gap.nonfinite} non-finite" for name, gap in gaps)
    if own == "fp32":
        return _not_applicable(4, item, "the run trained in fp32")
    if not gaps:
        return Box(4, item, "unknown", "", "--precisions with the run's, such as bf16")
    good = all(gap.token_gap <= ALERT for _, gap in gaps) and facts.verdict.cause not in _IN_PRECISION
    if good and own is None:
        return Box(4, item, "unknown", told, "what the run trained in: --precisions, its own first")
    return Box(4, item, _status(good), told)


def _mitigate(facts: ChecklistFacts) -> Iterable[Box]:
    verdict = facts.verdict
    yield _fix_box(verdict)
    yield _resume_box(facts)
    item = "500 steps watched after the restart before alerts go back to normal"
    if verdict.cause == "none":
        yield _not_applicable(5, item, "no restart is asked for")
    else:
        yield Box(5, item, "unknown", "", "the resumed run's log, once it has run")
    yield Box(5, _WRITTEN_DOWN, "unknown", "", "--out incident.md")


def _fix_box(verdict: Verdict) -> Box:
    item = "A fix is known"
    share = "" if verdict.explained is None else f"removes {100 * verdict.explained:.0f} % of the excess"
    if verdict.cause == "none":
        return _not_applicable(5, item, "nothing was found to fix")
    if verdict.cause in _OUTSIDE:
        return Box(5, item, "unknown", "", "the cause, first: it is outside checkpoint and batch")
    if verdict.cause == "unexplained":
        return Box(5, item, "fail", f"the best repair tried {share}" if share else "no repair tried removes the excess")
    if share and verdict.status in ("confirmed", "likely"):
        return Box(5, item, "pass" if verdict.status == "confirmed" else "fail", f"tried in memory, it {share}")
    if verdict.remedies and verdict.status in ("decisive", "latent", "confirmed"):
        return Box(5, item, "pass", verdict.remedies[0].action)
    return Box(5, item, "unknown", "", "a replay without --no-confirm, with what the skipped causes name")


def _resume_box(facts: ChecklistFacts) -> Box:
    item = "This checkpoint is sound enough to resume from"
    cause = facts.verdict.cause
    if cause in _IN_CHECKPOINT:
        return Box(5, item, "fail", f"{cause} is in the checkpoint itself: repair it, or take an earlier one")
    if not math.isfinite(facts.baseline_loss if facts.baseline_loss is not None else 0.0):
        return Box(5, item, "fail", f"the baseline batch gives a loss of {facts.baseline_loss}")
    if cause == "none":
        told = f"it replays the batch with a loss of {_n(facts.loss)}{_usual(facts.usual_loss)}"
        known = facts.usual_loss is not None
        return Box(5, item, "pass" if known else "unknown", told, "" if known else _REFERENCE)
    if facts.baseline_loss is None:
        return Box(5, item, "unknown", "", "--baseline with a healthy batch")
    usual = facts.log.usual_loss if facts.log else None
    if usual is None:
        return Box(5, item, "pass", f"baseline batch: loss {_n(facts.baseline_loss)}")
    spread = facts.log.loss_spread if facts.log else None
    good = facts.baseline_loss - usual <= max(LOSS_SIGMAS * (spread or 0.0), LOSS_JUMP)
    return Box(5, item, _status(good), f"baseline batch: loss {_n(facts.baseline_loss)}, the run's usual {_n(usual)}")


def _prevent(facts: ChecklistFacts) -> Iterable[Box]:
    cause = facts.verdict.cause
    item = "The token audit would have stopped this batch"
    if cause == "unexplained" or cause in _OUTSIDE:
        yield Box(6, item, "unknown", "", "a cause, first")
    elif cause not in _IN_DATA:
        yield _not_applicable(6, item, "the cause is not in the data" if cause != "none" else "nothing to stop")
    else:
        caught = any(cause in flags for _, flags in facts.flagged)
        yield Box(
            6, item, _status(caught), f"it flags {cause}" if caught else f"it does not flag {cause}: check it elsewhere"
        )

    item = "The signal that shows it early is logged"
    log = facts.log
    if cause == "none" and log and log.usual_grad_norm is not None:
        yield Box(6, item, "pass", "loss and gradient norm are in the log")
    else:
        signal = (
            "the loss of every row, and the audit's flags"
            if cause in _IN_DATA
            else _SIGNALS.get(cause, "the gradient norm of every step")
        )
        yield Box(6, item, "unknown", "", f"a look at the training loop: does it log {signal}?")

    ratio = facts.grad_ratio
    if ratio is None:
        measured = ""
    else:
        fires = "would have" if not ratio <= GRADIENT_JUMP else "would not have"
        measured = f"a guard at {GRADIENT_JUMP:g}× the usual gradient norm {fires} fired ({_times(ratio)})"
    yield Box(6, "The loop skips a batch whose gradient norm jumps", "unknown", measured, "a look at the training loop")

    yield _growth_box(facts)


def _growth_box(facts: ChecklistFacts) -> Box:
    item = "Attention logits and log Z are kept from growing"
    limits = ["QK-norm"] if facts.qk_norm else []
    limits += [f"soft-cap {facts.attention_softcap:g}"] if facts.attention_softcap else []
    hottest = f"hottest head {_n(facts.hottest_head[2])}, " if facts.hottest_head else ""
    measured = f"{' and '.join(limits) or 'neither QK-norm nor soft-cap'}; {hottest}mean log Z {_n(facts.log_z_mean)}"
    grown = facts.verdict.cause in ("attention-logit-growth", "qk-norm-gain-growth", "logit-drift")
    if grown:
        return Box(6, item, "fail", measured)
    if limits:
        return Box(6, item, "pass", measured)
    if facts.hottest_head is None:
        return Box(6, item, "unknown", measured, "a model whose attention can be measured")
    if facts.hottest_head[2] <= LOGIT_LIMIT:
        return Box(6, item, "unknown", measured, "a look at the training loop: does it use z-loss or QK-clip?")
    return Box(6, item, "fail", measured)
