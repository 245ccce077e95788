"""The incident on the bench: every replay that is made before anything is suspected, and all that it measures."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

from stability_probe import tables
from stability_probe.audit import audit_rows
from stability_probe.batches.base import IGNORED, Batch
from stability_probe.batches.edit import apply, join, select
from stability_probe.checkpoints.base import OptimizerState
from stability_probe.checkpoints.optimizer import misfits, name_optimizer_state
from stability_probe.incident import Incident
from stability_probe.interventions.bench import Bench, StepBench
from stability_probe.interventions.simulated_step import damage
from stability_probe.measure import Measurements, StepEffect, StepProgress
from stability_probe.optimizer_step import StepSetting, clip_factor, tensor_steps
from stability_probe.progress import Progress, Silent
from stability_probe.replay import Subject, Trace, mean_loss, replay
from stability_probe.schema import ReplayRecord
from stability_probe.step_progress import kept_in_bf16, step_progress
from stability_probe.tables_mixing import mixing_table
from stability_probe.tables_positions import blind_queries, position_facts
from stability_probe.taps.router import RouterTap, find_routers


def examine(
    incident: Incident, subject: Subject, show: Progress | None = None
) -> tuple[Bench, list[ReplayRecord], list[str]]:
    """Replay the batch and the baseline, and measure."""
    show = show or Silent()
    vocabulary = incident.model.vocab_size
    wrong = tables.bad_ids(incident.batch, vocabulary)
    notes = [f"{len(wrong)} ids outside the vocabulary were replayed as id 0, without a target"] if wrong else []
    batch = sound(incident.batch, vocabulary)
    baseline = join(incident.baselines) if incident.baselines else None
    if baseline is not None and (foreign := len(tables.bad_ids(baseline, vocabulary))):
        kept = foreign <= FOREIGN * baseline.ids_BT.numel()
        fate = "were replayed as id 0, without a target" if kept else "are too many: it is left out"
        notes.append(f"{foreign} ids of the baseline are outside the vocabulary and {fate}")
        baseline = sound(baseline, vocabulary) if kept else None
    microbatch = incident.request.microbatch
    names = precisions_of(incident)

    def replayed(
        what: Batch, name: str, precision: str, sketches: bool, extra: Callable[[], Any] = nullcontext
    ) -> Trace:
        with show.stage(f"Replaying {name} in {precision}", what.ids_BT.shape[0]) as advance:
            trace = replay(
                subject, what, precision, sketches=sketches, microbatch=microbatch, extra=extra, advance=advance
            )
        records.append(record_of(name, trace))
        return trace

    records: list[ReplayRecord] = []
    routers = RouterTap(find_routers(subject.module, subject.anatomy))
    trace = replayed(batch, "the batch", "fp32", True, functools.partial(routers.on, subject.module))
    again = repeated(subject, batch, microbatch)
    reduced = {name: replayed(batch, "the batch", name, True) for name in names}
    for other in reduced.values():
        other.forget_gradients()  # only the sketches are compared
    healthy = replayed(baseline, "the baseline", "fp32", False) if baseline is not None else None
    with show.stage("Measuring"):
        state, missing = optimizer_state(incident)
        measured = measure(incident, subject, batch, trace, reduced, baseline, healthy, state, missing)
        measured = dataclasses.replace(measured, bad_ids=wrong, routers=routers.table(), **repeat_facts(trace, again))
        if trace.drew_random_numbers:
            seeded = repeat_facts(trace, repeated(subject, batch, microbatch, seed=1))
            measured = dataclasses.replace(
                measured, seed_gap=seeded["repeat_gap"], seed_loss_change=seeded["repeat_loss_change"]
            )
    if healthy is not None:
        healthy.forget_gradients()
    pair = (baseline, healthy) if baseline is not None and healthy is not None else None
    step = None
    if repeats(measured):
        step = step_bench(incident, subject, batch, trace, pair, state)
    elif state is not None:
        reason = "the same forward gives another loss each time: what a step does cannot be told from that"
        measured = dataclasses.replace(measured, optimizer_missing=reason)
    bench = Bench(subject, batch, trace, measured, reduced, pair, step, microbatch, gradients_matter(measured))
    if step is not None:
        with show.stage("Simulating the optimizer's step"):
            effect = step_effect(bench, step, incident.grad_clip)
        bench = dataclasses.replace(bench, measurements=dataclasses.replace(measured, step_effect=effect))
    return bench, records, notes


# Of a baseline's ids: with more that no embedding has it says nothing about what is usual.
FOREIGN = 0.01


def sound(batch: Batch, vocabulary: int) -> Batch:
    """The batch with ids that no embedding has replaced by 0, and targets that no logit has ignored."""
    outside = (batch.ids_BT < 0) | (batch.ids_BT >= vocabulary)
    ids = batch.ids_BT.masked_fill(outside, 0)
    targets = batch.targets_BT.masked_fill(batch.targets_BT >= vocabulary, IGNORED)
    return dataclasses.replace(batch, ids_BT=ids, targets_BT=targets)


def precisions_of(incident: Incident) -> list[str]:
    """The precisions to replay beside fp32: those asked for, else bf16 and what the run trained in."""
    asked = list(incident.request.precisions) or ["bf16"]
    if incident.run_precision not in ("fp32", *asked):
        asked.append(incident.run_precision)
    return [name for name in dict.fromkeys(asked) if name != "fp32"]


def record_of(name: str, trace: Trace) -> ReplayRecord:
    nonfinite = int((~trace.token_loss_BT[trace.has_target_BT].isfinite()).sum())
    return ReplayRecord(name, trace.precision, trace.loss, trace.global_grad_norm, nonfinite, trace.seconds)


def optimizer_state(incident: Incident) -> tuple[OptimizerState | None, str]:
    """The moments by parameter name, or why there are none that can be used."""
    raw = incident.checkpoint.optimizer
    if raw is None:
        return None, "no optimizer state was found in or beside the checkpoint; give it with --optimizer"
    named = name_optimizer_state(raw, incident.model.module)
    if isinstance(named, str):
        return None, named
    known = named.kind == "adamw"
    return named, "" if known else f"the optimizer is {named.kind}: only AdamW's step is simulated"


def measure(
    incident: Incident,
    subject: Subject,
    batch: Batch,
    trace: Trace,
    reduced: Mapping[str, Trace],
    baseline: Batch | None,
    healthy: Trace | None,
    state: OptimizerState | None,
    optimizer_missing: str,
) -> Measurements:
    """Every table and number that the rules may read."""
    low = next((other for name, other in reduced.items() if name.startswith("bf16")), None)
    offsets, row_offsets = tables.offset_losses(trace)
    norm = trace.global_grad_norm if trace.global_grad_norm is not None else math.nan
    log_z = trace.log_z_BT[trace.has_target_BT]
    log_z = log_z[log_z.isfinite()]
    attention_cap, output_cap = tables.softcaps(subject.module)
    modules = tables.module_table(subject, trace, healthy, low)
    final = modules[modules["module"] == subject.anatomy.final_norm]["rms"]
    steps = None
    if state is not None and trace.gradients is not None and state.kind == "adamw":
        steps = tensor_steps(subject.module, trace.gradients.total, state, setting_of(incident, norm))
    return Measurements(
        vocab_size=incident.model.vocab_size,
        n_layers=len(subject.anatomy.blocks),
        loss=trace.loss,
        global_grad_norm=norm,
        modules=modules,
        heads=tables.head_table(subject, trace, healthy),
        parameters=tables.parameter_table(subject, trace, healthy, low, steps),
        rows=tables.row_table(batch, trace, audit(incident)),
        embedding_rows=tables.embedding_table(subject, batch, trace, incident.model.vocab_size),
        tokens=tables.token_table(batch, trace, low),
        run_precision=incident.run_precision,
        checkpoint_step=incident.checkpoint.step,
        loss_nonfinite=trace.valid_targets > 0 and not math.isfinite(trace.loss),
        grad_nonfinite=not math.isfinite(norm),
        valid_targets=trace.valid_targets,
        offset_losses=offsets,
        row_offset_losses=row_offsets,
        unigram_entropy=tables.unigram_entropy([b for b in (batch, baseline) if b is not None]),
        keys=incident.model.keys,
        baseline_loss=healthy.loss if healthy else None,
        baseline_grad_norm=healthy.global_grad_norm if healthy else None,
        baseline_row_losses=tuple(healthy.row_losses) if healthy else (),
        log_z_mean=log_z.mean().item() if log_z.numel() else math.nan,
        log_z_std=log_z.std(correction=0).item() if log_z.numel() else math.nan,
        logit_absmax=trace.logit_absmax,
        final_norm_rms=float(final.iloc[0]) if len(final) else math.nan,
        attention_softcap=attention_cap,
        output_softcap=output_cap,
        qk_norm=any(site.query_norm or site.key_norm for site in subject.anatomy.attention),
        precisions={name: tables.precision_gap(trace, other) for name, other in reduced.items()},
        log=incident.log,
        optimizer=_optimizer_facts(state),
        optimizer_missing=optimizer_missing,
        optimizer_misfits=misfits(incident.checkpoint.optimizer or {}, subject.module) if state is None else (),
        positions=position_facts(subject, batch, trace, eos_id(incident)),
        blind=blind_queries(batch, trace),
        tokenizer_known=incident.tokenizer is not None,
        mixing=mixing_table(subject.module, subject.anatomy),
        step_progress=progress_of(incident, subject, trace, state, norm),
    )


def progress_of(
    incident: Incident, subject: Subject, trace: Trace, state: OptimizerState | None, global_grad_norm: float
) -> StepProgress | None:
    """What the run's next step gains to first order; None where it cannot be simulated."""
    if state is None or state.kind != "adamw" or trace.gradients is None or not math.isfinite(global_grad_norm):
        return None
    in_bf16, reason = kept_in_bf16(incident.run_precision, incident.checkpoint.tensors, state)
    setting = setting_of(incident, global_grad_norm)
    return step_progress(subject.module, trace.gradients.total, state, setting, in_bf16, reason)


