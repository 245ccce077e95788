"""Run logs: names, values, segments, and damage."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.errors import ProbeError
from stability_probe.runlogs import read_log
from stability_probe.runlogs.facts import log_facts
from stability_probe.runlogs.table import to_table


def jsonl(folder: Path, *lines: object, name: str = "log.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def steps(*values: tuple[int, float]) -> pd.DataFrame:
    return to_table([{"step": step, "loss": loss} for step, loss in values], 0, Path("log.jsonl"))


@pytest.mark.parametrize(
    ("step", "loss", "grad_norm", "lr"),
    [
        ("step", "loss", "grad_norm", "lr"),
        ("global_step", "train_loss", "gradient_norm", "learning_rate"),
        ("_step", "train/loss", "train/grad_norm", "train/lr"),
        ("iteration", "lm loss", "grad-norm", "learning-rate"),
        ("train/global_step", "train/loss", "optim/total grad norm", "train/learning_rate"),
        ("iter", "lm_loss", "grad_norm", "lr"),
        ("Step", "loss_metrics/global_avg_loss", "grad_norm", "lr"),
    ],
)
def test_usual_names_are_read(tmp_path, step, loss, grad_norm, lr):
    frame = read_log(jsonl(tmp_path, {step: 3, loss: 2.5, grad_norm: 0.7, lr: 1e-4}))
    assert frame.iloc[0].to_dict() == {
        "step": 3, "loss": 2.5, "grad_norm": 0.7, "lr": 1e-4, "segment": 0, "nonfinite": False,
    }  # fmt: skip


def test_numbers_that_are_not_finite(tmp_path):
    lines = [
        '{"step": 1, "loss": NaN}',
        '{"step": 2, "loss": Infinity}',
        '{"step": 3, "loss": null}',
        '{"step": 4, "loss": "nan", "grad_norm": 1.0}',
        '{"step": 5, "loss": 2.0, "grad_norm": "inf"}',
        '{"step": 6, "loss": 2.0, "grad_norm": null}',
        '{"step": 7, "loss": 2.0}',
    ]
    frame = read_log(jsonl(tmp_path, *lines))
    assert frame["nonfinite"].tolist() == [True, True, True, True, True, False, False]
    assert frame["loss"].map(math.isfinite).tolist() == [False, False, False, False, True, True, True]


def test_evaluation_and_closing_records_of_a_trainer_are_left_out(tmp_path):
    history = [
        {"step": 10, "loss": 3.0, "grad_norm": 1.0, "learning_rate": 1e-4, "epoch": 0.1},
        {"step": 10, "eval_loss": 2.9, "epoch": 0.1},
        {"step": 20, "loss": 2.8, "grad_norm": 1.1, "learning_rate": 2e-4, "epoch": 0.2},
        {"step": 20, "train_runtime": 5.0, "train_loss": 9.9},
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    for path in (tmp_path, tmp_path / "trainer_state.json"):
        frame = read_log(path)
        assert frame["step"].tolist() == [10, 20]
        assert frame["loss"].tolist() == [3.0, 2.8]
        assert frame["lr"].tolist() == [1e-4, 2e-4]


def test_half_a_line_is_skipped_and_counted(tmp_path):
    frame = read_log(jsonl(tmp_path, {"step": 1, "loss": 3.0}, '{"step": 2, "lo', "[1]", {"step": 3, "loss": 2.9}))
    assert frame["step"].tolist() == [1, 3]
    assert frame.attrs["notes"] == ("log.jsonl: 2 unreadable lines skipped",)


def test_values_of_a_step_that_are_written_one_by_one_are_one_row(tmp_path):
    records = [
        {"step": 1, "loss": 3.0},
        {"step": 1, "grad_norm": 0.5},
        {"step": 1, "lr": 1e-3},
        {"step": 2, "loss": 2.0},
    ]
    frame = read_log(jsonl(tmp_path, *records))
    assert frame[["step", "loss", "grad_norm", "lr"]].iloc[0].tolist() == [1, 3.0, 0.5, 1e-3]
    assert len(frame) == 2


def test_every_segment_of_a_rollback_is_kept(tmp_path):
    records = [{"step": s, "loss": loss} for s, loss in [(1, 3.0), (2, 2.9), (3, 9.0), (2, 2.91), (3, 2.8), (2, 2.92)]]
    frame = read_log(jsonl(tmp_path, *records))
    assert frame["segment"].tolist() == [0, 0, 0, 1, 1, 2]
    assert "goes back 2 times" in frame.attrs["notes"][0]


def test_csv_with_empty_cells_and_a_wandb_chart(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(
        '\ufeff"Step","run-1 - train/loss","run-1 - train/loss__MIN"\n1,3.5,3.4\n2,,\n3,nan,nan\n4,3.0,3.0,7,8\n'
    )
    frame = read_log(path)
    assert frame["step"].tolist() == [1, 3]
    assert frame["nonfinite"].tolist() == [False, True]
    assert frame.attrs["notes"] == ("log.csv: 1 unreadable line skipped",)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"epoch": 1, "accuracy": 0.5}\n', "accuracy"),
        ("a.jsonl", "", "nothing"),
        ("a.jsonl", "\x00\xff[[[\n" + "[" * 100_000, "nothing"),
        ("a.csv", "step,accuracy\n1,0.5\n", "accuracy"),
        ("a.csv", "", "nothing"),
        ("a.csv", 'step,loss\n"1' + "x" * 200_000, "field larger"),
        ("trainer_state.json", '{"log_history": [{"st', "Unterminated"),
        ("trainer_state.json", '{"log_history": 3}', "neither"),
        ("a.log", "step 1 loss 3", "known format"),
        ("a.jsonl", '{"step": 1e300, "loss": 2}\n{"step": true, "loss": 2}\n{"step": "x", "loss": 1}', "loss"),
    ],
)
def test_logs_without_a_usable_row_are_refused(tmp_path, name, text, says):
    (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ProbeError) as caught:
        read_log(tmp_path / name)
    assert caught.value.exit_code == 3
    assert says in str(caught.value)


def test_a_missing_log_is_refused(tmp_path):
    with pytest.raises(ProbeError, match="no such file"):
        read_log(tmp_path / "none.jsonl")


@pytest.mark.parametrize("slope", [0.0, -0.02, 0.01])
def test_a_loss_that_falls_steadily_does_not_scatter(slope):
    """Around its median a descent of a nat in fifty steps would pass for a spread of a quarter."""
    records = [{"step": s, "loss": 6.0 + slope * s + 0.02 * (s % 3)} for s in range(1, 121)]
    records[100]["loss"] = 9.0  # one spike moves neither slope nor spread
    facts = log_facts([to_table([*records, {"step": 121, "loss": 7.0}], 0, Path("l"))], 121)
    assert facts is not None and facts.loss_spread == pytest.approx(1.4826 * 0.02, rel=0.05)


def test_few_logged_steps_are_taken_as_they_are():
    records = [{"step": s, "loss": loss} for s, loss in enumerate((4.0, 3.0, 2.0, 1.0), 1)]
    facts = log_facts([to_table(records, 0, Path("l"))], 5)
    assert facts is not None and facts.loss_spread == pytest.approx(1.4826 * 1.0)


def test_facts_before_and_at_the_step():
    records = [
        {"step": s, "loss": 3.0 + 0.01 * (s % 3), "grad_norm": 1.0, "lr": min(s, 20) * 1e-5} for s in range(1, 101)
    ]
    records.append({"step": 101, "loss": 7.5, "grad_norm": 40.0, "lr": 20e-5})
    facts = log_facts([to_table(records, 0, Path("l"))], 101)
    assert facts is not None
    assert facts.usual_loss == pytest.approx(3.01)
    assert facts.loss_spread == pytest.approx(1.4826 * 0.01)
    assert facts.usual_grad_norm == 1.0
    assert (facts.logged_loss, facts.logged_grad_norm, facts.logged_lr) == (7.5, 40.0, pytest.approx(2e-4))
    assert (facts.peak_lr, facts.warmup_end) == (pytest.approx(2e-4), 20)
    assert facts.nonfinite_steps == ()


def test_the_window_is_fifty_steps_and_ends_before_the_step():
    facts = log_facts([steps(*((s, float(s)) for s in range(1, 101)))], 90)
    assert facts.usual_loss == pytest.approx(sum(range(40, 90)) / 50)
    assert facts.logged_loss == 90.0


def test_after_a_rollback_the_spike_is_what_was_logged():
    first = [(s, 3.0) for s in range(1, 40)] + [(40, 9.0), (41, 8.0)]
    second = [(s, 2.0) for s in range(30, 60)]
    facts = log_facts([steps(*first, *second)], 40)
    assert facts.logged_loss == 9.0
    assert facts.usual_loss == 3.0  # 29 of the first segment, then 10 of the second
    assert log_facts([steps(*first), steps(*second)], 40) == facts


def test_a_segment_that_starts_after_the_step_is_not_the_way_there():
    facts = log_facts([steps((1, 3.0), (2, 3.1), (3, 9.0), (2, 3.1)), steps((500, 1.0), (501, 1.0))], 3)
    assert facts.usual_loss == pytest.approx(3.05)
    assert facts.logged_loss == 9.0


def test_a_log_that_ends_before_the_step_still_says_what_was_usual():
    facts = log_facts([steps((1, 3.0), (2, 3.0), (3, 3.2))], 4)
    assert (facts.usual_loss, facts.logged_loss, facts.logged_grad_norm) == (3.0, None, None)


def test_without_a_step_nothing_is_logged_at_it():
    facts = log_facts([steps((1, 3.0), (2, 3.1), (3, 3.2))], None)
    assert (facts.step, facts.usual_loss, facts.logged_loss) == (None, 3.1, None)
    assert log_facts([], 3) is None


def test_a_step_before_the_log_has_no_past():
    facts = log_facts([steps((10, 3.0), (11, 3.0))], 10)
    assert (facts.usual_loss, facts.logged_loss) == (None, 3.0)


def test_a_zero_loss_among_ordinary_ones_was_nan_and_one_among_tiny_ones_was_zero():
    facts = log_facts([steps((1, 3.0), (2, 3.0), (3, 0.0), (4, 0.0))], 3)
    assert math.isnan(facts.logged_loss)
    assert facts.nonfinite_steps == (3, 4)
    healthy = log_facts([steps((1, 0.02), (2, 0.01), (3, 0.0))], 3)
    assert (healthy.logged_loss, healthy.nonfinite_steps) == (0.0, ())


def test_a_loss_left_out_beside_a_nan_gradient_was_nan():
    records = [{"step": 1, "loss": 3.0, "grad_norm": 1.0}, {"step": 2, "grad_norm": math.nan}]
    facts = log_facts([to_table(records, 0, Path("l"))], 2)
    assert math.isnan(facts.logged_loss) and math.isnan(facts.logged_grad_norm)
    loss_only = log_facts([steps((1, 3.0), (2, math.nan))], 2)
    assert math.isnan(loss_only.logged_loss) and loss_only.logged_grad_norm is None


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0.5, 9.0)), min_size=1, max_size=40), st.integers(0, 9))
def test_facts_agree_with_a_slow_walk(values, step):
    """Twin: walk the log once, forget what a rollback undid, stop at the last arrival at the step."""
    values = [(at, loss + 1e-3 * index) for index, (at, loss) in enumerate(values)]  # equal neighbours would be merged
    facts = log_facts([steps(*values)], step)
    segment, tagged = 0, []
    for index, (at, loss) in enumerate(values):
        segment += index > 0 and at < values[index - 1][0]
        tagged.append((segment, at, loss))
    logged = [loss for _, at, loss in tagged if at == step]
    assert facts.logged_loss == (max(logged) if logged else None)
    through = [s for s in range(segment + 1) if min(a for t, a, _ in tagged if t == s) < step]
    reach = [s for s in through if max(a for t, a, _ in tagged if t == s) >= step]
    if not through:
        assert facts.usual_loss is None
        return
    kept, first = [], step
    for s in range((reach or through)[-1], -1, -1):
        mine = [(a, loss) for t, a, loss in tagged if t == s and a < first]
        kept = mine + kept
        first = min([first, *(a for a, _ in mine)])
    losses = sorted(loss for _, loss in kept[-50:])
    middle = (losses[(len(losses) - 1) // 2] + losses[len(losses) // 2]) / 2
    assert facts.usual_loss == pytest.approx(middle)


def test_a_log_that_begins_after_warm_up_does_not_tell_where_it_ended(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("step,loss,lr\n" + "\n".join(f"{step},3.0,{3e-4 * 0.999**step}" for step in range(1140, 1200)))
    facts = log_facts([read_log(path)], 1190)
    assert facts is not None and facts.warmup_end is None and facts.peak_lr is not None


def spikes_one_by_one(frame: pd.DataFrame) -> list[int]:
    """The rule of `spike_steps` as it reads, step by step."""
    found = []
    for _, segment in frame.groupby("segment"):
        past: list[float] = []
        for _, row in segment.iterrows():
            window = pd.Series([loss for loss in past[-50:] if math.isfinite(loss)], dtype=float)
            if row["nonfinite"]:
                found.append(int(row["step"]))
            elif len(window) >= 10:
                spread = (window.quantile(0.75) - window.quantile(0.25)) / 1.349
                if row["loss"] - window.median() > max(0.5, 6 * spread):
                    found.append(int(row["step"]))
            past.append(row["loss"])
    return sorted(set(found))


@given(
    st.lists(
        st.tuples(st.sampled_from([1, 1, 1, 1, 1, -15]), st.sampled_from([3.0, 3.1, 2.9, 3.4, 3.7, 6.0, math.nan])),
        min_size=1,
        max_size=90,
    )
)
def test_spikes_are_found_as_step_by_step(changes):
    at, values = 100, []
    for change, loss in changes:
        at += change
        values.append((max(at, 0), loss))
    frame = steps(*values)
    assert list(log_facts([frame], None).spike_steps) == spikes_one_by_one(frame)


def test_a_spike_and_the_ends_of_the_log_are_told_whatever_the_step():
    frame = steps(*[(step, 3.0 + 0.01 * (step % 3)) for step in range(40)], (40, 7.0), (41, math.nan), (42, 3.4))
    for step in (None, 5, 41, 5000):
        facts = log_facts([frame], step)
        assert (facts.first_step, facts.last_step, facts.spike_steps) == (0, 42, (40, 41))


@pytest.mark.parametrize(("loss", "is_spike"), [(4.7, False), (4.9, True)])
def test_a_spike_stands_six_deviations_out(loss, is_spike):
    """Quartiles 2.8 and 3.2, so σ = 0.4 / 1.349 = 0.297 and the limit is 3.0 + 1.78."""
    frame = steps(*[(step, 2.8 if step % 2 else 3.2) for step in range(40)], (40, loss))
    assert log_facts([frame], None).spike_steps == ((40,) if is_spike else ())
