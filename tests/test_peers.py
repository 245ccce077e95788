"""The benchmark of peers: its arithmetic, how it reads the others' words, and what they missed or cried wolf at."""

from __future__ import annotations

import json
import math

import pandas
import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.peers import msprobe_compare, overflow_debugger, published_script
from benchmarks.peers.material import Saying, false_alarm, named, pointed
from benchmarks.peers.table import Told, by_section, markdown, overview
from fixtures import incidents, plant
from fixtures.incidents import planted
from fixtures.tiny import tiny
from fixtures.verdict_incident import Incident, Truth
from stability_probe.batches import read_batch
from stability_probe.compare.session import compare_precisions
from stability_probe.incident import load_incident
from stability_probe.replay import Subject
from stability_probe.request import Request
from tests.planted import Expected, batch, check, diagnose

# --- what others get wrong on these, ours gets right ----------------------------------------------


@pytest.mark.parametrize("with_baseline", [True, False])
def test_queries_and_keys_of_one_layer_times_30(with_baseline, tmp_path):
    """A comparison of fp32 with bf16, module by module, sees little here: both are wrong alike."""
    layer = 2
    names = [f"model.layers.{layer}.self_attn.{part}_proj.weight" for part in ("q", "k")]
    made = planted(tiny("llama"), tmp_path, lambda s: plant.times(plant.times(s, names[0], 30), names[1], 30))
    expected = Expected("attention-logit-growth", ("confirmed", "latent"), {"layer": layer})
    check(diagnose(made, tmp_path, with_baseline=with_baseline), expected)
    check(diagnose(made, tmp_path, with_baseline=with_baseline, run_precision="bf16"), expected)


@pytest.mark.parametrize("precision", ["bf16", "bf16-true"])
def test_the_fill_of_a_mask_is_no_loss_of_precision(precision, tmp_path):
    """Gemma 2 computes its attention step by step: bf16 rounds the mask's largest negative number to minus infinity."""
    made = planted(tiny("gemma2"), tmp_path, lambda s: {name: tensor.bfloat16() for name, tensor in s.items()})
    report = diagnose(made, tmp_path, run_precision=precision)
    assert report.verdict.cause == "none", report.verdict.summary


def test_the_fill_of_a_mask_is_not_blamed_in_the_comparison_either(tmp_path):
    saved = incidents.saved(batch(), tmp_path / "batch.pt")
    loaded = load_incident(Request(ckpt=tiny("gemma2").ckpt, batch=saved))
    found = compare_precisions(Subject.of(loaded.model.module), read_batch(saved), ("bf16-true",))
    errors = [module.introduced_error for module in found.precisions["bf16-true"].modules]
    assert max(error for error in errors if error is not None) < 0.1


# --- when an answer counts ------------------------------------------------------------------------


def says(*causes: str, places=(), rows=(), alarm=True) -> Saying:
    return Saying("words", frozenset(causes), tuple(places), tuple(rows), alarm)


@pytest.mark.parametrize(
    ("truth", "saying", "right"),
    [
        (Truth(("x",), layer=2), says(places=["model.layers.2.mlp"]), True),
        (Truth(("x",), layer=2), says(places=["model.layers.3.mlp"]), False),
        (Truth(("x",), layer=2), says(), False),
        (Truth(("x",), parameters=("lm_head.weight",)), says(places=["lm_head"]), True),
        (Truth(("x",), parameters=("embed.weight[22",)), says(places=["embed"]), True),
        (Truth(("x",), parameters=("embed.weight[22",)), says(places=["blocks.0.attn"]), False),
        (Truth(("x",), parameters=("lm_head.weight",)), says(places=["wte.weight", "lm_head.weight"]), True),
        (Truth(("x",), parameters=("lm_head.weight",)), says(places=["a", "b", "lm_head"]), False),
        (Truth(("x",), rows=(1,)), says(rows=[1]), True),
        (Truth(("x",), rows=(1,)), says(rows=[1, 2]), True),
        (Truth(("x",), rows=(1,)), says(rows=[0, 1, 2]), False),
        (Truth(("x",), rows=(0, 1, 2, 3)), says(rows=[0]), None),
        (Truth(("x",)), says(places=["a"]), None),
    ],
)
def test_a_place_counts_where_half_of_what_is_named_is_right(truth, saying, right):
    assert pointed(saying, truth, 4) is right


def test_a_cause_counts_among_several_and_silence_never():
    assert named(says("x", "y"), Truth(("y",)))
    assert not named(says("x"), Truth(("y",)))
    assert not named(Saying(), Truth(("none",)))


def test_a_shift_may_be_said_where_there_is_one():
    truth = Truth(("none", "data-shift"))
    assert not false_alarm(says("data-shift"), truth)
    assert not false_alarm(Saying("fine"), truth)
    assert false_alarm(says("data-shift", "boilerplate"), truth)
    assert false_alarm(says(), Truth(("none",)))
    assert not false_alarm(says("x"), Truth(("y",)))


def test_sayings_survive_the_way_between_processes():
    saying = says("b", "a", places=["layers.1"], rows=[3])
    assert Saying.from_dict(json.loads(json.dumps(saying.to_dict()))) == saying


