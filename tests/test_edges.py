"""Unusual but legitimate incidents: the right answer, or a message in three parts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fixtures import incidents, plant
from fixtures.incidents import row, saved
from fixtures.tiny import build, logits_of, tiny
from fixtures.tiny_text import PAD_ID
from stability_probe.errors import ProbeError
from stability_probe.pipeline import run
from stability_probe.report_parts import with_randomness
from stability_probe.request import Request
from stability_probe.schema import Verdict
from tests.planted import NAMES, diagnose

UNEQUAL = [row("code", length, seed) for seed, length in enumerate((40, 64, 25, 57))]


def direct_losses(made, rows):
    """Mean loss of each row alone, without padding, straight from the model."""
    model = build(made.name)
    model.load_state_dict(incidents.weights_of(made), strict=False)
    model.eval()
    losses = []
    with torch.no_grad():
        for ids in rows:
            ids_BT = torch.tensor([ids])
            losses.append(F.cross_entropy(logits_of(model, ids_BT)[0, :-1], ids_BT[0, 1:]).item())
    return losses


def row_losses(report):
    return [record["loss"] for record in report.tables["rows"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_row(name, side, tmp_path):
    """Learned positions start at the first real token, as `position_ids` of the training code would say."""
    batch = plant.batch_of(UNEQUAL, PAD_ID, side)
    if side == "left":  # else the last pad has to predict the first token, as it does in transformers
        first = batch["attention_mask"].argmax(-1)
        batch["labels"][torch.arange(len(UNEQUAL)), first] = plant.IGNORED
    batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    report = diagnose(tiny(name), tmp_path, batch, with_baseline=False)
    assert row_losses(report) == pytest.approx(direct_losses(tiny(name), UNEQUAL), rel=1e-4)
    assert report.verdict.cause == "none", report.verdict.summary


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_one(name, tmp_path):
    ids = row("code", 64, 0)
    report = diagnose(tiny(name), tmp_path, plant.batch_of([ids]), with_baseline=False)
    assert report.verdict.cause == "none", report.verdict.summary
    assert row_losses(report) == pytest.approx(direct_losses(tiny(name), [ids]), rel=1e-4)


def test_a_fault_in_a_batch_of_one(tmp_path):
    gram = list(row("code", 2, 5))
    batch = plant.repeated_tokens(plant.batch_of([row("code", 96, 0)]), 0, gram)
    report = diagnose(tiny("llama"), tmp_path, batch)
    assert report.verdict.cause == "repeated-tokens", report.verdict.summary
    assert report.verdict.location.rows == (0,)


@pytest.mark.parametrize("name", NAMES)
def test_labels_absent(name, tmp_path):
    rows = [row("code", 48, seed) for seed in range(2)]
    report = diagnose(tiny(name), tmp_path, {"input_ids": torch.tensor(rows)}, with_baseline=False)
    assert report.verdict.cause == "none", report.verdict.summary
    assert report.inputs["batch"]["labels"] == "absent"
    assert row_losses(report) == pytest.approx(direct_losses(tiny(name), rows), rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_one_token_have_nothing_to_predict(name, tmp_path):
    """T = 1: no target exists. The report says so, and calls nothing broken that is not."""
    report = diagnose(tiny(name), tmp_path, {"input_ids": torch.tensor([[5], [9]])}, with_baseline=False)
    assert math.isnan(report.replays[0].loss)
    assert report.verdict.cause in ("none", "no-valid-labels"), report.verdict.summary
    assert not [outcome for outcome in report.outcomes if outcome.status == "crashed"]


def test_one_token_with_a_shifted_label_has_a_loss(tmp_path):
    batch = {"input_ids": torch.tensor([[5], [9]]), "labels": torch.tensor([[9], [5]])}
    report = diagnose(tiny("llama"), tmp_path, batch, with_baseline=False, labels="shifted")
    assert math.isfinite(report.replays[0].loss)


@pytest.mark.parametrize("shape", [(0, 16), (2, 0)])
def test_an_empty_batch_is_refused_in_three_parts(shape, tmp_path):
    made = tiny("llama")
    path = saved({"input_ids": torch.zeros(shape, dtype=torch.long)}, tmp_path / "empty.pt")
    with pytest.raises(ProbeError) as caught:
        run(Request(ckpt=made.ckpt, batch=path))
    assert caught.value.exit_code == 3
    assert "empty" in caught.value.problem and caught.value.why and caught.value.hint


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_counted_with_and_without_groups(name, tmp_path):
    """Four query heads a layer in every family, also where two key heads serve them."""
    report = diagnose(tiny(name), tmp_path, {"input_ids": torch.tensor([row("code", 32, 1)])}, with_baseline=False)
    seen = {(record["layer"], record["head"]) for record in report.tables["heads"]}
    assert seen == {(layer, head) for layer in range(4) for head in range(4)}


@pytest.mark.parametrize(("name", "tied"), [("llama", False), ("qwen3", True), ("gpt2", True), ("decoder", True)])
def test_tied_heads_are_one_parameter(name, tied, tmp_path):
    report = diagnose(tiny(name), tmp_path, {"input_ids": torch.tensor([row("code", 32, 1)])}, with_baseline=False)
    heads = [p["parameter"] for p in report.tables["parameters"] if p["parameter"] in ("lm_head.weight", "head.weight")]
    assert bool(heads) is not tied


def test_max_rows_and_positions(tmp_path):
    rows = [row("code", 48, seed) for seed in range(4)]
    report = diagnose(tiny("llama"), tmp_path, plant.batch_of(rows), with_baseline=False, max_rows=2, max_positions=20)
    assert (report.inputs["batch"]["rows"], report.inputs["batch"]["positions"]) == (2, 20)
    # The target of the last position that is kept stays known.
    assert row_losses(report) == pytest.approx(direct_losses(tiny("llama"), [r[:21] for r in rows[:2]]), rel=1e-4)


def test_rows_beyond_the_limit_are_neither_audited_nor_scored(tmp_path):
    batch = plant.id_at(plant.batch_of([row("code", 48, seed) for seed in range(4)]), 3, 5, 2**20)
    report = diagnose(tiny("llama"), tmp_path, batch, with_baseline=False, max_rows=2)
    assert report.verdict.cause == "none", report.verdict.summary
    assert [record["row"] for record in report.tables["rows"]] == [0, 1]


@pytest.mark.parametrize("in_a_mapping", [True, False])
def test_ids_in_one_dimension_are_one_row_and_it_is_said(in_a_mapping, tmp_path):
    ids = torch.tensor(row("code", 48, 1))
    path = tmp_path / "flat.pt"
    torch.save({"input_ids": ids} if in_a_mapping else ids, path)
    report = run(Request(ckpt=tiny("llama").ckpt, batch=path, confirm=False))
    assert report.inputs["batch"]["rows"] == 1
    assert [note for note in report.notes if "one dimension" in note and "48 tokens" in note]


NOISY = """
import torch
from fixtures.tiny_models import decoder

