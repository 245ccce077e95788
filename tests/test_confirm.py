"""Excess, explained share and ranking: what may be said, and how surely."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.confirm import (
    SETTLED,
    Judged,
    Trial,
    explained_share,
    healthy_notes,
    judge_trials,
    outcomes_after,
    rank,
    rest_is_ordinary,
    settles,
    status_of,
    unexplained_excess,
    verdict_of,
)
from stability_probe.judge import Plan, Suspect, load_rules
from stability_probe.measure import LogFacts
from stability_probe.schema import InterventionRecord, Location, Outcome
from tests.rule_tables import measurements_from

RULES = load_rules()
ORDER = {rule.slug: rule.order for rule in RULES}


def bench_of(trace_loss=None, **tables):
    measurements = measurements_from(tables)
    loss = measurements.loss if trace_loss is None else trace_loss
    trace = SimpleNamespace(loss=loss, global_grad_norm=measurements.global_grad_norm, valid_targets=400)
    return SimpleNamespace(measurements=measurements, trace=trace, healthy=None)


def suspect(cause="corrupt-weights", **changes):
    return Suspect(cause, f"{cause} somewhere", Location(), (), **changes)


def trial(who, after, measure="loss", of_the_data=False, **arguments):
    return Trial(who, Plan("replace_elements", arguments, "changed"), of_the_data, {measure: after})


finite = st.floats(0, 20, allow_nan=False)


@given(finite, finite, finite, st.booleans())
def test_a_share_is_a_share_or_nothing(before, after, reference, of_the_data):
    share = explained_share("loss", before, after, reference, bench_of(), of_the_data)
    assert share is None or 0.0 <= share <= 1.0


@given(finite, finite)
def test_reaching_the_reference_explains_everything(before, reference):
    share = explained_share("loss", before, reference, reference, bench_of(), False)
    assert share is None or share == pytest.approx(1.0)
    assert (share is None) == (before - reference <= max(0.02, 0.005 * before))


@given(finite)
def test_a_change_that_changes_nothing_explains_nothing(before):
    assert explained_share("loss", before, before, 0.0, bench_of(), False) in (None, 0.0)


def test_a_repair_that_raises_the_loss_is_no_repair():
    assert explained_share("loss", 3.0, 2.0, 3.5, bench_of(), False) is None
    assert explained_share("loss", 3.0, 3.5, 2.0, bench_of(), False) == 0.0


def test_an_unreasonably_low_loss_is_an_excess_of_the_data_only():
    assert explained_share("loss", 1.4, 2.0, 2.0, bench_of(), True) == 1.0
    assert explained_share("loss", 1.4, 2.0, 2.0, bench_of(), False) is None


def test_nonfinite_values_are_explained_by_what_makes_them_finite():
    assert explained_share("nonfinite", 1.0, 0.0, 0.0, bench_of(), False) == 1.0
    assert explained_share("nonfinite", 1.0, 1.0, 0.0, bench_of(), False) == 0.0
    assert explained_share("nonfinite", 0.0, 0.0, 0.0, bench_of(), False) is None
    assert explained_share("loss", math.nan, 3.0, 3.0, bench_of(), False) == 1.0
    assert explained_share("loss", math.inf, math.nan, 3.0, bench_of(), False) is None


def test_without_any_reference_the_best_repair_is_the_reference():
    good, idle = suspect("corrupt-weights"), suspect("attention-logit-growth")
    trials = [trial(good, 2.6), trial(idle, 7.9)]
    bench = bench_of(loss=8.1)
    assert judge_trials(good, trials, {"loss": 8.1}, bench).explained == pytest.approx(1.0)
    assert judge_trials(idle, trials, {"loss": 8.1}, bench).explained == pytest.approx(0.2 / 5.5)


@pytest.mark.parametrize(("after", "explained"), [(84.87, 0.0065), (0.5, 0.994)])
def test_a_precision_gap_is_held_against_none(after, explained):
    """A table row of the tied head × 1000: recentring removes next to nothing of the 85 nats that bf16 costs."""
    who = suspect("logit-drift", measures=("precision_gap",))
    trials = [trial(who, after, "precision_gap")]
    judged = judge_trials(who, trials, {"precision_gap": 85.42, "loss": 21616.0}, bench_of())
    assert judged.explained == pytest.approx(explained, abs=1e-3)


def test_swapping_in_the_baseline_is_held_against_the_baseline():
    who = suspect("tokenizer-mismatch")
    swap = Trial(who, Plan("swap_baseline"), True, {"loss": 2.5})
    bench = bench_of(loss=9.0, baseline_loss=2.5, baseline_row_losses=(2.4, 2.6))
    assert judge_trials(who, [swap], {"loss": 9.0}, bench).explained == 1.0


def test_the_logs_usual_loss_is_the_reference_of_a_state():
    who = suspect()
    bench = bench_of(loss=4.4, log={"usual_loss": 3.4, "step": 10})
    assert judge_trials(who, [trial(who, 3.9)], {"loss": 4.4}, bench).explained == pytest.approx(0.5)


def test_no_repair_improves_a_healthy_model_so_nothing_is_named():
    names = ("corrupt-weights", "attention-logit-growth", "logit-drift")
    suspects = [suspect(name) for name in names]
    trials = [trial(who, 2.625 + gain) for who, gain in zip(suspects, (0.01, -0.005, 1.5), strict=True)]
    bench = bench_of(loss=2.625)
    judged = [judge_trials(who, trials, {"loss": 2.625}, bench) for who in suspects]
    assert all(item.explained is None for item in judged)
    verdict = verdict_of(rank(judged, ORDER), judged, RULES, bench, [])
    assert verdict.cause == "none"


def test_ties_go_to_the_cause_that_stands_higher():
    judged = [Judged(suspect("learning-rate-too-high"), 1.0, ()), Judged(suspect("stale-second-moment"), 0.97, ())]
    assert [entry.cause for entry, _ in rank(judged, ORDER)] == ["stale-second-moment", "learning-rate-too-high"]


def test_a_larger_share_goes_before_a_higher_cause():
    judged = [Judged(suspect("corrupt-weights"), 0.55, ()), Judged(suspect("repeated-tokens"), 0.98, ())]
    assert [entry.cause for entry, _ in rank(judged, ORDER)] == ["repeated-tokens", "corrupt-weights"]


def test_what_is_certain_but_explains_nothing_goes_behind_the_cause_that_does():
    empty_row = Judged(suspect("no-valid-labels", decisive=True), 0.0, ())
    garbage = Judged(suspect("garbage-tokens"), 0.98, ())
    assert [entry.cause for entry, _ in rank([empty_row, garbage], ORDER)] == ["garbage-tokens", "no-valid-labels"]
    untried = Judged(suspect("no-valid-labels", decisive=True), None, ())
    assert rank([untried, garbage], ORDER)[0][0].cause == "no-valid-labels"


def test_a_confirmed_cause_outranks_a_latent_one_and_a_latent_one_outranks_none():
    latent = Judged(suspect("attention-logit-growth", latent=True), None, ())
    confirmed = Judged(suspect("repeated-tokens"), 0.9, ())
    assert [entry.status for entry, _ in rank([latent, confirmed], ORDER)] == ["confirmed", "latent"]
    assert rank([latent], ORDER)[0][0].status == "latent"


def test_a_statement_about_the_batch_counts_only_where_nothing_else_explains():
    shift = Judged(suspect("data-shift", last_resort=True), 1.0, ())
    rows = Judged(suspect("repeated-tokens"), 0.6, ())
    assert [entry.cause for entry, _ in rank([shift, rows], ORDER)] == ["repeated-tokens"]
    assert [entry.cause for entry, _ in rank([shift], ORDER)] == ["data-shift"]
    head = Judged(suspect("attention-logit-growth", latent=True), None, ())
    assert [entry.cause for entry, _ in rank([shift, head], ORDER)] == ["attention-logit-growth", "data-shift"]


@pytest.mark.parametrize(
    ("explained", "changes", "status"),
    [
        (0.5, {}, "confirmed"),
        (0.3, {}, "likely"),
        (0.2, {}, None),
        (None, {}, None),
        (None, {"latent": True}, "latent"),
        (0.1, {"latent": True}, "latent"),
        (0.0, {"decisive": True}, "decisive"),
    ],
)
def test_status(explained, changes, status):
    assert status_of(Judged(suspect(**changes), explained, ())) == status


def test_an_intervention_that_cannot_run_leaves_its_suspect_likely():
    assert status_of(Judged(suspect(), None, (), untested="no row would be left")) == "likely"
    assert status_of(Judged(suspect(strength=0.3), None, (), untested="no row would be left")) is None


def test_the_rest_of_the_batch_is_no_reference_where_it_is_dear_itself():
    measured = measurements_from({"baseline_loss": 2.5, "baseline_row_losses": (2.2, 2.8)})
    assert rest_is_ordinary(measured, 2.9)
    assert not rest_is_ordinary(measured, 4.5)


def test_an_excess_that_nothing_explains_is_said():
    bench = bench_of(loss=6.0, trace_loss=6.0, log={"usual_loss": 3.4, "step": 10, "loss_spread": 0.05})
    assert "above the log's usual" in unexplained_excess(bench)
    assert verdict_of([], [], RULES, bench, []).cause == "unexplained"


def test_few_targets_have_large_gradients():
    """Healthy tiny Llama: 23.1 over 8 targets, 1.3 is usual over 256."""
    bench = bench_of(global_grad_norm=23.1, log=dataclasses.asdict(LogFacts(step=3, usual_grad_norm=1.32)))
    assert "over ten times" in unexplained_excess(bench)
    bench.trace.valid_targets = 8
    assert unexplained_excess(bench) == ""


def test_the_mean_of_few_targets_may_lie_far_from_the_logs():
    """Healthy tiny Gemma-2: 5.7 nats over 5 targets, 4.3 is usual."""
    bench = bench_of(loss=5.7, log=dataclasses.asdict(LogFacts(step=3, usual_loss=4.3, loss_spread=0.1)))
    assert "stands above the log's" in unexplained_excess(bench)
    bench.trace.valid_targets = 5
    assert unexplained_excess(bench) == ""


def test_a_latent_danger_does_not_hide_an_unexplained_excess():
    bench = bench_of(loss=6.0, trace_loss=6.0, log={"usual_loss": 3.4, "step": 10, "loss_spread": 0.05})
    judged = [Judged(suspect("attention-logit-growth", latent=True), None, ())]
    verdict = verdict_of(rank(judged, ORDER), judged, RULES, bench, [])
    assert verdict.cause == "unexplained"
    assert verdict.ranked[0].cause == "attention-logit-growth"


@pytest.mark.parametrize(("sigmas", "cause"), [(5, "data-shift"), (20, "unexplained")])
def test_harder_text_is_a_statement_up_to_where_a_run_would_call_it_a_spike(sigmas, cause):
    """Scatter of the log 0.15 nats: five of it is text of another kind, twenty is not known to be."""
    usual = 3.4
    loss = usual + sigmas * 0.15
    bench = bench_of(loss=loss, trace_loss=loss, log={"usual_loss": usual, "step": 10, "loss_spread": 0.15})
    judged = [Judged(suspect("data-shift", latent=True, last_resort=True), None, ())]
    assert verdict_of(rank(judged, ORDER), judged, RULES, bench, []).cause == cause
    judged.append(Judged(suspect("attention-logit-growth", latent=True), None, ()))
    assert verdict_of(rank(judged, ORDER), judged, RULES, bench, []).cause == "unexplained"


def test_what_changes_the_gradient_alone_does_not_stand_before_what_makes_numbers_finite_again():
    """A tensor times 2e6 and the next one divided by it: the loss is as it was, and fp16 overflows between them."""
    tensor, overflow = suspect("corrupt-weights"), suspect("fp16-overflow")

    def judged(who, *measures):
        records = (InterventionRecord("", who.cause, "", measure, 1.0, 0.0, 0.0, 1.0) for measure in measures)
        return Judged(who, 1.0, tuple(records))

    by_norm, finite_again = judged(tensor, "grad_norm"), judged(overflow, "nonfinite")
    assert [entry.cause for entry, _ in rank([by_norm, finite_again], ORDER)] == ["fp16-overflow", "corrupt-weights"]
    by_loss = judged(tensor, "grad_norm", "loss")
    assert [entry.cause for entry, _ in rank([by_loss, finite_again], ORDER)] == ["corrupt-weights", "fp16-overflow"]


def test_a_healthy_batch_leaves_nothing_to_explain():
    assert unexplained_excess(bench_of()) == ""


def test_a_nan_in_fp32_is_an_excess():
    assert "nan" in unexplained_excess(bench_of(loss=math.nan, trace_loss=math.nan))


def test_alarming_numbers_of_a_healthy_model_are_told_with_their_reason():
    measured = measurements_from({})
    modules = measured.modules.copy()
    modules.loc[modules["role"] == "block", "absmax"] = 23_281.0
    notes = healthy_notes(dataclasses.replace(measured, modules=modules, log_z_mean=27.6))
    assert any("23,281" in note for note in notes)
    assert any("27.6" in note for note in notes)


def test_cleared_suspects_are_not_reported_as_found():
    outcomes = [
        Outcome("logit-drift", "found", "log Z is far away"),
        Outcome("fp16-overflow", "clear", "no sign of it"),
    ]
    bench = bench_of()
    after = outcomes_after(outcomes, verdict_of([], [], RULES, bench, []), {"logit-drift"})
    assert [outcome.status for outcome in after] == ["clear", "clear"]
    assert after[0].reason.startswith("cleared by its intervention")


def test_lower_causes_are_not_tried_once_the_loss_is_usual_again():
    bench = bench_of(loss=5.0, baseline_loss=2.5, baseline_row_losses=(2.4, 2.6))
    who = suspect("repeated-tokens")
    assert settles([trial(who, 2.6)], {"loss": 5.0}, bench)
    assert not settles([trial(who, 3.5)], {"loss": 5.0}, bench)
    assert not settles([trial(who, 2.6)], {"loss": 5.0}, bench_of(loss=5.0))
    swap = Trial(who, Plan("swap_baseline"), True, {"loss": 2.5})
    assert not settles([swap], {"loss": 5.0}, bench)
    assert status_of(Judged(suspect(), None, (), untested=SETTLED)) is None


def test_log_facts_are_optional():
    assert unexplained_excess(bench_of(log=dataclasses.asdict(LogFacts(step=3)))) == ""


# --- repairs that do harm, and excesses over two references ---------------------------------------


def judged_by(after_loss, measure, after, before_loss=4.7):
    who = suspect(measures=("loss", "grad_norm", "nonfinite"))
    reading = {"loss": after_loss, measure: after}
    made = Trial(who, Plan("rescale_tensor", {}, "rescaled"), False, reading)
    before = {"loss": before_loss, "grad_norm": 50.0, "nonfinite": 1.0}
    bench = bench_of(math.nan if measure == "nonfinite" else before_loss, loss=before_loss)
    return judge_trials(who, [made], before, bench).explained


def test_where_only_the_runs_precision_overflows_a_trial_in_fp32_proves_nothing():
    """fp32 is finite before and after any repair; what shows is a replay in that precision."""
    tensor, overflow = suspect("corrupt-weights"), suspect("fp16-overflow")
    trials = [
        Trial(tensor, Plan("rescale_tensor"), False, {"loss": 4.7, "nonfinite": 0.0}),
        Trial(overflow, Plan("change_precision"), False, {"loss": 4.7, "nonfinite": 0.0}),
    ]
    before = {"loss": 4.7, "nonfinite": 1.0}
    assert judge_trials(tensor, trials, before, bench_of(4.7, loss=4.7)).explained is None
    assert judge_trials(overflow, trials, before, bench_of(4.7, loss=4.7)).explained == 1.0


@pytest.mark.parametrize(("measure", "after"), [("grad_norm", 0.8), ("nonfinite", 0.0)])
def test_a_repair_that_costs_nats_explains_nothing_else_either(measure, after):
    """A tensor that is large and in use: taken away, fp16 is finite and the gradient small, and the model is worse."""
    assert judged_by(5.6, measure, after) == 0.0
    assert judged_by(4.75, measure, after) == 1.0  # near miss: what a needless clip may cost


def test_dropping_rows_may_leave_dearer_ones():
    who = suspect("repeated-tokens", measures=("loss", "grad_norm"))
    made = Trial(who, Plan("drop_rows", {"rows": [1]}, "dropped"), True, {"loss": 3.5, "grad_norm": 1.0})
    assert judge_trials(who, [made], {"loss": 2.9, "grad_norm": 9.0}, bench_of(loss=2.9)).explained == 1.0


def test_an_untested_suspicion_does_not_stand_before_a_danger_higher_up():
    untested = Judged(suspect("attention-logit-growth", latent=True), None, (), "the layout is not known")
    danger = Judged(suspect("corrupt-weights", latent=True), None, ())
    assert [entry.cause for entry, _ in rank([untested, danger], ORDER)] == [
        "corrupt-weights",
        "attention-logit-growth",
    ]
    alone = Judged(suspect("attention-logit-growth"), None, (), "the layout is not known")
    assert rank([alone, danger], ORDER)[0][0].cause == "attention-logit-growth"


def logged(usual, spread):
    return dataclasses.asdict(LogFacts(step=3, usual_loss=usual, loss_spread=spread))


def test_two_batches_above_a_log_that_scatters_are_an_excess():
    both = bench_of(loss=5.9, baseline_loss=5.8, log=logged(4.1, 0.5))
    assert "both stand above" in unexplained_excess(both)
    one = bench_of(loss=5.9, baseline_loss=4.6, log=logged(4.1, 0.5))
    assert unexplained_excess(one) == ""  # near miss: a hard batch on a checkpoint that is as it was
    other_text = bench_of(loss=4.9, baseline_loss=4.9, log=logged(4.1, 0.02))
    assert "above the log's" in unexplained_excess(other_text)


def test_a_batch_far_above_the_baseline_is_an_excess():
    rows = [{"row": row, "loss": 6.5} for row in range(4)]
    known = {"baseline_loss": 4.7, "baseline_row_losses": (4.5, 4.6, 4.8, 4.9)}
    assert "baseline batch's" in unexplained_excess(bench_of(loss=6.5, rows=rows, **known))
    near = [{"row": row, "loss": 5.9} for row in range(4)]
    assert unexplained_excess(bench_of(loss=5.9, rows=near, **known)) == ""
    uneven = [{"row": row, "loss": loss} for row, loss in enumerate((3.0, 5.0, 7.5, 9.5))]
    assert unexplained_excess(bench_of(loss=6.25, rows=uneven, **known)) == ""  # four rows that scatter by nats


def test_an_odd_weight_that_the_model_needs_is_no_danger():
    who = suspect(latent=True)

    def status(after_loss):
        made = Trial(who, Plan("replace_elements", {}, "replaced"), False, {"loss": after_loss})
        return status_of(judge_trials(who, [made], {"loss": 3.4}, bench_of()))

    assert status(4.6) is None  # a super weight: without it the model is worse by a nat
    assert status(3.42) == "latent"  # a flipped bit that this batch does not use


@given(st.floats(5, 20), st.floats(0.01, 0.99), st.floats(1, 3), st.booleans())
def test_two_repairs_that_need_each_other_share_the_excess(before, share_alone, after, logged):
    """The first, without which the second gains nothing, has at least half of what both gain, and stands first."""
    first, second = suspect("softcap-mismatch"), suspect("position-encoding")  # the second is higher in the catalogue
    between = before - share_alone * (before - after)
    held = trial(first, between)
    trials = [held, trial(second, before + 0.05), dataclasses.replace(trial(second, after), held=held)]
    log = {"step": 400, "usual_loss": 0.5 * after} if logged else None
    bench = bench_of(loss=before, **({"log": log} if log else {}))
    one, two = (judge_trials(who, trials, {"loss": before}, bench) for who in (first, second))
    both = (before - after) / (before - (0.5 * after if logged else after))
    assert one.explained == pytest.approx(both * max(share_alone, 0.5))
    if between - after > 0.02 + 0.005 * between:
        assert one.explained + two.explained == pytest.approx(both)
        assert two.records[-1].before == between  # each record's own share is that of what was left to explain
    named = [entry.cause for entry, _ in rank([two, one], ORDER)]
    assert named[:1] == ["softcap-mismatch"] or one.explained < 0.25


def test_what_gains_too_little_on_top_is_recorded_and_no_reference():
    first, second = suspect("position-encoding"), suspect("softcap-mismatch")
    held = trial(first, 3.0)
    little = dataclasses.replace(trial(second, 2.9), held=held, counts=False)
    judged = judge_trials(second, [held, little], {"loss": 5.0}, bench_of(loss=5.0))
    assert judged.explained is None and judged.records[-1].after == 2.9
    assert judge_trials(first, [held, little], {"loss": 5.0}, bench_of(loss=5.0)).explained == 1.0


def test_a_repair_on_top_that_makes_the_loss_dearer_explains_nothing():
    first, second = suspect("position-encoding"), suspect("softcap-mismatch")
    held = dataclasses.replace(trial(first, 3.0), reading={"loss": 3.0, "grad_norm": 50.0})
    worse = dataclasses.replace(trial(second, 3.2), held=held, reading={"loss": 3.2, "grad_norm": 1.0})
    before = {"loss": 5.0, "grad_norm": 60.0}
    assert judge_trials(second, [held, worse], before, bench_of(loss=5.0)).explained is None
