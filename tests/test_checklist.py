"""The six steps: every box answered, and answered otherwise when the facts are otherwise."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.checklist import ChecklistFacts, answer, facts_from, written_down
from stability_probe.measure import LogFacts, PrecisionGap
from stability_probe.schema import Location, Remedy, Verdict

NONE = Verdict("none", None, None, "healthy")
HEALTHY_LOG = LogFacts(421, 3.42, 0.03, 0.43, 3.44, 0.45, 2.9e-4, 3e-4, 100)
HEALTHY = {
    "verdict": NONE,
    "loss": 3.44,
    "grad_norm": 0.44,
    "n_rows": 8,
    "step": 421,
    "checkpoint_step": 420,
    "log": HEALTHY_LOG,
    "baseline_loss": 3.4,
    "baseline_grad_norm": 0.42,
    "layer_grad_norms": ((0, 0.2), (1, 0.1), (2, 0.1)),
    "hottest_head": (1, 2, 14.0),
    "precisions": (("bf16", PrecisionGap(3.441, 0.004, 0.44, 0)),),
    "lr": 3e-4,
    "damage": -0.01,
    "has_optimizer": True,
    "source": "shard c4-00012",
    "run_precision": "bf16",
}
SPIKE_LOG = LogFacts(
    421, 3.42, 0.03, 0.43, 7.9, 31.0, 2.9e-4, 3e-4, 100, first_step=1, last_step=430, spike_steps=(421,)
)


def boxes(**changes):
    return answer(ChecklistFacts(**{**HEALTHY, **changes}))


def box(text, **changes):
    (found,) = [box for box in boxes(**changes) if text in box.item]
    return found


def verdict(cause, status="confirmed", explained=0.97, **more):
    return Verdict(cause, status, explained, "", **more)


def test_a_healthy_run_fails_nothing_and_leaves_only_what_no_file_tells():
    unknown = {box.item for box in boxes() if box.status == "unknown" and box.applies}
    assert not [box for box in boxes() if box.status == "fail"]
    assert unknown == {
        "The incident is written down: what failed, why, what fixed it",
        "Every rank tells the same, not one shard alone",
        "The loop skips a batch whose gradient norm jumps",
        "Attention logits and log Z are kept from growing",
    }
    assert {box.item: box.measured for box in boxes() if not box.applies} == {
        "The checkpoint is from before the spike": "the log has no spike at step 421",
        "A fix is known": "nothing was found to fix",
        "500 steps watched after the restart before alerts go back to normal": "no restart is asked for",
        "The token audit would have stopped this batch": "nothing to stop",
    }


def test_six_steps_in_order_and_each_box_once():
    steps = [box.step for box in boxes()]
    assert steps == sorted(steps) and set(steps) == {1, 2, 3, 4, 5, 6}
    assert len({box.item for box in boxes()}) == len(steps) == 25


FLOATS = st.one_of(st.none(), st.floats())


@given(
    cause=st.sampled_from(
        ["none", "unexplained", "not-reproduced", "repeated-tokens", "logit-drift", "corrupt-weights", "new-cause"]
    ),
    status=st.sampled_from([None, "decisive", "confirmed", "likely", "latent", "unconfirmed"]),
    explained=st.one_of(st.none(), st.floats(0, 1)),
    loss=st.floats(),
    grad_norm=st.floats(min_value=0),
    usual_loss=FLOATS,
    usual_grad=FLOATS,
    logged=FLOATS,
    lr=FLOATS,
    damage=FLOATS,
    step=st.one_of(st.none(), st.integers(0, 500)),
    gap=st.floats(min_value=0),
    layers=st.lists(st.floats(min_value=0)),
)
def test_every_box_is_answered_whatever_the_facts(
    cause, status, explained, loss, grad_norm, usual_loss, usual_grad, logged, lr, damage, step, gap, layers
):
    facts = ChecklistFacts(
        verdict(cause, status, explained),
        loss,
        grad_norm,
        4,
        step=step,
        checkpoint_step=step,
        lr=lr,
        damage=damage,
        log=LogFacts(step, usual_loss, None, usual_grad, logged, usual_grad, lr, lr, step),
        layer_grad_norms=tuple(enumerate(layers)),
        precisions=(("bf16", PrecisionGap(loss, gap, grad_norm, 0)),),
    )
    for answered in answer(facts):
        assert answered.status in ("pass", "fail", "unknown")
        assert answered.status == "unknown" or not answered.needs, answered
        assert answered.measured or answered.needs
        assert answered.applies == (answered.status != "unknown" or bool(answered.needs))


def test_nothing_but_a_replay_says_what_to_supply():
    bare = answer(ChecklistFacts(NONE, 3.4, 0.4, 8))
    needs = " ".join(box.needs for box in bare)
    for option in ("--log", "--baseline", "--step", "--precisions", "--lr", "--out", '"source"'):
        assert option in needs
    assert not [box for box in bare if box.status == "fail"]


# Each change of one fact turns its box from pass to fail.
@pytest.mark.parametrize(
    ("item", "changes"),
    [
        ("The log shows", {"log": LogFacts(421, 3.42, 0.03, 0.43, 7.9, 0.45)}),
        ("The log shows", {"log": LogFacts(421, 3.42, 0.03, 0.43, 3.43, 31.0)}),
        ("The log shows", {"log": LogFacts(421, 3.42, 0.03, 0.43, math.nan, 0.4)}),
        ("The log shows", {"log": LogFacts(421, 3.42, 0.03, 0.43, 3.43, math.nan)}),
        ("No NaN or Inf", {"log": LogFacts(421, 3.42, nonfinite_steps=(421,))}),
        ("Gradient norm of the batch", {"grad_norm": 2.2}),
        ("Gradient norm of the batch", {"grad_norm": math.nan}),
        ("gradient norm ordinary", {"loss": 5.5}),
        ("an oversized update", {"loss": 5.5, "grad_norm": 31.0}),
        ("not finite", {"grad_norm": math.inf}),
        ("near zero", {"grad_norm": 1e-7}),
        ("near zero", {"grad_norm": 1e-4}),
        ("end of warm-up", {"loss": 5.5, "step": 120}),
        ("replayed on the exact batch", {"verdict": verdict("not-reproduced")}),
        ("No layer", {"layer_grad_norms": ((0, 0.1), (1, 0.1), (2, 1.01))}),
        ("No layer", {"layer_grad_norms": ((0, 0.1), (1, math.nan), (2, 0.1))}),
        ("attention logits stay", {"hottest_head": (17, 2, 379.0)}),
        ("audit finds nothing", {"flagged": ((3, ("repeated-tokens",)),)}),
        ("precision agree", {"precisions": (("bf16", PrecisionGap(3.9, 0.11, 0.4, 0)),)}),
        (
            "precision agree",
            {
                "precisions": (
                    ("bf16", PrecisionGap(3.4, 0.01, 0.4, 0)),
                    ("fp16", PrecisionGap(math.nan, math.nan, 1, 9)),
                ),
                "run_precision": "fp16",
            },
        ),
        ("replayed on the exact batch", {"log": LogFacts(421, 3.42, 0.03, 0.43, 9.1, 0.45)}),
        ("replayed on the exact batch", {"log": LogFacts(421, 3.42, 0.03, 0.43, math.nan, 0.45)}),
        ("learning rate fits", {"damage": 0.4}),
        ("learning rate fits", {"verdict": verdict("learning-rate-too-high")}),
        ("sound enough", {"verdict": verdict("corrupt-weights")}),
        ("sound enough", {"verdict": verdict("repeated-tokens"), "baseline_loss": 4.5}),
        ("sound enough", {"verdict": verdict("repeated-tokens"), "baseline_loss": math.nan}),
    ],
)
def test_a_bad_fact_fails_its_box(item, changes):
    assert box(item).status == "pass"
    assert box(item, **changes).status == "fail"


# These boxes ask nothing of a healthy run, so both answers are given.
CAUGHT = {"verdict": verdict("repeated-tokens"), "flagged": ((3, ("repeated-tokens",)),)}


@pytest.mark.parametrize(
    ("item", "good", "bad"),
    [
        ("before the spike", {"log": SPIKE_LOG}, {"log": SPIKE_LOG, "checkpoint_step": 422}),
        (
            "before the spike",
            {"log": None, "verdict": verdict("repeated-tokens")},
            {"log": None, "verdict": verdict("repeated-tokens"), "checkpoint_step": 422},
        ),
        ("A fix is known", CAUGHT, {"verdict": verdict("unexplained", None, 0.31)}),
        ("A fix is known", CAUGHT, {"verdict": verdict("garbage-tokens", "likely", 0.31)}),
        ("would have stopped", CAUGHT, {"verdict": verdict("repeated-tokens")}),
        ("kept from growing", {"qk_norm": True}, {"hottest_head": (17, 2, 379.0)}),
        ("kept from growing", {"qk_norm": True}, {"verdict": verdict("logit-drift"), "qk_norm": True}),
    ],
)
def test_both_answers_of_a_box(item, good, bad):
    assert box(item, **good).status == "pass"
    assert box(item, **bad).status == "fail"


@pytest.mark.parametrize(
    ("item", "changes", "needs"),
    [
        ("log agrees", {"log": None}, "--log"),
        ("log agrees", {"log": LogFacts(5000, 3.42, first_step=1, last_step=430)}, "steps 1–430"),
        ("log agrees", {"log": LogFacts(None, 3.42, first_step=1, last_step=430), "step": None}, "--step"),
        ("The log shows", {"log": LogFacts(421, 3.42, first_step=1, last_step=430)}, "steps 1–430"),
        ("The log shows", {"log": LogFacts(421, logged_loss=3.4)}, "begins some steps before"),
        # The spike of the log is at another step than the batch's.
        ("before the spike", {"step": 400, "log": LogFacts(400, 3.42, 0.03, 0.4, 3.4, spike_steps=(999,))}, "--step"),
        ("before the spike", {"step": 5000, "log": LogFacts(5000, 3.42, last_step=430, first_step=1)}, "steps 1–430"),
        ("before the spike", {"log": SPIKE_LOG, "checkpoint_step": None}, "stores its step"),
        ("before the spike", {"log": None, "step": None}, "--step"),
        ("precision agree", {"run_precision": None}, "what the run trained in"),
        ("precision agree", {"run_precision": "fp16"}, "--precisions"),
        ("sound enough", {"log": None, "baseline_loss": None}, "--baseline"),
        ("kept from growing", {}, "z-loss"),
        (
            "A fix is known",
            {"verdict": verdict("not-reproduced", "decisive", remedies=(Remedy("Look."),))},
            "the cause",
        ),
        ("would have stopped", {"verdict": verdict("nondeterministic-replay", "decisive")}, "a cause"),
    ],
)
def test_a_tick_is_earned(item, changes, needs):
    found = box(item, **changes)
    assert found.status == "unknown" and needs in found.needs


def test_the_step_of_the_logs_spike_is_told():
    log = LogFacts(400, 3.42, 0.03, 0.4, 3.4, spike_steps=(7, 999))
    assert box("before the spike", step=400, log=log).measured == (
        "the log has no spike at step 400; the log's spikes: step 7, 999"
    )


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        ("precision agree", {"run_precision": "fp32"}),
        ("would have stopped", {"verdict": verdict("corrupt-weights")}),
        ("before the spike", {"log": None}),
    ],
)
def test_a_question_that_does_not_arise_is_neither_ticked_nor_open(item, changes):
    found = box(item, **changes)
    assert found.status == "unknown" and not found.applies and found.measured


@pytest.mark.parametrize(
    ("item", "changes"),
    [
        ("log agrees", {"log": LogFacts(421, 3.42, 0.03, 0.43, 3.9, 0.45)}),
        (
            "log agrees",
            {
                "log": LogFacts(421, 3.42, 0.03, 0.43, math.nan, 0.45),
                "precisions": (("fp16", PrecisionGap(math.nan, math.nan, 1, 9)),),
            },
        ),
        (
            "precision agree",
            {
                "precisions": (
                    ("bf16", PrecisionGap(3.4, 0.01, 0.4, 0)),
                    ("fp16", PrecisionGap(math.nan, math.nan, 1, 9)),
                )
            },
        ),
        ("gradient norm ordinary", {"loss": 3.59}),  # 5.7 sigma
        ("Gradient norm of the batch", {"grad_norm": 2.1}),  # 4.9 times
        ("end of warm-up", {"step": 120}),  # at the peak, and no spike
        ("end of warm-up", {"loss": 5.5, "step": 151}),  # a spike, past the window
        ("No layer", {"layer_grad_norms": ((0, 0.1), (1, 0.1), (2, 0.99))}),
        ("attention logits stay", {"hottest_head": (0, 0, 100.0)}),
        ("kept from growing", {"hottest_head": (17, 2, 379.0), "qk_norm": True}),
        ("before the spike", {"log": SPIKE_LOG, "checkpoint_step": 421}),
        ("sound enough", {"verdict": verdict("repeated-tokens")}),
        ("would have stopped", {"verdict": verdict("repeated-tokens"), "flagged": ((3, ("repeated-tokens",)),)}),
        (
            "A fix is known",
            {"verdict": verdict("nonfinite-weights", "decisive", None, remedies=(Remedy("Roll back."),))},
        ),
    ],
)
def test_a_near_miss_passes(item, changes):
    assert box(item, **changes).status == "pass"


def test_categories_of_a_spike_are_told_apart():
    up, jump = {"loss": 5.5}, {"loss": 5.5, "grad_norm": 31.0}
    assert [box("ordinary", **case).status for case in (up, jump)] == ["fail", "pass"]
    assert [box("oversized", **case).status for case in (up, jump)] == ["pass", "fail"]


def test_the_log_outranks_the_baseline_as_what_is_usual():
    assert "usual 0.43" in box("Gradient norm of the batch").measured
    assert "usual 0.42" in box("Gradient norm of the batch", log=None).measured


def test_rows_of_the_cause_are_counted():
    found = verdict("repeated-tokens", location=Location(rows=(3,)))
    assert box("Every rank", verdict=found).measured == "in this batch the cause sits in 1 of 8 rows"


class Frame(list):
    def to_dict(self, how):
        assert how == "records"
        return list(self)


def test_facts_from_measurements():
    measurements = SimpleNamespace(
        loss=3.4,
        global_grad_norm=0.5,
        log=HEALTHY_LOG,
        baseline_loss=None,
        baseline_grad_norm=None,
        rows=Frame([{"row": 0, "flags": []}, {"row": 1, "flags": ["garbage-tokens"]}]),
        heads=Frame(
            [
                {"layer": 0, "head": 0, "max_logit": math.nan},
                {"layer": 2, "head": 1, "max_logit": 9.0},
                {"layer": 0, "head": 1, "max_logit": 3.0},
            ]
        ),
        parameters=Frame(
            [
                {"layer": -1, "grad_norm": 9.0},
                {"layer": 0, "grad_norm": 3.0},
                {"layer": 1, "grad_norm": 1.0},
                {"layer": 0, "grad_norm": 4.0},
            ]
        ),
        precisions={"bf16": PrecisionGap(3.4, 0.01, 0.5, 0)},
        step_effect=SimpleNamespace(damage=0.2),
        optimizer={"kind": "adamw"},
        qk_norm=False,
        attention_softcap=None,
        log_z_mean=5.0,
    )
    facts = facts_from(measurements, NONE, checkpoint_step=420, source={"shard": "a", "documents": [1]})
    assert facts.hottest_head == (2, 1, 9.0)
    assert facts.layer_grad_norms == ((0, 5.0), (1, 1.0))
    assert facts.flagged == ((1, ("garbage-tokens",)),)
    assert (facts.step, facts.lr, facts.damage, facts.n_rows) == (421, 2.9e-4, 0.2, 2)
    assert facts.source == "shard a, documents [1]"
    assert len(answer(facts)) == 25


def test_no_heads_and_no_layers_are_unknown_not_wrong():
    for item, change in (("attention logits stay", {"hottest_head": None}), ("No layer", {"layer_grad_norms": ()})):
        assert box(item, **change).status == "unknown"


def test_a_report_file_writes_the_incident_down():
    before = boxes()
    after = written_down(before, ["incident.md", "run.json"])
    (changed,) = [box for old, box in zip(before, after, strict=True) if old != box]
    assert (changed.status, changed.measured, changed.needs) == ("pass", "incident.md, run.json", "")
    assert written_down(before, []) == before