def make():
    model = decoder()
    model.register_forward_hook(lambda module, inputs, logits: {change})
    return model
"""


def noisy(change, tmp_path):
    made = tiny("decoder")
    (tmp_path / "noisy.py").write_text(NOISY.format(change=change))
    path = saved(incidents.healthy_batch(("code",) * 2, 48), tmp_path / "batch.pt")
    model = f"{tmp_path / 'noisy.py'}:make"
    return run(Request(ckpt=made.ckpt, batch=path, model=model, logs=(made.log,), step=419))


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ("torch.nn.functional.dropout(logits, 0.2)", "none"),
        ("logits * (1 + 3 * torch.rand_like(logits))", "unexplained"),
    ],
)
def test_a_forward_that_draws_random_numbers_is_said_first(change, cause, tmp_path):
    """Replays are seeded alike and agree bit for bit, so the difference shows only where the seeds differ."""
    verdict = noisy(change, tmp_path).verdict
    assert verdict.cause == cause, verdict.summary
    assert verdict.summary.startswith("Two replays of this batch with different seeds differ")
    assert "random numbers" in verdict.remedies[0].action


def test_a_forward_that_cannot_be_repeated_is_the_finding(tmp_path):
    generator = "torch.Generator().manual_seed(__import__('time').time_ns() % 2**31)"
    verdict = noisy(f"logits + 3 * torch.randn(logits.shape, generator={generator})", tmp_path).verdict
    assert (verdict.cause, verdict.status) == ("nondeterministic-replay", "decisive")


def test_a_forward_without_random_numbers_has_nothing_said_of_seeds(tmp_path):
    assert "seeds" not in noisy("logits", tmp_path).verdict.summary


@pytest.mark.parametrize(
    ("cause", "gap", "change", "said"),
    [
        ("unexplained", 9.0, 1e-4, True),
        ("none", math.inf, math.nan, True),
        ("repeated-tokens", 9.0, 0.3, True),
        ("repeated-tokens", 9.0, -0.3, True),
        ("repeated-tokens", 9.0, math.nan, True),
        ("repeated-tokens", 9.0, 1e-4, False),  # the batch's loss, and so the proof, hardly depends on the seed
        ("unexplained", 2e-5, 1e-7, False),  # sums in another order
        ("unexplained", None, None, False),
    ],
)
def test_the_seed_is_spoken_of_where_it_matters(cause, gap, change, said):
    measured = SimpleNamespace(seed_gap=gap, seed_loss_change=change)
    verdict = with_randomness(Verdict(cause, None, None, "what was seen"), measured)
    assert ("different seeds" in verdict.summary) == said
    assert bool(verdict.remedies) == (said and cause in ("none", "unexplained"))
    assert verdict.summary.endswith("what was seen")
