"""From suspects to a verdict: intervene in memory, replay, and ask how much of the excess is gone.

One scale for all causes, the explained share: (before − after) / (before − reference), clipped to [0, 1].
Two kinds of interventions have two kinds of reference. Changing the *data* (leaving rows out) is held against
the rows that nothing points to, as long as these cost no more than the baseline batch does. Changing the *state*
(a weight, the labels, the numerics) is held against what the log says the run used to have, else against the best
of all repairs tried: no repair improves a healthy model, so without an excess nothing is gained and explained.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stability_probe.errors import ProbeError
from stability_probe.interventions.bench import Bench, CannotRun, Reading, reading_of, repaired_reading, tried
from stability_probe.judge import Measure, Plan, Rule, Suspect
from stability_probe.measure import Measurements
from stability_probe.runlogs.facts import SPIKE_SIGMAS
from stability_probe.schema import InterventionRecord, Outcome, Ranked, Remedy, Status, Verdict

CONFIRMED = 0.5
LIKELY = 0.25
# Shares closer than this are 'equally well': the cause that stands higher in the catalogue wins.
TIE = 0.1
# A replay is exact, so a real repair shows in the third digit; what a clip or a changed weight gains by chance on
# a healthy model is below this (SmolLM2-135M: the best of eight needless repairs gained 0.000 nats, DESIGN).
LOSS_NOISE = 0.02
LOSS_NOISE_SHARE = 0.005
# Gradient norms of healthy batches differ by half and more with their text.
GRAD_NOISE = math.log(1.5)
# Mean |token loss gap| of a healthy 135M model in bf16 is 0.02–0.03 nats.
PRECISION_NOISE = 0.05
DAMAGE_NOISE = 0.02
# Shares of a step's progress: the healthy models of fixtures/tiny.py lose 1e-5 of theirs to ε = 1e-8.
PROGRESS_NOISE = 0.2
# Nats by which healthy text of one run differs from other healthy text of it, where nothing better is known.
ORDINARY = 0.5
# From this many rows on their spread is known well enough to be used.
MANY_ROWS = 5
# Half of the audit's scale is where its high findings start; what is weaker is not named without a test.
TELLING = 0.5
# From this share on a cause leaves nothing for the ones below it.
SETTLED_SHARE = 0.9
ON_TOP = "gains nothing before the first cause is repaired, and this share after it"
SETTLED = "not tried: a cause that stands higher already explains the loss"
# A step's batch has more targets than this: a saved batch with fewer (masked prompts, short rows) has larger gradients.
FEW_TARGETS = 256
# Nats by which the losses of single tokens differ.
TOKEN_SPREAD = 3.0
# A repair that makes the loss dearer by this is none, whatever it does to the gradient or in fp16: the weight that it
# takes away was in use. Five times what a needless repair moves the loss by (LOSS_NOISE).
HARM = 0.1
# Of the logged loss's own scatter, by which one batch may stand above it. Not the six of a rule that skips steps
# unasked in a run of a million: here one step is looked at because it was odd.
LOG_SIGMAS = 4
# Nats above the baseline batch that no ordinary text of the same run costs: healthy tables, code, chats and rare
# languages were up to 2.7 dearer than a model's own text, and are known as data-shift; what is left over is not.
FAR = 1.5
# The most interventions that are replayed for one rule: the strongest suspects come first.
TRIALS_PER_RULE = 4


@dataclass(frozen=True)
class Trial:
    """One intervention that was run, or could not be run (`reading` is None and `problem` says why).

    Attributes:
        held: the repair of another cause that was in place meanwhile.
        counts: whether it gained enough on top of that one to be a cause; what did not is only recorded.
    """

    suspect: Suspect
    plan: Plan
    of_the_data: bool
    reading: Reading | None
    problem: str = ""
    held: Trial | None = None
    counts: bool = True


@dataclass(frozen=True)
class Judged:
    """One suspect after its trials.

    Attributes:
        needed: every repair that was run makes the loss dearer: what it takes away is in use, however odd it looks
            (Yu et al., The Super Weight in Large Language Models, 2024).
        on_top: it explains what it does only once another cause is repaired.
    """

    suspect: Suspect
    explained: float | None
    records: tuple[InterventionRecord, ...]
    untested: str = ""
    needed: bool = False
    on_top: bool = False


def confirm(
    suspects: list[Suspect], rules: tuple[Rule, ...], bench: Bench, advance: Callable[[int], None] = lambda _: None
) -> tuple[Verdict, list[InterventionRecord]]:
    """Run the suspects' interventions and rank what they explain."""
    order = {rule.slug: rule.order for rule in rules}
    before = readings_before(bench)
    trials: list[Trial] = []
    for suspect in chosen(suspects, order):
        if not suspect.latent and "loss" in suspect.measures and settles(trials, before, bench):
            trials += [Trial(suspect, plan, False, None, SETTLED) for plan in suspect.plans]
            advance(len(suspect.plans))
        else:
            trials += _run(suspect, bench, advance)
    judged = [judge_trials(suspect, trials, before, bench) for suspect in suspects]
    ranked = rank(judged, order)
    if on_top := repairs_on_top(ranked, judged, trials, before, bench, order):
        judged = [judge_trials(suspect, [*trials, *on_top], before, bench) for suspect in suspects]
        ranked = rank(judged, order)
    records = [record for item in judged for record in item.records]
    return verdict_of(ranked, judged, rules, bench, records), records