def test_the_table_counts_faults_places_and_alarms():
    faults = [
        Incident("a", "choose", "llama", Truth(("repeated-tokens",), rows=(1,))),
        Incident("b", "choose", "llama", Truth(("attention-logit-growth",), layer=2)),
    ]
    healthy = Incident("c", "choose", "llama", Truth(("none",)))
    told = Told("tool", (says("repeated-tokens", "garbage-tokens", rows=[1]), Saying(problem="it broke"), says()))
    absent = Told("another", missing="it is not installed")
    _, row, empty = overview([*faults, healthy], [told, absent])
    assert row[:6] == ("tool", "1 of 2", "1 of 2", "1 of 1", "2.0", "1")
    assert empty[:2] == ("another", "could not be run: it is not installed")
    assert by_section([*faults, healthy], [told, absent]) == [
        ("faults in", "", "tool"), ("Data in the batch", "1", "1"), ("Attention", "1", "0"),
    ]  # fmt: skip
    lines = markdown([("", "n"), ("a", "1"), ("bc", "22")]).splitlines()
    assert lines[1] == "|----|----|" and len({len(line) for line in lines}) == 1


def test_no_cause_is_asked_for_where_there_is_none_to_name():
    assert all("unexplained" not in incident.truth.causes for incident in peers.chosen(1, 0))
    infinite = peers.chosen(0.1, 0, ["nonfinite-weights"])
    assert {incident.truth.causes[0] for incident in infinite} == {"nonfinite-weights"} and len(infinite) > 2
    assert len(peers.chosen(0.1, 0)) < 0.12 * len(peers.chosen(1, 0))


def test_a_tool_that_breaks_has_no_answer():
    def broken(_material):
        raise RuntimeError("no such thing")

    def out_of_range(_material):
        raise IndexError("index out of range in self")

    incident = next(i for i in peers.chosen(1, 0) if i.name == "healthy llama")
    tool = type("Tool", (), {"ask": staticmethod(broken)})
    assert peers.answer(tool, incident).problem == "RuntimeError: no such thing"
    tool = type("Tool", (), {"ask": staticmethod(out_of_range)})
    assert peers.answer(tool, incident).causes == {"token-id-out-of-range"}


def test_a_tool_that_is_not_installed_is_a_row_that_says_so(monkeypatch):
    monkeypatch.setattr(msprobe_compare, "NEEDS", "no_such_package_anywhere")
    told = peers.asked("msprobe_compare", [], None)
    assert told.missing == "no_such_package_anywhere is not installed"


# --- how the others' words are read ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("peak", "norm", "cause"),
    [
        (70_000.0, 1.0, "fp16-overflow"),
        (math.inf, 1.0, "fp16-overflow"),
        (2000.0, 1.0, "residual-growth"),
        (2000.0, 60.0, "residual-growth"),
        (900.0, 60.0, "learning-rate-too-high"),
        (900.0, 1e-7, "vanishing-gradient"),
        (900.0, 1.0, None),
        (math.nan, 1.0, None),
    ],
)
def test_the_published_rules_in_their_order(peak, norm, cause):
    saying = published_script.of_numbers({"layers.1.mlp": peak}, {"layers.1.mlp.up.weight": norm})
    assert (cause in saying.causes) if cause else not saying.alarm


def test_the_published_score():
    assert published_script.row_score([7] * 100) == pytest.approx(0.5 * 95 / 96 + 0.5)
    assert published_script.row_score(range(256)) == 0.0  # 8 bits, and no 4-gram twice
    assert published_script.of_batch([[7] * 100, list(range(256)), list(range(256))]).rows == (0,)
    assert not published_script.of_batch([list(range(256))] * 3).alarm


FRAME = """
                  model.blocks.2.mlp.up_proj Linear
0.00e+00      nan {what}
0.00e+00 1.00e+00 input[0]
"""


@pytest.mark.parametrize(
    ("bad", "finite", "cause"),
    [
        ("weight has nans", True, "nonfinite-weights"),
        ("output has infs", True, "fp16-overflow"),
        ("output has infs", False, "corrupt-weights"),
    ],
)
def test_the_overflow_debuggers_frames(bad, finite, cause):
    saying = overflow_debugger.read(f"{bad}\n\nDetected inf/nan during batch_number=0\n{FRAME}", finite)
    assert saying.causes == {cause} and saying.places == ("blocks.2.mlp.up_proj",)


def test_the_overflow_debugger_on_a_planted_nan():
    incident = next(i for i in peers.chosen(1, 0) if i.name == "an infinity in an MLP")
    saying = peers.answer(overflow_debugger, incident)
    assert saying.causes == {"nonfinite-weights"} and pointed(saying, incident.truth, 4), saying


def test_another_dtype_alone_flags_no_module():
    dtype = json.dumps(["error: The dtype of NPU and Bench are inconsistent."])
    off = json.dumps(["error: The dtype of NPU and Bench are inconsistent.", "error: The output is off."])
    table = pandas.DataFrame(
        {
            "NPU Name": [
                "Module.model.layers.0.mlp.MLP.forward.0.output.0",
                "Module.lm_head.Linear.backward.0.input.0",
                "Module.model.embed.Embedding.parameters_grad.0.weight",
            ],
            "Result": ["error", "error", "pass"],
            "Err_message": [dtype, off, "[]"],
        }
    )
    assert msprobe_compare.flagged(table) == ["lm_head"]
    names = ["model.layers.0.mlp", "lm_head", "model.embed"]
    assert list(table["NPU Name"].map(msprobe_compare.module_of)) == names
