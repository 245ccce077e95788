"""What the replays of a diagnosis leave behind for the interventions."""

from fixtures import incidents
from fixtures.tiny import tiny
from stability_probe.examination import examine
from stability_probe.incident import load_incident
from stability_probe.interventions import drop_rows, swap_baseline
from stability_probe.progress import Silent
from stability_probe.replay import Subject
from stability_probe.request import Request
from tests.planted import baseline, batch


def test_the_stand_in_of_a_dropped_batch_keeps_its_gradient_norm(tmp_path):
    """The baseline's gradients are let go after they were measured; their norm is not."""
    made = tiny("llama")
    files = [incidents.saved(rows, tmp_path / f"{name}.pt") for name, rows in (("b", batch()), ("c", baseline()))]
    incident = load_incident(Request(ckpt=made.ckpt, batch=files[0], baselines=(files[1],)))
    bench, _, _ = examine(incident, Subject.of(incident.model.module), Silent())
    everything = list(range(bench.batch.ids_BT.shape[0]))
    for reading in (swap_baseline.trial(bench), drop_rows.trial(bench, everything)):
        assert reading["grad_norm"] == bench.measurements.baseline_grad_norm > 0