def settles(trials: list[Trial], before: Reading, bench: Bench) -> bool:
    """Whether a cause that stands higher already brings the loss back to what healthy batches cost.

    Only an outside reference can say so: against the repairs tried so far the first one would always win.
    """
    m = bench.measurements
    known = [loss for loss in (m.baseline_loss, m.log.usual_loss if m.log else None) if loss is not None]
    usual = max(known, default=None)  # healthy batches differ: the dearer of the two is healthy as well
    if usual is None or before["loss"] - usual <= noise_of("loss", before["loss"], bench, of_the_data=False):
        return False
    return any(
        (before["loss"] - trial.reading["loss"]) / (before["loss"] - usual) >= SETTLED_SHARE
        for trial in trials
        if trial.reading is not None and "loss" in trial.reading and trial.plan.intervention != "swap_baseline"
    )


def without_confirmation(suspects: list[Suspect], rules: tuple[Rule, ...], bench: Bench) -> Verdict:
    """The verdict of `--no-confirm`: the suspects in order of their evidence, none of them proved."""
    order = {rule.slug: rule.order for rule in rules}
    ranked = []
    for suspect in sorted(suspects, key=lambda s: (s.last_resort, not s.decisive, s.latent, order.get(s.cause, 9999))):
        status: Status = "decisive" if suspect.decisive else "unconfirmed"
        ranked.append((_ranked(Judged(suspect, None, ()), status), suspect))
    return verdict_of(ranked, [], rules, bench, [])


def chosen(suspects: list[Suspect], order: dict[str, int]) -> list[Suspect]:
    """The suspects whose interventions are run: the strongest few of each rule, in causal order."""
    result: list[Suspect] = []
    for slug in sorted({s.cause for s in suspects}, key=lambda slug: order.get(slug, 9999)):
        own = sorted((s for s in suspects if s.cause == slug and s.plans), key=lambda s: -s.strength)
        result += own[:TRIALS_PER_RULE]
    return result


def count_trials(suspects: list[Suspect], order: dict[str, int]) -> int:
    return sum(len(suspect.plans) for suspect in chosen(suspects, order))


def repairs_on_top(
    ranked: list[tuple[Ranked, Suspect]],
    judged: list[Judged],
    trials: list[Trial],
    before: Reading,
    bench: Bench,
    order: dict[str, int],
) -> list[Trial]:
    """What the repairs that gained nothing alone gain once the first cause is repaired: two faults can hide each other.

    Labels of another position leave nothing for a repair of the weights to win, a model without positions nothing for
    its head.
    """
    first = held_repair(ranked, trials, before, bench)
    if first is None or first.reading is None:
        return []
    repaired = _kind(first.plan).repaired(bench, **first.plan.arguments)
    states = {id(item.suspect): status_of(item) for item in judged}
    found = []
    for suspect in chosen(suspects=[item.suspect for item in judged], order=order):
        hidden = states[id(suspect)] in (None, "latent") and "loss" in suspect.measures and not suspect.last_resort
        if suspect.cause == first.suspect.cause or not hidden:
            continue
        plans = tuple(plan for plan in suspect.plans if hasattr(_kind(plan), "repaired"))
        for trial in _run(replace(suspect, plans=plans), repaired, read=repaired_reading):
            if trial.reading is None:
                continue
            change = f"{trial.plan.change}, on top of: {first.plan.change}"
            trial = replace(trial, suspect=suspect, plan=replace(trial.plan, change=change), held=first)
            explained = judge_trials(suspect, [*trials, trial], before, bench).explained
            found.append(replace(trial, counts=explained is not None and explained >= LIKELY))
    return found


