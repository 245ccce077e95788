"""What the replays of a diagnosis leave behind for the interventions."""

import pytest
import torch

from fixtures import incidents
from fixtures.tiny import tiny
from stability_probe.batches.edit import apply
from stability_probe.examination import examine, repeats
from stability_probe.incident import load_incident
from stability_probe.interventions import drop_rows, swap_baseline
from stability_probe.progress import Silent
from stability_probe.replay import Subject, replay
from stability_probe.request import Request
from tests.planted import baseline, batch
from tests.rule_tables import measurements_from


def test_the_stand_in_of_a_dropped_batch_keeps_its_gradient_norm(tmp_path):
    """The baseline's gradients are let go after they were measured; their norm is not."""
    made = tiny("llama")
    files = [incidents.saved(rows, tmp_path / f"{name}.pt") for name, rows in (("b", batch()), ("c", baseline()))]
    incident = load_incident(Request(ckpt=made.ckpt, batch=files[0], baselines=(files[1],)))
    bench, _, _ = examine(incident, Subject.of(incident.model.module), Silent())
    everything = list(range(bench.batch.ids_BT.shape[0]))
    for reading in (swap_baseline.trial(bench), drop_rows.trial(bench, everything)):
        assert reading["grad_norm"] == bench.measurements.baseline_grad_norm > 0


def test_without_a_baseline_a_step_is_judged_on_rows_that_it_does_not_follow(tmp_path):
    made = tiny("llama")
    file = incidents.saved(batch(), tmp_path / "b.pt")
    incident = load_incident(Request(ckpt=made.ckpt, batch=file))
    subject = Subject.of(incident.model.module)
    bench, _, _ = examine(incident, subject, Silent())
    step, effect = bench.step, bench.measurements.step_effect
    assert step is not None and effect is not None
    assert effect.measured_on == "held-out half of this batch"
    assert torch.equal(step.batch.ids_BT, bench.batch.ids_BT[1::2])
    assert step.loss_before == pytest.approx(replay(subject, step.batch, backward=False).loss, abs=1e-5)
    own = replay(subject, apply(bench.batch, lambda x: x[::2])).gradients.total
    assert all(torch.equal(own[name], grad) for name, grad in step.gradients.items())


def test_a_single_row_is_all_there_is_to_judge_a_step_on(tmp_path):
    made = tiny("llama")
    row = {key: value[:1] for key, value in batch().items()}
    incident = load_incident(Request(ckpt=made.ckpt, batch=incidents.saved(row, tmp_path / "b.pt")))
    bench, _, _ = examine(incident, Subject.of(incident.model.module), Silent())
    assert bench.measurements.step_effect.measured_on == "this batch"


def test_no_step_is_judged_by_a_loss_that_differs_each_time():
    assert repeats(measurements_from({"repeat_loss_change": 1e-7}))
    assert not repeats(measurements_from({"repeat_loss_change": -0.3}))
    assert repeats(measurements_from({}))


@pytest.mark.parametrize(("foreign", "kept"), [(2, True), (200, False)])
def test_ids_of_a_baseline_that_no_embedding_has_are_told(tmp_path, foreign, kept):
    made = tiny("llama")
    healthy = {**baseline(), "input_ids": baseline()["input_ids"].clone()}
    healthy["input_ids"].view(-1)[:foreign] += 100_000
    files = [incidents.saved(rows, tmp_path / f"{name}.pt") for name, rows in (("b", batch()), ("c", healthy))]
    incident = load_incident(Request(ckpt=made.ckpt, batch=files[0], baselines=(files[1],)))
    bench, _, notes = examine(incident, Subject.of(incident.model.module), Silent())
    assert any(f"{foreign} ids of the baseline are outside the vocabulary" in note for note in notes)
    assert (bench.measurements.baseline_loss is not None) is kept