def eos_id(incident: Incident) -> int | None:
    eos = incident.model.config.get("eos_token_id")
    return eos if isinstance(eos, int) else None


# Rows that are replayed twice: enough to see what differs from one replay to the next, a fraction of the time.
REPEATED_ROWS = 8


def repeated(subject: Subject, batch: Batch, microbatch: int, seed: int = 0) -> Trace:
    """The forward over the first rows once more: with the same seed it must give the same, bit for bit."""
    rows = select(batch, REPEATED_ROWS)
    return replay(subject, rows, backward=False, detail=False, microbatch=microbatch, seed=seed)


def repeat_facts(trace: Trace, again: Trace) -> dict[str, Any]:
    """The `repeat_…` of `Measurements`."""
    rows, T = again.token_loss_BT.shape
    first, second = trace.token_loss_BT[:rows, :T].double(), again.token_loss_BT.double()
    same = (first == second) | (first.isnan() & second.isnan())
    gap = (first - second).abs().nan_to_num(nan=math.inf).masked_fill(same, 0.0)
    return {
        "repeat_differs": not bool(same.all()),
        "repeat_gap": gap.max().item() if gap.numel() else 0.0,
        "repeat_loss_change": again.loss - mean_loss(trace.token_loss_BT[:rows], trace.has_target_BT[:rows]),
        "repeat_rows": tuple((~same).any(1).nonzero().flatten().tolist()),
    }