def held_repair(
    ranked: list[tuple[Ranked, Suspect]], trials: list[Trial], before: Reading, bench: Bench
) -> Trial | None:
    """The best repair of the first cause, where it lowers the loss and leaves something to explain."""
    if not ranked or ranked[0][0].status != "confirmed" or not math.isfinite(before["loss"]):
        return None
    own = [
        (trial.reading["loss"], index)
        for index, trial in enumerate(trials)
        if trial.suspect is ranked[0][1] and trial.reading is not None and hasattr(_kind(trial.plan), "repaired")
    ]
    if not own:
        return None
    lowest, index = min(own)
    noise = noise_of("loss", before["loss"], bench, of_the_data=False)
    usual = bench.measurements.log.usual_loss if bench.measurements.log else None  # the baseline shares the state
    settled = usual is not None and before["loss"] - lowest >= SETTLED_SHARE * (before["loss"] - usual)
    return trials[index] if before["loss"] - lowest > noise and not settled else None


def _kind(plan: Plan) -> Any:
    return importlib.import_module(f"stability_probe.interventions.{plan.intervention}")


def _run(
    suspect: Suspect,
    bench: Bench,
    advance: Callable[[int], None] = lambda _: None,
    read: Callable[[Any, Bench, Mapping[str, Any]], Reading] = tried,
) -> Iterable[Trial]:
    for plan in suspect.plans:
        kind = _kind(plan)
        try:
            reading, problem = read(kind, bench, plan.arguments), ""
        except CannotRun as reason:
            reading, problem = None, str(reason)
        except ProbeError as failed:  # the model's own code under a change: the report goes on without this repair
            reading, problem = None, f"{failed.problem}: {failed.why}"
        advance(1)
        yield Trial(suspect, plan, kind.OF_THE_DATA, reading, problem)


def readings_before(bench: Bench) -> Reading:
    """Every measure of the incident as it is."""
    m = bench.measurements
    reading = reading_of(bench.trace)
    # A value that only the precision of the run cannot hold is an excess of that precision.
    reduced = m.precisions.get(m.run_precision)
    if reduced is not None and not math.isfinite(reduced.loss):
        reading["nonfinite"] = 1.0
    gaps = [gap.token_gap for name, gap in m.precisions.items() if name.startswith("bf16")]
    if gaps:
        reading["precision_gap"] = max(gaps)
    if m.step_effect is not None:
        reading["step_damage"] = m.step_effect.damage
    if m.step_progress is not None:
        reading["lost_progress"] = m.step_progress.lost
    return reading


def judge_trials(suspect: Suspect, trials: list[Trial], before: Reading, bench: Bench) -> Judged:
    """The best explained share over the suspect's trials and the measures it is judged on."""
    own = [trial for trial in trials if trial.suspect is suspect]
    ran = [(trial, trial.reading) for trial in own if trial.reading is not None]
    records, alone, joint = [], [], []
    for trial, reading in ran:
        for measure, start in _starts(trial, before, bench):
            after, reference = reading[measure], reference_for(measure, trial, trials, before, bench)
            share = explained_share(measure, start, after, reference, bench, trial.of_the_data)
            if share is not None and does_harm(trial, before):
                share = 0.0
            records.append(_record(trial, measure, start, after, reference, share))
            if trial.held is None:
                alone.append(share)
            elif trial.counts and share:
                gained = share_of(start - after, before["loss"], reference)
                joint.append(min(gained, share_of(before["loss"] - after, before["loss"], reference) / 2))
    for trial in (t for t in trials if t.held is not None and t.held.suspect is suspect and t.counts):
        if trial.reading is not None:  # the other repair is worth nothing without this one: half of both is this one's
            after = trial.reading["loss"]
            reference = reference_for("loss", trial, trials, before, bench)
            alone.append(share_of(before["loss"] - after, before["loss"], reference) / 2)
    known = [share for share in alone if share is not None]
    on_top = bool(joint) and max(joint) > max(known, default=0.0)
    untested = "" if records else "; ".join(dict.fromkeys(trial.problem for trial in own if trial.reading is None))
    counted = [trial for trial, _ in ran if trial.counts]
    needed = bool(counted) and all(does_harm(trial, before) for trial in counted)
    return Judged(suspect, max([*known, *joint], default=None), tuple(records), untested, needed, on_top)


