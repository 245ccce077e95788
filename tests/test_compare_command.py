"""`probe compare-precision` end to end: files in, one sentence first, JSON by the interface."""

import json
import math
from pathlib import Path

import pytest
import torch

from stability_probe.compare import run_compare_precision
from stability_probe.compare.report import sections, to_json, to_markdown, to_text
from stability_probe.compare.result import Comparison, ModuleError, OutputReport, ParameterError, PrecisionResult
from stability_probe.compare.verdict import culprits, explained_share, judge, summary
from stability_probe.errors import ProbeError
from stability_probe.models.decoder import Decoder, DecoderConfig


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("incident")
    torch.manual_seed(0)
    config = DecoderConfig(vocab_size=50, n_layer=2, n_head=2, d_model=16)
    torch.save({"model": Decoder(config).state_dict(), "config": config.to_dict()}, folder / "ckpt.pt")
    torch.save({"input_ids": torch.randint(0, 50, (2, 12))}, folder / "batch.pt")
    return folder


def test_reports_are_written_and_printed(incident: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = [incident / "c.json", incident / "c.md"]
    code = run_compare_precision(
        incident / "ckpt.pt",
        incident / "batch.pt",
        ["bf16", "fp16"],
        out=out,
        baseline=[incident / "batch.pt"],
        quiet=True,
    )
    printed = capsys.readouterr()
    assert code == 0 and printed.err == ""
    data = json.loads(out[0].read_text())
    assert data["command"] == "compare-precision" and data["schema_version"] == 1
    assert printed.out.startswith(data["summary"].split(" ")[0])
    assert f"**{data['summary'][:3]}" in out[1].read_text()
    bf16 = data["precisions"]["bf16"]
    assert {"loss", "loss_gap", "global_grad_norm", "modules", "parameters"} <= set(bf16)
    expected = {"module", "relative_error", "introduced_error", "cosine", "absmax", "nonfinite", "outside_range"}
    assert all(expected <= set(m) for m in bf16["modules"])
    assert all({"parameter", "grad_relative_error", "grad_cosine"} <= set(p) for p in bf16["parameters"])
    assert {m["module"] for m in bf16["modules"]} >= {"blocks.0.attn.q_proj", "blocks.1", "head"}
    assert data["baseline_loss"] == pytest.approx(data["loss"])


@pytest.mark.parametrize(
    ("precisions", "options", "exit_code"),
    [(["bf17"], {}, 2), ([], {}, 2), (["bf16"], {"out": [Path("x.pdf")]}, 2), (["bf16:fp32=nowhere"], {}, 2)],
)
def test_wrong_usage(incident: Path, precisions: list[str], options: dict, exit_code: int) -> None:
    with pytest.raises(ProbeError) as raised:
        run_compare_precision(incident / "ckpt.pt", incident / "batch.pt", precisions, quiet=True, **options)
    assert raised.value.exit_code == exit_code


def test_a_missing_batch_is_an_unreadable_input(incident: Path) -> None:
    with pytest.raises(ProbeError) as raised:
        run_compare_precision(incident / "ckpt.pt", incident / "none.pt", ["bf16"], quiet=True)
    assert raised.value.exit_code == 3


def module_error(name: str, introduced: float = 0.002, **changes: object) -> ModuleError:
    values = {
        "module": name,
        "role": "linear",
        "layer": 0,
        "relative_error": 0.01,
        "introduced_error": introduced,
        "own_error": introduced,
        "own_site": "output",
        "amplified_error": math.nan,
        "cosine": 0.9999,
        "absmax": 1.0,
        "nonfinite": 0,
        "outside_range": 0.0,
        "bias": 0.0,
        "bias_z": 0.0,
        "signed_bias": 0.0,
        "sibling_error": 0.002,
        **changes,
    }
    return ModuleError(**values)  # type: ignore[arg-type]


def precision_result(*modules: ModuleError, **changes: object) -> PrecisionResult:
    values = {
        "name": "bf16",
        "summary": "bf16",
        "emulated": True,
        "loss": 3.001,
        "loss_gap": 0.001,
        "token_gap": 0.03,
        "global_grad_norm": 1.0,
        "grad_relative_error": 0.03,
        "grad_cosine": 0.999,
        "nonfinite": 0,
        "first_nonfinite": None,
        "seconds": 1.0,
        "modules": modules,
        "parameters": (ParameterError("w", 0.03, 0.999, 1.0, 1.0),),
        "ranges": (),
        "output": OutputReport("bf16", 0.1, 0.0, 0.01, 0.01),
        "tokens": ({"row": 0, "position": 1, "token": 2, "target": 3, "loss_fp32": 1.0, "loss": 1.2},),
        "culprits": culprits(modules),
        **changes,
    }
    return PrecisionResult(**values)  # type: ignore[arg-type]


UNIT = 2.0**-8


def test_ordinary_rounding_is_a_no_and_near_misses_too() -> None:
    severity, sentence = judge(precision_result(module_error("a")), UNIT, 3.0, 40.0)
    assert severity == 0 and sentence.startswith("No fault: ")
    assert judge(precision_result(loss_gap=0.039), UNIT, 3.0, 40.0)[0] == 0
    assert judge(precision_result(loss_gap=0.041), UNIT, 3.0, 40.0)[0] == 2


def test_the_baseline_excuses_a_gap_that_it_has_too() -> None:
    assert judge(precision_result(loss_gap=0.1, baseline_loss_gap=0.09), UNIT, 3.0, 40.0)[0] == 0
    assert judge(precision_result(loss_gap=0.1, baseline_loss_gap=0.001), UNIT, 3.0, 40.0)[0] == 2


def test_coarser_formats_are_allowed_more() -> None:
    assert judge(precision_result(loss_gap=0.1), UNIT, 3.0, 40.0)[0] == 2
    assert judge(precision_result(loss_gap=0.1), 2.0**-2, 3.0, 40.0)[0] == 0


def test_non_finite_values_are_told_with_their_first_module() -> None:
    result = precision_result(nonfinite=7, first_nonfinite="layers.3.mlp", loss=math.nan)
    severity, sentence = judge(result, UNIT, 3.0, 40.0)
    assert severity == 2 and "`layers.3.mlp`" in sentence
    assert judge(result, UNIT, math.nan, 40.0)[0] == 0


def test_what_a_culprit_does_is_said() -> None:
    hot = module_error("l.attn", 0.3, role="attention", amplified_error=0.3, own_error=0.002, stands_out=True)
    biased = module_error("l.mlp", 0.01, bias=-0.8, bias_z=-90.0, stands_out=True)
    assert "logits reach 900" in judge(precision_result(hot), UNIT, 3.0, 900.0)[1]
    assert "modules inside" in judge(precision_result(hot), UNIT, 3.0, 10.0)[1]
    assert "toward zero" in judge(precision_result(biased), UNIT, 3.0, 10.0)[1]


def test_an_outer_module_is_not_blamed_for_an_inner_one() -> None:
    inner, outer = module_error("l.attn.norm", 0.1, stands_out=True), module_error("l.attn", 0.12, stands_out=True)
    assert culprits((inner, outer)) == ("l.attn.norm",)
    small = module_error("l.attn.norm", 0.01, stands_out=True)
    assert culprits((small, outer)) == ("l.attn", "l.attn.norm")


def test_share_of_the_excess_that_is_precisions() -> None:
    result = precision_result(loss=5.0, baseline_loss_gap=0.0)
    assert explained_share(result, 3.0, 3.0) == 1.0
    assert explained_share(result, 5.0, 3.0) == 0.0
    assert explained_share(result, 4.0, 3.0) == pytest.approx(0.5)
    assert explained_share(result, 4.0, None) is None


def test_reports_survive_hostile_names_and_nan() -> None:
    evil = "layers.0.\x1b[31m|`x`\u202e"
    result = precision_result(
        module_error(evil, math.nan, relative_error=math.inf), sentence="No fault: `a`|b", severity=0
    )
    found = Comparison(summary([result]), 3.0, 1.0, None, math.nan, 1.0, {"bf16": result})
    text, markdown = to_text(found), to_markdown(found)
    assert "\x1b" not in text + markdown and "\u202e" not in text + markdown
    rows = [line for line in markdown.splitlines() if line.startswith("| ") and "layers" in line]
    assert rows and all(line.count("|") == 10 for line in rows)
    assert json.loads(to_json(found))["precisions"]["bf16"]["modules"][0]["relative_error"] == "inf"
    assert next(iter(sections(found))).lines[0] == "No fault: `a`|b"


def test_the_most_serious_precision_leads() -> None:
    mild, grave = precision_result(sentence="mild", severity=0), precision_result(sentence="grave", severity=2)
    assert summary([mild, grave]) == "grave"
    assert summary([]).startswith("No")