def audit(incident: Incident) -> Any:
    """The token audit of the batch as it was stored."""
    batch = incident.batch
    config = incident.model.config
    eos = config.get("eos_token_id")
    pad = config.get("pad_token_id")
    return audit_rows(
        batch.ids_BT,
        labels_BT=batch.labels_BT,
        mask_BT=batch.mask_BT,
        labels=batch.convention if batch.convention != "absent" else "auto",
        vocab_size=incident.model.vocab_size,
        tokenizer=incident.tokenizer,
        eos_id=eos if isinstance(eos, int) else None,
        pad_id=pad if isinstance(pad, int) else None,
    )


def _optimizer_facts(state: OptimizerState | None) -> dict[str, Any] | None:
    if state is None:
        return None
    steps = sorted(state.step.values())
    return {
        "kind": state.kind,
        "step": steps[len(steps) // 2] if steps else None,
        "naming": state.naming,
        "groups": [dataclasses.asdict(group) for group in state.groups],
    }


def setting_of(incident: Incident, global_grad_norm: float) -> StepSetting:
    """How the run would take this step."""
    return StepSetting(lr=incident.lr, clip_factor=clip_factor(global_grad_norm, incident.grad_clip))


# Nats. What a healthy step does to a loss is less than this, and a forward that repeats itself differs by rounding.
STEP_NOISE = 0.02


def repeats(m: Measurements) -> bool:
    """Whether replaying the batch once more gives its loss again."""
    change = m.repeat_loss_change
    return change is None or not abs(change) >= STEP_NOISE


def step_bench(
    incident: Incident,
    subject: Subject,
    batch: Batch,
    trace: Trace,
    healthy: tuple[Batch, Trace] | None,
    state: OptimizerState | None,
) -> StepBench | None:
    """The step to simulate, judged on text whose gradient it does not follow, wherever there is some.

    Without a baseline batch, one half of the rows gives the gradient and the other half is looked at: a step lowers
    the loss of the very rows that it was computed on even where it harms all others.
    """
    norm = trace.global_grad_norm
    usable = state is not None and state.kind == "adamw" and norm is not None and math.isfinite(norm)
    if not usable or trace.gradients is None or state is None or norm is None:
        return None
    if healthy is not None:
        gradients, setting = trace.gradients.total, setting_of(incident, norm)
        return StepBench(gradients, state, setting, healthy[0], healthy[1].loss, "baseline batch")
    rows = trace.has_target_BT.any(1).nonzero().flatten()
    if len(rows) < 2:
        return StepBench(trace.gradients.total, state, setting_of(incident, norm), batch, trace.loss, "this batch")
    step_rows, held_out = rows[::2], rows[1::2]
    half = replay(subject, apply(batch, lambda x: x[step_rows]), detail=False, microbatch=incident.request.microbatch)
    before = mean_loss(trace.token_loss_BT[held_out], trace.has_target_BT[held_out])
    setting = setting_of(incident, half.global_grad_norm or 0.0)
    gradients = half.gradients.total if half.gradients else {}
    return StepBench(
        gradients, state, setting, apply(batch, lambda x: x[held_out]), before, "held-out half of this batch"
    )


# v̂ counts as stale where the gradient is this much larger: then it is refreshed in the simulated step.
STALE = 10.0


# A rate that is many times too high still does harm at a quarter: then much smaller ones are tried.
LR_FACTORS = (0.5, 0.25, 0.05, 0.01)


def step_effect(bench: Bench, step: StepBench, grad_clip: float | None) -> StepEffect:
    """What the step does to healthy text, and what it does at a lower LR and with refreshed moments."""
    frame = bench.measurements.parameters
    stale = frozenset(frame[frame["g2_over_v"] > STALE]["parameter"])
    whole = damage(bench, step.setting)
    by_lr: dict[float, float] = {}
    for factor in LR_FACTORS:
        by_lr[factor] = damage(bench, dataclasses.replace(step.setting, lr_factor=factor))
        if factor <= 0.25 and by_lr[factor] <= 0.25 * max(whole, 0.0):
            break
    refreshed = damage(bench, dataclasses.replace(step.setting, refresh=stale)) if stale else None
    lr = step.setting.lr if step.setting.lr is not None else max(group.lr for group in step.state.groups)
    return StepEffect(
        measured_on=step.measured_on,
        damage=whole,
        damage_by_lr=by_lr,
        damage_refreshed=refreshed,
        lr=lr,
        grad_clip=grad_clip,
        clip_factor=step.setting.clip_factor,
    )


def gradients_matter(m: Measurements) -> bool:
    """Whether interventions must be judged on gradients too, which costs a backward each."""
    usual = m.log.usual_grad_norm if m.log else None
    ratios = [m.global_grad_norm / reference for reference in (usual, m.baseline_grad_norm) if reference]
    return m.grad_nonfinite or any(ratio > 1.5 for ratio in ratios)