def _starts(trial: Trial, before: Reading, bench: Bench) -> Iterator[tuple[Measure, float]]:
    """The measures that a trial is judged on, each as it was without it; on top of another repair, the loss alone."""
    for measure in trial.reading or {}:
        if measure not in trial.suspect.measures or measure not in before:
            continue
        if measure == "nonfinite" and (before[measure] == 0.0 or not shows_in(trial, bench)):
            continue
        if trial.held is None:
            yield measure, before[measure]
        elif trial.held.reading is not None and measure == "loss":
            yield measure, trial.held.reading["loss"]


def shows_in(trial: Trial, bench: Bench) -> bool:
    """Whether the trial can tell that values are finite again: one in fp32 cannot where fp32 always was finite."""
    return trial.plan.intervention == "change_precision" or reading_of(bench.trace)["nonfinite"] > 0.0


def share_of(gain: float, before: float, reference: float | None) -> float:
    """A gain in loss, of the whole excess."""
    if reference is None or not before > reference:
        return 0.0
    return min(1.0, max(0.0, gain / (before - reference)))


def does_harm(trial: Trial, before: Reading) -> bool:
    """Whether a change of the state makes the loss of the same rows dearer than it was."""
    if trial.of_the_data or trial.reading is None or "loss" not in trial.reading:
        return False
    was = (trial.held.reading if trial.held and trial.held.reading else before).get("loss", math.nan)
    now = trial.reading["loss"]
    return math.isfinite(was) and not now <= was + HARM


def _record(
    trial: Trial, measure: Measure, before: float, after: float, reference: float | None, share: float | None
) -> InterventionRecord:
    return InterventionRecord(
        name=trial.plan.intervention.replace("_", " "),
        cause=trial.suspect.cause,
        change=trial.plan.change,
        measure=measure,
        before=before,
        after=after,
        baseline=reference,
        explained=share,
    )


def reference_for(measure: Measure, trial: Trial, trials: list[Trial], before: Reading, bench: Bench) -> float | None:
    """Where the measure should be; None where nothing says."""
    m = bench.measurements
    if measure in ("nonfinite", "lost_progress"):
        return 0.0
    after = trial.reading[measure] if trial.reading is not None else math.nan
    if trial.plan.intervention == "swap_baseline":
        return after  # it is the reference
    if measure == "loss" and trial.of_the_data:
        return healthy_rest(m, suspected_rows(trials)) if rest_is_ordinary(m, after) else usual_loss(m)
    if measure == "loss" and m.log is not None and _above(before["loss"], m.log.usual_loss):
        return m.log.usual_loss
    if measure == "grad_norm" and trial.of_the_data:
        usual = m.baseline_grad_norm
        return usual if usual and math.log(max(after, 1e-30) / usual) > GRAD_NOISE else after
    if measure == "grad_norm" and m.log is not None and _above(before["grad_norm"], m.log.usual_grad_norm, 1.5):
        return m.log.usual_grad_norm
    reached = [
        t.reading[measure]
        for t in trials
        if t.reading is not None and measure in t.reading and (t.held is None or (measure == "loss" and t.counts))
    ]
    if measure == "precision_gap" or (measure == "step_damage" and m.step_effect is not None):
        reached.append(0.0)  # what rounding, or a step, costs where nothing is wrong: no repair sets its own mark
    finite = [value for value in reached if math.isfinite(value)]
    return min(finite) if finite else None


