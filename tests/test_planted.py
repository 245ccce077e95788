"""Faults planted in trained tiny models are named, located and, where they cost something, confirmed."""

from __future__ import annotations

import pytest
import torch

from fixtures import incidents, plant
from fixtures.incidents import planted
from fixtures.tiny import MODELS_FILE, tiny
from fixtures.tiny_text import VOCABULARY, ids_of
from tests.planted import HEAD, LAYER, NAMES, ROW, Expected, batch, check, diagnose

EVERY_ROW = (0, 1, 2, 3)
TIED = ("gpt2", "qwen3", "gemma2")
# With a baseline batch every family, without one two that differ most.
WITH_AND_WITHOUT = [*((name, True) for name in NAMES), ("llama", False), ("gemma2", False)]


# --- the batch ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_repeated_tokens(name, tmp_path):
    gram = ids_of(" foo bar")
    report = diagnose(tiny(name), tmp_path, plant.repeated_tokens(batch(), ROW, gram, start=8))
    check(report, Expected("repeated-tokens", where={"rows": (ROW,)}, least=0.8, only_rows=True))
    row, start, end = max(report.verdict.location.positions, key=lambda span: span[2] - span[1])
    assert row == ROW and abs(start - 8) <= len(gram) and end == batch()["input_ids"].shape[1]


@pytest.mark.parametrize(("name", "with_baseline"), WITH_AND_WITHOUT)
def test_garbage_row(name, with_baseline, tmp_path):
    report = diagnose(tiny(name), tmp_path, plant.garbage_row(batch(), ROW, VOCABULARY), with_baseline=with_baseline)
    check(report, Expected("garbage-tokens", where={"rows": (ROW,)}, only_rows=True))


@pytest.mark.parametrize("name", NAMES)
def test_labels_shifted_twice(name, tmp_path):
    report = diagnose(tiny(name), tmp_path, plant.labels_moved(batch(), 1), labels="unshifted")
    check(report, Expected("label-misalignment", where={"rows": EVERY_ROW}))
    assert any(record.name == "realign labels" and record.explained for record in report.interventions)


@pytest.mark.parametrize("name", NAMES)
def test_labels_moved_by_two_whatever_the_convention(name, tmp_path):
    report = diagnose(tiny(name), tmp_path, plant.labels_moved(batch(), 2))
    check(report, Expected("label-misalignment", where={"rows": EVERY_ROW}))


@pytest.mark.parametrize("name", NAMES)
def test_labels_never_shifted(name, tmp_path):
    report = diagnose(tiny(name), tmp_path, labels="shifted")
    # Where the model is weak its own token costs little more than the next one: then the stored labels tell it.
    check(report, Expected("label-misalignment", ("confirmed", "latent"), {"rows": EVERY_ROW}))


@pytest.mark.parametrize("name", NAMES)
def test_one_row_from_a_loader_that_shifts_twice(name, tmp_path):
    report = diagnose(tiny(name), tmp_path, plant.labels_moved(batch(), 1, rows=[ROW]))
    check(report, Expected("label-misalignment", where={"rows": (ROW,)}, only_rows=True))


@pytest.mark.parametrize("name", ["llama", "decoder"])
def test_copies_of_a_row(name, tmp_path):
    """Also where the copied row costs what the others do, so that nothing is left to explain."""
    report = diagnose(tiny(name), tmp_path, plant.copied_row(batch(), 0, (1, 3)))
    check(report, Expected("duplicate-examples", ("confirmed", "likely", "latent"), {"rows": (1, 3)}, only_rows=True))


def test_a_row_without_targets(tmp_path):
    report = diagnose(tiny("llama"), tmp_path, plant.row_without_targets(batch(), ROW))
    check(report, Expected("no-valid-labels", ("decisive",), {"rows": (ROW,)}, only_rows=True))


def test_an_id_above_the_vocabulary(tmp_path):
    report = diagnose(tiny("llama"), tmp_path, plant.id_at(batch(), ROW, 7, VOCABULARY + 5))
    where = {"rows": (ROW,), "positions": ((ROW, 7, 8),)}
    check(report, Expected("token-id-out-of-range", ("decisive",), where, only_rows=True))


# --- the weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "with_baseline"), [case for case in WITH_AND_WITHOUT if case[0] != "qwen3"])
def test_one_head_grown(name, with_baseline, tmp_path):
    places = incidents.query_and_key(name, LAYER, HEAD)
    made = planted(tiny(name), tmp_path, lambda state: plant.head_times(state, places, 8))
    where = {"layer": LAYER, "heads": ((LAYER, HEAD),), "parameters": (places[0][0],)}
    expected = Expected("attention-logit-growth", ("confirmed", "latent"), where)
    check(diagnose(made, tmp_path, with_baseline=with_baseline), expected)


def test_weights_of_a_head_do_not_matter_under_qk_norm(tmp_path):
    places = incidents.query_and_key("qwen3", LAYER, HEAD)
    made = planted(tiny("qwen3"), tmp_path, lambda state: plant.head_times(state, places, 8))
    assert diagnose(made, tmp_path).verdict.cause == "none"


@pytest.mark.parametrize("with_baseline", [True, False])
def test_gains_grown_under_qk_norm(with_baseline, tmp_path):
    gains = incidents.query_gain("qwen3", LAYER)
    made = planted(tiny("qwen3"), tmp_path, lambda state: plant.head_times(state, gains, 8))
    where = {"layer": LAYER, "parameters": tuple(name for name, _ in gains)}
    report = diagnose(made, tmp_path, with_baseline=with_baseline)
    check(report, Expected("qk-norm-gain-growth", ("confirmed", "latent"), where))


