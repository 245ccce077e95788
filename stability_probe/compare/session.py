"""The comparison itself: fp32 once, each precision after it, judged against siblings and the baseline batch."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from stability_probe.batches.base import Batch
from stability_probe.checkpoints.base import OptimizerState
from stability_probe.compare.isolate import Gap, count_replays, isolate
from stability_probe.compare.result import Comparison, ModuleError, PrecisionResult
from stability_probe.compare.runs import LowRun, ReferenceRun, run_low, run_reference
from stability_probe.compare.tables import (
    gradient_gap,
    judged,
    loss_scale_needed,
    module_errors,
    output_report,
    parameter_errors,
    ranges,
    worst_tokens,
)
from stability_probe.compare.updates import update_reports
from stability_probe.compare.verdict import culprits, explained_share, judge, summary
from stability_probe.precisions import get_precision
from stability_probe.precisions.base import Precision
from stability_probe.progress import Progress, Silent
from stability_probe.replay import Subject, widths

# Of one forward, where rows are short. More would hold more activations at once and gain little.
POSITIONS_TOGETHER = 512


def compare_precisions(
    subject: Subject,
    batch: Batch,
    precisions: Sequence[str],
    *,
    baseline: Batch | None = None,
    isolated: bool = False,
    microbatch: int | None = None,
    optimizer: OptimizerState | None = None,
    lr: float | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Where each precision loses against fp32, and whether that matters.

    Args:
        precisions: names as in `get_precision`.
        baseline: a healthy batch; errors that it shows as well are not this batch's.
        isolated: also replay with one block at a time in fp32, and find a set to keep there.
        microbatch: rows in one forward; by default as many as `rows_together`.
        optimizer, lr: for what bf16 weights make of the step.

    Raises:
        ProbeError: an unknown precision (exit code 2), or a replay that failed (4).
    """
    wanted = [get_precision(name) for name in dict.fromkeys(precisions)]
    progress = progress or Silent()
    started = time.perf_counter()
    before = _measured(subject, baseline, wanted, microbatch, progress, "baseline, ") if baseline is not None else None
    reference, lows = _measured(subject, batch, wanted, microbatch, progress, "")
    results = {}
    for precision in wanted:
        usual = (before[0], before[1][precision.name]) if before else None
        result = _result(subject, batch, reference, lows[precision.name], usual)
        if isolated:
            together = microbatch or rows_together(batch)
            result = _isolated(subject, batch, precision, reference, result, together, progress)
        results[precision.name] = result
    return Comparison(
        summary=summary(list(results.values())),
        loss=reference.loss,
        global_grad_norm=reference.global_grad_norm,
        baseline_loss=before[0].loss if before else None,
        max_attention_logit=reference.max_attention_logit,
        seconds=time.perf_counter() - started,
        precisions=results,
        updates=update_reports(subject.module, optimizer, lr),
    )


def rows_together(batch: Batch) -> int:
    """Rows that go through one forward: every forward rounds all weights, which is most of the work on short rows.

    One where rows differ in length: together they would keep the padding that is cut off each.
    """
    if len(set(widths(batch))) > 1:
        return 1
    return max(1, POSITIONS_TOGETHER // max(1, batch.ids_BT.shape[1]))


def _measured(
    subject: Subject, batch: Batch, wanted: list[Precision], microbatch: int | None, progress: Progress, prefix: str
) -> tuple[ReferenceRun, dict[str, LowRun]]:
    rows, microbatch = batch.ids_BT.shape[0], microbatch or rows_together(batch)
    with progress.stage(f"{prefix}fp32", rows) as advance:
        reference = run_reference(subject, batch, wanted, microbatch, advance)
    lows = {}
    for precision in wanted:
        with progress.stage(f"{prefix}{precision.name}", rows) as advance:
            lows[precision.name] = run_low(subject, batch, precision, reference, microbatch, advance)
    return reference, lows


def _result(
    subject: Subject, batch: Batch, reference: ReferenceRun, low: LowRun, usual: tuple[ReferenceRun, LowRun] | None
) -> PrecisionResult:
    precision, anatomy = low.precision, subject.anatomy
    unit = precision.operands.unit_roundoff
    before: list[ModuleError] = module_errors(anatomy, *usual) if usual else []
    modules = judged(anatomy, module_errors(anatomy, reference, low), unit, before)
    error, cosine = gradient_gap(reference.gradients, low.gradients)
    result = PrecisionResult(
        name=precision.name,
        summary=precision.summary,
        emulated=precision.emulated(subject.device),
        loss=low.loss,
        loss_gap=low.loss - reference.loss,
        token_gap=token_gap(reference, low),
        global_grad_norm=low.global_grad_norm,
        grad_relative_error=error,
        grad_cosine=cosine,
        nonfinite=sum(int(seen.nonfinite) for seen in low.tap.modules.values()),
        first_nonfinite=_or_model(low.tap.first_nonfinite),
        seconds=low.seconds,
        modules=modules,
        parameters=parameter_errors(reference, low),
        ranges=ranges(reference, low),
        output=output_report(reference, low),
        tokens=tuple(worst_tokens(batch, reference, low)),
        loss_scale_needed=loss_scale_needed(reference, low),
        baseline_loss_gap=usual[1].loss - usual[0].loss if usual else None,
        baseline_grad_relative_error=gradient_gap(usual[0].gradients, usual[1].gradients)[0] if usual else None,
        culprits=culprits(modules),
        notes=_notes(low),
    )
    baseline_loss = usual[0].loss if usual else None
    severity, sentence = judge(result, unit, reference.loss, reference.max_attention_logit)
    share = explained_share(result, reference.loss, baseline_loss)
    if share is not None:
        sentence += f" Of the excess over the baseline, {100 * share:.0f} % is {precision.name}'s."
    return dataclasses.replace(result, severity=severity, sentence=sentence)


def token_gap(reference: ReferenceRun, low: LowRun) -> float:
    """Mean |loss difference| over the targets, nats."""
    difference = (low.token_loss_BT - reference.token_loss_BT)[reference.has_target_BT]
    return difference.abs().double().mean().item() if difference.numel() else math.nan


def _isolated(
    subject: Subject,
    batch: Batch,
    precision: Precision,
    reference: ReferenceRun,
    result: PrecisionResult,
    microbatch: int,
    progress: Progress,
) -> PrecisionResult:
    whole = Gap(result.token_gap, result.grad_relative_error)
    total = count_replays(subject, result.culprits)
    with progress.stage(f"{precision.name}, one module at a time in fp32", total) as advance:
        tried, keep = isolate(
            subject, batch, precision, reference, whole, result.culprits, microbatch, lambda n: advance(n)
        )
    return dataclasses.replace(result, isolated=tried, keep_fp32=keep)


def _or_model(name: str | None) -> str | None:
    return "(model)" if name == "" else name


def _notes(low: LowRun) -> tuple[str, ...]:
    failed = {**low.tap.failed, **{f"backward of {k}": v for k, v in low.tap.backward.failed.items()}}
    rows = ", ".join(str(row) for row in sorted(low.tap.backward.rows))
    done, blocks = len(low.tap.backward.chosen), len(low.tap.subject.anatomy.blocks)
    which = "blocks" if done >= blocks else f"{done} of {blocks} blocks (half of them the worst in the forward)"
    sampled = f"gradients of {which} were computed again in fp32 on the forwards that begin with row {rows}"
    return (sampled, *(f"`{name or '(model)'}` could not be computed again: {why}" for name, why in failed.items()))