def _above(value: float, usual: float | None, factor: float = 1.0) -> bool:
    return usual is not None and math.isfinite(usual) and not value <= usual * factor


def usual_loss(m: Measurements) -> float | None:
    """What a healthy batch costs on this checkpoint: the baseline's loss, else the log's."""
    return m.baseline_loss if m.baseline_loss is not None else m.log.usual_loss if m.log else None


def rest_is_ordinary(m: Measurements, after: float) -> bool:
    """Whether what is left of the batch costs what healthy text costs, as far as that is known.

    Batches differ in their mixture of text. So the rest of the batch is the reference for the rows that are
    taken out, unless it is itself dearer than the baseline's dearest row (or the log's usual loss allows).
    """
    usual = usual_loss(m)
    if usual is None:
        return True
    spread = m.log.loss_spread if m.log and m.log.loss_spread and m.baseline_loss is None else 0.0
    dearest = max((loss for loss in m.baseline_row_losses if math.isfinite(loss)), default=usual)
    return after <= max(dearest, usual + max(ORDINARY, 6 * spread))


def suspected_rows(trials: list[Trial]) -> set[int]:
    """Rows that any suspect's intervention takes out of the batch."""
    return {int(row) for trial in trials if trial.of_the_data for row in trial.plan.arguments.get("rows", ())}


def healthy_rest(m: Measurements, suspected: set[int]) -> float | None:
    """Mean loss over the targets of the rows that nothing points to; None where there is none."""
    kept = [r for r in m.rows.to_dict("records") if int(r["row"]) not in suspected and math.isfinite(r["loss"])]
    targets = sum(row["valid_targets"] for row in kept)
    if not targets:
        return usual_loss(m)
    centre, spread = _centre_and_spread([row["loss"] for row in kept])
    reach = 3 * spread if len(kept) >= MANY_ROWS else math.inf
    held = [min(max(row["loss"], centre - reach), centre + reach) for row in kept]
    return sum(loss * row["valid_targets"] for loss, row in zip(held, kept, strict=True)) / targets


def _centre_and_spread(values: list[float]) -> tuple[float, float]:
    """Median and robust standard deviation (1.4826 × MAD)."""
    centre = statistics.median(values)
    return centre, 1.4826 * statistics.median(abs(value - centre) for value in values)


def explained_share(
    measure: Measure, before: float, after: float, reference: float | None, bench: Bench, of_the_data: bool
) -> float | None:
    """The share of the excess that is gone; None where there is no excess beyond noise."""
    if measure == "nonfinite":
        return (1.0 if after == 0.0 else 0.0) if before > 0.0 else None
    if reference is None or math.isnan(after):
        return None
    if not math.isfinite(before):
        return 1.0 if math.isfinite(after) else 0.0
    if measure == "grad_norm":
        before, after, reference = (math.log(max(value, 1e-30)) for value in (before, after, reference))
    noise = noise_of(measure, before, bench, of_the_data)
    excess = before - reference
    # An unreasonably low loss is a symptom too, but only where the data are changed: a repair must lower the loss.
    significant = abs(excess) > noise if of_the_data and measure == "loss" else excess > noise
    if not significant:
        return None
    return min(1.0, max(0.0, (before - after) / excess)) if math.isfinite(after) else 0.0


def noise_of(measure: Measure, before: float, bench: Bench, of_the_data: bool) -> float:
    """How far the measure moves on a healthy model without a cause."""
    if measure == "grad_norm":
        return GRAD_NOISE
    if measure == "precision_gap":
        return PRECISION_NOISE
    if measure == "step_damage":
        return DAMAGE_NOISE
    if measure == "lost_progress":
        return PROGRESS_NOISE
    floor = max(LOSS_NOISE, LOSS_NOISE_SHARE * abs(before))
    if not of_the_data:
        return floor
    losses = [loss for loss in bench.measurements.rows["loss"].tolist() if math.isfinite(loss)]
    if len(losses) < MANY_ROWS:
        return floor
    return max(floor, _centre_and_spread(losses)[1] / math.sqrt(len(losses)))