@pytest.mark.parametrize(("name", "with_baseline"), WITH_AND_WITHOUT)
def test_a_flipped_exponent_bit(name, with_baseline, tmp_path):
    weight = incidents.mlp_weight(name, LAYER)
    made = planted(tiny(name), tmp_path, lambda state: plant.flipped_bit(state, weight, (3, 5)))
    expected = Expected("corrupt-weights", where={"layer": LAYER, "parameters": (f"{weight}[3, 5]",)})
    check(diagnose(made, tmp_path, with_baseline=with_baseline), expected)


def test_a_flipped_bit_against_the_log(tmp_path):
    weight = incidents.mlp_weight("llama", LAYER)
    made = planted(tiny("llama"), tmp_path, lambda state: plant.flipped_bit(state, weight, (3, 5)))
    report = diagnose(made, tmp_path, with_baseline=False, with_log=True)
    check(report, Expected("corrupt-weights", where={"layer": LAYER}))


def test_a_flipped_bit_that_changes_nothing_is_no_cause(tmp_path):
    """0.02 with its second exponent bit flipped is 1e-21: one weight of 7 000 is gone, and nobody is the worse."""
    weight = incidents.mlp_weight("llama", LAYER)

    def change(state):
        return plant.flipped_bit(plant.set_to(state, weight, 0.02, (3, 5)), weight, (3, 5), bit=29)

    assert diagnose(planted(tiny("llama"), tmp_path, change), tmp_path).verdict.cause == "none"


@pytest.mark.parametrize(("name", "with_baseline"), WITH_AND_WITHOUT)
def test_an_embedding_row_times_1000(name, with_baseline, tmp_path):
    token = int(batch()["input_ids"].flatten().mode().values)
    change = lambda state: incidents.embedding_row_times(name, state, token, 1000)  # noqa: E731
    made = planted(tiny(name), tmp_path, change)
    where = {"parameters": (f"{incidents.embedding(name)}[{token}]",), "rows": EVERY_ROW}
    expected = Expected("embedding-row-outlier", ("confirmed", "latent"), where)
    check(diagnose(made, tmp_path, with_baseline=with_baseline), expected)


@pytest.mark.parametrize(("name", "with_baseline"), WITH_AND_WITHOUT)
def test_a_constant_on_all_logits(name, with_baseline, tmp_path):
    function = "drifted_decoder" if name == "decoder" else "drifted"
    report = diagnose(tiny(name), tmp_path, with_baseline=with_baseline, model=f"{MODELS_FILE}:{function}")
    check(report, Expected("logit-drift"))
    gap = next(record for record in report.interventions if record.name == "recentre logits")
    assert gap.measure == "precision_gap" and gap.after < 0.5 * gap.before


def test_a_nan_in_a_tensor(tmp_path):
    weight = incidents.mlp_weight("gpt2", LAYER)
    made = planted(tiny("gpt2"), tmp_path, lambda state: plant.set_to(state, weight, float("nan"), (2, 3)))
    where = {"layer": LAYER, "parameters": (f"{weight}[2, 3]",)}
    check(diagnose(made, tmp_path), Expected("nonfinite-weights", ("decisive",), where))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_missing_from_the_file(name, tmp_path):
    prefix = f"{incidents.block(name, LAYER)}.mlp."
    made = planted(
        tiny(name), tmp_path, lambda state: plant.without(state, [key for key in state if key.startswith(prefix)])
    )
    report = diagnose(made, tmp_path)
    check(report, Expected("checkpoint-mismatch", ("decisive", "confirmed", "latent"), {"layer": LAYER}))
    assert all(parameter.startswith(prefix) for parameter in report.verdict.location.parameters)


@pytest.mark.parametrize("name", TIED)
def test_a_broken_tie(name, tmp_path):
    source = incidents.embedding(name)
    made = planted(tiny(name), tmp_path, lambda state: plant.untied(state, source, "lm_head.weight"))
    check(diagnose(made, tmp_path), Expected("checkpoint-mismatch", where={"parameters": (source, "lm_head.weight")}))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "decoder"])
def test_a_norm_left_at_its_initial_value(name, tmp_path):
    weight = incidents.norm(name, LAYER)
    made = planted(tiny(name), tmp_path, lambda state: plant.set_to(state, weight, 1.0))
    expected = Expected("checkpoint-mismatch", ("latent", "confirmed"), {"layer": LAYER, "parameters": (weight,)})
    check(diagnose(made, tmp_path), expected)


# --- the optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "with_baseline"), WITH_AND_WITHOUT)
def test_a_stale_second_moment_in_one_layer(name, with_baseline, tmp_path):
    ids = incidents.optimizer_ids(name, f"{incidents.block(name, LAYER)}.")
    made = planted(tiny(name), tmp_path, optimizer=lambda state: plant.moments_times(state, ids, 1e-6))
    report = diagnose(made, tmp_path, with_baseline=with_baseline)
    check(report, Expected("stale-second-moment", ("confirmed", "latent"), {"layer": LAYER}))
    assert report.verdict.location.layers == (LAYER,)


@pytest.mark.parametrize("name", NAMES)
def test_a_learning_rate_far_too_high(name, tmp_path):
    made = planted(tiny(name), tmp_path, optimizer=lambda state: plant.learning_rate(state, 0.1))
    check(diagnose(made, tmp_path), Expected("learning-rate-too-high"))


def test_plants_leave_what_they_are_given(tmp_path):
    """The tests above compare with the same cached batch and weights: no plant may change them."""
    sound = {key: value.clone() for key, value in batch().items()}
    plant.repeated_tokens(batch(), ROW, [5, 6])
    plant.labels_moved(batch(), 1)
    plant.row_without_targets(batch(), ROW)
    assert all(torch.equal(batch()[key], value) for key, value in sound.items())
