"""`probe demo`: every planted fault gets its name and its place, and the healthy run is called healthy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from stability_probe import demo, demo_incidents
from stability_probe.cli import app
from stability_probe.reports.saved import load
from stability_probe.schema import Report

SHIPPED_BYTES = 2_000_000
LAYER, HEAD, ROW = demo_incidents.LAYER, demo_incidents.HEAD, demo_incidents.ROW


def diagnosed(name: str, folder: Path) -> tuple[Report, str]:
    saved = folder / "report.json"
    result = CliRunner().invoke(app, ["demo", name, "--quiet", "--out", str(saved)])
    assert result.exit_code == 0, result.output
    return load(saved), result.output


def test_repeated_tokens(tmp_path: Path) -> None:
    report, printed = diagnosed("repeated-tokens", tmp_path)
    verdict = report.verdict
    assert (verdict.cause, verdict.status, verdict.location.rows) == ("repeated-tokens", "confirmed", (ROW,))
    assert verdict.explained is not None and verdict.explained >= 0.8
    ((row, start, end),) = verdict.location.positions
    assert (row, end) == (ROW, 128) and abs(start - 12) <= 1
    last = printed.strip().splitlines()[-1]
    assert last.startswith("planted: ") and f"row {ROW}" in last
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text("utf-8")
    verdict_box = printed[printed.index("╭") : printed.index("╯") + 1]
    assert verdict_box in readme and last in readme, "paste what `COLUMNS=100 probe demo` prints into README.md"


def test_attention_logit_growth(tmp_path: Path) -> None:
    verdict = diagnosed("attention-logit-growth", tmp_path)[0].verdict
    assert verdict.cause == "attention-logit-growth" and verdict.status in ("confirmed", "latent")
    assert (verdict.location.layer, verdict.location.heads[0]) == (LAYER, (LAYER, HEAD))


def test_label_misalignment(tmp_path: Path) -> None:
    verdict = diagnosed("label-misalignment", tmp_path)[0].verdict
    assert (verdict.cause, verdict.status) == ("label-misalignment", "confirmed")
    assert "1 position" in verdict.summary


def test_corrupt_weights(tmp_path: Path) -> None:
    verdict = diagnosed("corrupt-weights", tmp_path)[0].verdict
    assert (verdict.cause, verdict.status) == ("corrupt-weights", "confirmed")
    assert verdict.location.parameters[0] == f"blocks.{LAYER}.mlp.up_proj.weight[17, 40]"


def test_stale_second_moment(tmp_path: Path) -> None:
    verdict = diagnosed("stale-second-moment", tmp_path)[0].verdict
    assert (verdict.cause, verdict.status) == ("stale-second-moment", "confirmed")
    assert verdict.location.layers == (LAYER,)


def test_healthy(tmp_path: Path) -> None:
    verdict = diagnosed("healthy", tmp_path)[0].verdict
    assert (verdict.cause, verdict.status, verdict.ranked) == ("none", None, ())


def test_the_list_needs_no_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from stability_probe.cli import app; "
        "print(CliRunner().invoke(app, ['demo', '--list']).output); assert 'torch' not in sys.modules"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert [line.split()[0] for line in printed.strip().splitlines()] == list(demo.DEMOS)
    assert next(iter(demo.DEMOS)) == "repeated-tokens"


def test_what_was_planted_stays_out_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run_demo("healthy", format="json")
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"]["cause"] == "none"
    assert "planted: nothing" in printed.err


# --- the shipped run ----------------------------------------------------------------------------


def test_what_ships_is_small_and_trained() -> None:
    assert sum(path.stat().st_size for path in demo_incidents.DATA.iterdir()) < SHIPPED_BYTES
    run = demo_incidents.load_run()
    loss, _ = demo_incidents.loss_and_gradients(run.model, run.ids_BT, run.ids_BT)
    counts = torch.bincount(run.ids_BT.flatten()).double()
    share = counts / counts.sum()
    unigram_nats = -torch.special.xlogy(share, share).sum().item()
    assert loss < unigram_nats - 1.5
    usual = sorted(record["loss"] for record in run.log)[len(run.log) // 2]
    assert abs(loss - usual) < 0.3  # the rows are the run's own next ones


def test_its_moments_are_those_of_the_optimizer() -> None:
    """The averages against torch's own AdamW, on the same gradients and with a learning rate of 0."""
    run = demo_incidents.load_run()
    batches = [run.baseline_BT, run.later_BT, run.ids_BT]
    betas = tuple(run.settings["betas"])
    moments = demo_incidents.moments_on(run.model, batches, betas)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.0, betas=betas, weight_decay=0.0)
    for ids_BT in batches:
        _, gradients = demo_incidents.loss_and_gradients(run.model, ids_BT, ids_BT)
        for name, parameter in run.model.named_parameters():
            parameter.grad = gradients[name]
        optimizer.step()
    for name, parameter in run.model.named_parameters():
        for key, beta in zip(("exp_avg", "exp_avg_sq"), betas, strict=True):
            expected = optimizer.state[parameter][key] / (1 - beta ** len(batches))
            torch.testing.assert_close(moments[name][key], expected, rtol=1e-4, atol=1e-12)


def test_its_step_is_the_optimizers() -> None:
    """One step of the played run against torch's AdamW, resumed from the same moments."""
    run = demo_incidents.load_run()
    twin = demo_incidents.load_run()
    lr = 3e-4
    _, gradients = demo_incidents.loss_and_gradients(run.model, run.ids_BT, run.labels_BT)
    optimizer = torch.optim.AdamW(
        twin.model.parameters(), lr=lr, betas=tuple(run.settings["betas"]), weight_decay=run.settings["weight_decay"]
    )
    for name, parameter in twin.model.named_parameters():
        parameter.grad = gradients[name]
        moments = {key: value.clone() for key, value in run.moments[name].items()}
        # So many steps that the bias correction is 1.
        optimizer.state[parameter] = {**moments, "step": torch.tensor(100_000.0)}
    optimizer.step()
    demo_incidents.take_step(run, gradients, lr)
    for (name, mine), theirs in zip(run.model.named_parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7, msg=name)