def status_of(item: Judged) -> Status | None:
    """How sure we are of a suspect; None where it is cleared."""
    if item.suspect.decisive:
        return "decisive"
    if item.explained is not None and item.explained >= CONFIRMED:
        return "confirmed"
    if item.explained is not None and item.explained >= LIKELY:
        return "likely"
    if item.untested and item.untested != SETTLED and item.suspect.strength >= TELLING:
        return "likely"
    return "latent" if item.suspect.latent and (item.suspect.exact or not item.needed) else None


def rank(judged: list[Judged], order: dict[str, int]) -> list[tuple[Ranked, Suspect]]:
    """Named causes, the first one first: one entry per rule, by explained share, ties by causal order.

    Where the run's precision is not finite, what makes it so stands before what explains the gradient norm alone: two
    tensors that undo each other change nothing else.
    """
    best: dict[str, tuple[Status, Judged]] = {}
    for item in judged:
        status = status_of(item)
        if status is None:
            continue
        known = best.get(item.suspect.cause)
        if known is None or _weight(status, item) > _weight(*known):
            best[item.suspect.cause] = (status, item)
    broken = any(status == "confirmed" and "nonfinite" in _measures_explained(item) for status, item in best.values())
    entries = sorted(best.values(), key=lambda entry: _sort_key(entry[0], entry[1], order, broken))
    proved = any(status in ("decisive", "confirmed") and not item.suspect.last_resort for status, item in entries)
    kept = [(status, item) for status, item in entries if not (proved and item.suspect.last_resort)]
    return [(_ranked(item, status), item.suspect) for status, item in kept]


_STRENGTH = {"decisive": 4, "confirmed": 3, "likely": 2, "latent": 1, "unconfirmed": 0}


def _weight(status: Status, item: Judged) -> tuple[float, float, float]:
    return (_STRENGTH[status], item.explained or 0.0, item.suspect.strength)


def _measures_explained(item: Judged) -> set[str]:
    return {record.measure for record in item.records if (record.explained or 0.0) >= LIKELY}


def _sort_key(
    status: Status, item: Judged, order: dict[str, int], broken: bool
) -> tuple[bool, int, bool, bool, int, int]:
    # What is certain but, tried, explains nothing of the excess goes behind the cause that does.
    certain = status == "decisive" and item.explained is None
    share = 1.0 if certain else item.explained or 0.0
    band = math.floor((1.0 - share) / TIE + 1e-9)
    strength = 3 if status in ("decisive", "confirmed") else _STRENGTH[status]
    if status == "likely" and item.explained is None and item.suspect.latent:
        strength = _STRENGTH["latent"]  # an untested suspicion is no better founded than a danger that stands higher
    # A statement about the batch never hides a defect, not even a latent one.
    of_the_norm = broken and _measures_explained(item) == {"grad_norm"}
    place = order.get(item.suspect.cause, 9999)
    return (item.suspect.last_resort, -strength, item.on_top, of_the_norm, band, place)


def _ranked(item: Judged, status: Status) -> Ranked:
    suspect = item.suspect
    entry = Ranked(suspect.cause, status, item.explained, suspect.summary, suspect.location, suspect.evidence)
    return replace(entry, why_not_first=ON_TOP) if item.on_top else entry


def verdict_of(
    ranked: list[tuple[Ranked, Suspect]],
    judged: list[Judged],
    rules: tuple[Rule, ...],
    bench: Bench,
    records: list[InterventionRecord],
) -> Verdict:
    """The first of the ranked causes; else `unexplained` where an excess is left, else `none`."""
    entries = [entry for entry, _ in ranked]
    # Where every row is harder, well formed and of ordinary gradient, another text is the likelier reading up to where
    # long runs call it a spike.
    sigmas = SPIKE_SIGMAS if ranked and ranked[0][1].last_resort else LOG_SIGMAS
    is_known = any(e.status in ("decisive", "confirmed", "likely") for e in entries)
    left = "" if is_known else unexplained_excess(bench, sigmas)
    if left and not any(entry.status == "unconfirmed" for entry in entries):
        return _unexplained(left, entries, records)
    if not entries:
        return Verdict("none", None, None, _healthy_summary(bench), healthy_notes=healthy_notes(bench.measurements))
    first, suspect = ranked[0]
    pages = {rule.slug: rule.page for rule in rules}
    remedies = suspect.remedies or (pages[first.cause].remedies if first.cause in pages else ())
    others = tuple(replace(e, why_not_first=e.why_not_first or _why_not_first(e, who, first)) for e, who in ranked[1:])
    second = next((entry for entry in others if entry.why_not_first == ON_TOP), None)
    summary = first.summary
    if second is not None:
        summary += f" With that repaired, a second cause shows, {second.cause}: {second.summary}"
        later = next((page.remedies for slug, page in pages.items() if slug == second.cause), ())
        remedies = (*remedies, *(Remedy(f"Then, for {second.cause}: {r.action}", r.command) for r in later[:1]))
    return Verdict(
        cause=first.cause,
        status=first.status,
        explained=first.explained,
        summary=summary,
        location=first.location,
        ranked=(first, *others),
        remedies=tuple(remedies),
    )


def _why_not_first(entry: Ranked, suspect: Suspect, first: Ranked) -> str:
    if suspect.last_resort:
        return "a statement about the batch: it never stands before a defect"
    if entry.status == "latent":
        return "dangerous, but this batch shows no excess that it would explain"
    if entry.explained is None:
        return "its intervention could not be run"
    if first.explained is not None and entry.explained < first.explained - TIE:
        return f"explains {entry.explained:.0%} of the excess, less than {first.cause}"
    return f"explains as much as {first.cause}, which stands higher in the causal order"


def _unexplained(left: str, entries: list[Ranked], records: list[InterventionRecord]) -> Verdict:
    tried = {record.name: record.explained or 0.0 for record in records}
    told = ", ".join(f"{name} ({share:.0%})" for name, share in sorted(tried.items())) or "no rule had a suspect"
    remedies = (
        Remedy("Do not resume on this checkpoint before the excess is understood: roll back past it."),
        Remedy("Replay an older checkpoint with the same batch; where the excess begins, the cause is near."),
        Remedy("Give a healthy batch and the run's log: with --baseline and --log more can be told apart."),
    )
    summary = f"{left}. No intervention explains half of it; tried: {told}."
    return Verdict("unexplained", None, None, summary, ranked=tuple(entries), remedies=remedies)


def unexplained_excess(bench: Bench, sigmas: float = LOG_SIGMAS) -> str:
    """The excess that is there whatever caused it, in words; empty where there is none.

    Args:
        sigmas: of the logged loss's own scatter, that one batch may stand above it.
    """
    m = bench.measurements
    if bench.trace.valid_targets and not math.isfinite(m.loss):
        return f"The loss is {m.loss} in fp32"
    if m.grad_nonfinite:
        return "The gradient is not finite in fp32"
    usual = m.log.usual_loss if m.log else None
    if usual is not None:
        spread = (m.log.loss_spread if m.log else None) or 0.0
        # A step's mean is over many targets; over a few it differs by two of its standard errors without a cause.
        chance = 2 * TOKEN_SPREAD / math.sqrt(max(bench.trace.valid_targets, 1))
        if m.loss - usual > max(ORDINARY, sigmas * spread, chance):
            return f"The replayed loss, {m.loss:.3f} nats, stands above the log's usual {usual:.3f}"
        # Two batches that were drawn apart scatter by less together: their mean's spread is that over the root of two.
        both = min(m.loss, m.baseline_loss if m.baseline_loss is not None else -math.inf)
        if both - usual > max(2 * ORDINARY, LOG_SIGMAS * spread / math.sqrt(2), chance):
            return (
                f"The replayed loss, {m.loss:.3f} nats, and the baseline's, {m.baseline_loss:.3f}, both stand above "
                f"the log's usual {usual:.3f}"
            )
    if m.baseline_loss is not None and m.loss - m.baseline_loss > _batch_margin(m):
        return f"The replayed loss, {m.loss:.3f} nats, stands above the baseline batch's {m.baseline_loss:.3f}"
    if m.loss > math.log(m.vocab_size) + 0.5:
        return f"The loss, {m.loss:.3f} nats, is worse than guessing (ln V = {math.log(m.vocab_size):.2f})"
    targets = bench.trace.valid_targets
    for name, reference, of_targets in (
        ("log's usual", m.log.usual_grad_norm if m.log else None, FEW_TARGETS),
        ("baseline batch's", m.baseline_grad_norm, bench.healthy[1].valid_targets if bench.healthy else FEW_TARGETS),
    ):
        # Over few targets a gradient is mostly noise, which falls with the square root of their number.
        usual_noise = math.sqrt(max(of_targets / max(targets, 1), 1.0))
        if reference and m.global_grad_norm > 10 * usual_noise * reference:
            return f"The gradient norm, {m.global_grad_norm:.3g}, is over ten times the {name} {reference:.3g}"
    before = readings_before(bench)
    if before.get("precision_gap", 0.0) > 4 * PRECISION_NOISE:
        return f"bf16 moves the loss of a token by {before['precision_gap']:.3f} nats on average"
    if before.get("step_damage", 0.0) > 0.5:
        return f"One optimizer step raises the loss by {before['step_damage']:.3f} nats"
    return ""


def _batch_margin(m: Measurements) -> float:
    """How much dearer than the baseline batch a batch may be without a cause: rows are documents, and differ."""
    samples = [[loss for loss in losses if math.isfinite(loss)] for losses in (m.rows["loss"], m.baseline_row_losses)]
    errors = [statistics.variance(sample) / len(sample) if len(sample) > 1 else ORDINARY**2 for sample in samples]
    return max(FAR, LOG_SIGMAS * math.sqrt(sum(errors)))


def _healthy_summary(bench: Bench) -> str:
    m = bench.measurements
    against = []
    if m.baseline_loss is not None:
        scatter = f" ± {_batch_margin(m):.1f} by the scatter of the rows"
        against.append(f"baseline {m.baseline_loss:.3f}{scatter if m.loss - m.baseline_loss > ORDINARY else ''}")
    if m.log is not None and m.log.usual_loss is not None:
        against.append(f"log {m.log.usual_loss:.3f}")
    beside = f" ({', '.join(against)})" if against else ""
    return (
        f"No excess: loss {m.loss:.3f} nats{beside}, gradient norm {m.global_grad_norm:.3g}, all values finite, "
        "and no repair improves it."
    )


def healthy_notes(m: Measurements) -> tuple[str, ...]:
    """What looks alarming here and is not, with the reason."""
    notes = []
    blocks = m.modules[m.modules["role"] == "block"]
    if len(blocks) and blocks["absmax"].max() > 1000:
        worst = blocks.loc[blocks["absmax"].idxmax()]
        same = int((blocks["channel"] == worst["channel"]).sum())
        notes.append(
            f"Activations of {worst['absmax']:,.0f} in the residual stream: channel {int(worst['channel'])} at "
            f"position {int(worst['position'])}, the same channel in {same} of {len(blocks)} blocks. "
            "Massive activations of a trained model, which it uses as a bias; loss, gradient and bf16 are ordinary."
        )
    sinks = m.heads[(m.heads["entropy"] < 1.0) & (m.heads["max_logit"] < 100.0)]
    if len(sinks):
        notes.append(
            f"{len(sinks)} of {len(m.heads)} attention heads have under 1 nat of entropy with logits of at most "
            f"{sinks['max_logit'].max():.0f}: heads that look at one fixed position, not collapsed ones."
        )
    if abs(m.log_z_mean) > 10:
        gap = next((g.token_gap for n, g in m.precisions.items() if n.startswith("bf16")), None)
        cost = f"; bf16 costs {gap:.3f} nats a token here" if gap is not None else ""
        notes.append(f"Mean log Z is {m.log_z_mean:.1f}: away from 0, yet within what bf16 resolves{cost}.")
    return tuple(notes)


def outcomes_after(outcomes: list[Outcome], verdict: Verdict, tried: set[str]) -> list[Outcome]:
    """The rules' outcomes: suspects that are not named are marked clear, with the reason why."""
    named = {entry.cause for entry in verdict.ranked}

    def why(cause: str) -> str:
        return "cleared by its intervention" if cause in tried else SETTLED

    return [
        replace(outcome, status="clear", reason=f"{why(outcome.rule)}: {outcome.reason}")
        if outcome.status == "found" and outcome.rule not in named
        else outcome
        for outcome in outcomes
    ]
