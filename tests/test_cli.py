"""The command line: light starts, right streams, right exit codes, no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stability_probe import cli
from stability_probe.errors import ProbeError
from stability_probe.reports import render, write
from tests.report_samples import healthy, repeated, unexplained

HEAVY = ("torch", "numpy", "pandas", "transformers")
ROOT = Path(__file__).parent.parent


def invoke(*arguments, **environment):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env=environment)


@pytest.fixture
def run_json(tmp_path):
    write(repeated(), tmp_path / "run.json")
    return tmp_path / "run.json"


@pytest.fixture
def pipeline(monkeypatch):
    """Stands for the pipeline: keeps the request, and returns or raises what the test sets."""
    fake = types.ModuleType("stability_probe.pipeline")
    fake.result = repeated()

    def run(request, progress):
        fake.request = request
        with progress.stage("replay", total=2) as advance:
            advance()
        if isinstance(fake.result, BaseException):
            raise fake.result
        return fake.result

    fake.run = run
    monkeypatch.setitem(sys.modules, "stability_probe.pipeline", fake)
    return fake


# --- light starts -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["replay", "--help"],
        ["rules"],
        ["explain", "none"],
        ["report", "RUN"],
        ["report", "RUN", "--format", "markdown", "--out", "x.md"],
    ],
)
def test_light_commands_import_nothing_heavy(run_json, arguments):
    """Run for real in a fresh interpreter; the modules are told at exit."""
    code = (
        "import atexit, sys\n"
        f"atexit.register(lambda: print('HEAVY', [m for m in {HEAVY} if m in sys.modules], file=sys.stderr))\n"
        "from stability_probe.cli import main\n"
        "sys.argv[0] = 'probe'\n"
        "main()\n"
    )
    arguments = [str(run_json) if argument == "RUN" else argument for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=run_json.parent, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stderr
    assert done.stdout


# --- report -------------------------------------------------------------------------------------


def test_a_saved_run_is_rendered_again(run_json):
    done = invoke("report", run_json)
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == render(repeated(), "terminal", width=100, colour=False)


def test_standard_output_holds_the_report_only(run_json, tmp_path):
    done = invoke("report", run_json, "--format", "json", "--out", tmp_path / "a.md", "--out", tmp_path / "b.json")
    assert json.loads(done.stdout)["verdict"]["cause"] == "repeated-tokens"
    assert "report written to" in done.stderr
    assert (tmp_path / "a.md").read_text().startswith("## ") and json.loads((tmp_path / "b.json").read_text())
    assert invoke("report", run_json, "--out", tmp_path / "c.md", "--quiet").stderr == ""


def test_piped_output_has_no_escapes_and_takes_columns(run_json):
    for columns in ("80", "120"):
        done = invoke("report", run_json, COLUMNS=columns)
        assert done.stdout == render(repeated(), "terminal", width=int(columns), colour=False)
    assert "\x1b[" in invoke("report", run_json, FORCE_COLOR="1").stdout
    assert "\x1b[" not in invoke("report", run_json, FORCE_COLOR="1", NO_COLOR="1").stdout


@pytest.mark.parametrize(("made", "code"), [(repeated, 1), (unexplained, 1), (healthy, 0)])
def test_fail_on_found(tmp_path, made, code):
    write(made(), tmp_path / "run.json")
    assert invoke("report", tmp_path / "run.json").exit_code == 0
    assert invoke("report", tmp_path / "run.json", "--fail-on", "found").exit_code == code


def test_html_is_refused_before_anything_is_printed(run_json, tmp_path):
    done = invoke("report", run_json, "--out", tmp_path / "run.html")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "not available yet" in done.stderr


@pytest.mark.parametrize("text", ["{", "{}", "[1]"])
def test_a_file_that_is_no_report(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    done = invoke("report", tmp_path / "run.json")
    assert (done.exit_code, done.stdout) == (3, "")
    assert "why:" in done.stderr and "try:" in done.stderr and "Traceback" not in done.stderr


# --- replay -------------------------------------------------------------------------------------


def test_replay_hands_over_every_option(pipeline):
    done = invoke(
        "replay",
        "--ckpt",
        "c",
        "--batch",
        "b",
        "--baseline",
        "h1",
        "--baseline",
        "h2",
        "--log",
        "l",
        "--step",
        "420",
        "--model",
        "m.py:make",
        "--config",
        "g",
        "--optimizer",
        "o",
        "--tokenizer",
        "t",
        "--labels",
        "shifted",
        "--lr",
        "3e-4",
        "--grad-clip",
        "1",
        "--precisions",
        "bf16, fp16",
        "--device",
        "cpu",
        "--microbatch",
        "2",
        "--max-rows",
        "3",
        "--max-positions",
        "64",
        "--no-confirm",
        "--trust-code",
    )
    assert done.exit_code == 0, done.stderr
    request = pipeline.request
    assert (request.ckpt, request.batch, request.baselines) == (Path("c"), Path("b"), (Path("h1"), Path("h2")))
    assert (request.logs, request.step, request.model) == ((Path("l"),), 420, "m.py:make")
    assert (request.config, request.optimizer, request.tokenizer) == (Path("g"), Path("o"), Path("t"))
    assert (request.labels, request.lr, request.grad_clip) == ("shifted", 3e-4, 1.0)
    assert (request.precisions, request.device, request.microbatch) == (("bf16", "fp16"), "cpu", 2)
    assert (request.max_rows, request.max_positions, request.confirm, request.trust_code) == (3, 64, False, True)


def test_replay_prints_the_report(pipeline):
    done = invoke("replay", "--ckpt", "c", "--batch", "b")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == render(repeated(), "terminal", width=100)
    assert invoke("replay", "--ckpt", "c", "--batch", "b", "--fail-on", "found").exit_code == 1


def test_replay_of_a_folder(pipeline, tmp_path):
    (tmp_path / "incident.json").write_text('{"ckpt": "c", "batch": "b.pt", "step": 7}')
    done = invoke("replay", tmp_path, "--step", "8")
    assert done.exit_code == 0, done.stderr
    assert (pipeline.request.step, pipeline.request.batch) == (8, tmp_path / "b.pt")


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay"],
        ["replay", "--ckpt", "c"],
        ["replay", "--batch", "b"],
        ["replay", "--ckpt", "c", "--batch", "b", "--format", "pdf"],
        ["replay", "--ckpt", "c", "--batch", "b", "--microbatch", "0"],
        ["replay", "--ckpt", "c", "--batch", "b", "--fail-on", "lost"],
        ["replay", "--ckpt", "c", "--batch", "b", "--out", "x.html"],
        ["replay", "--ckpt", "c", "--batch", "b", "--out", "nowhere/x.md"],
        ["frobnicate"],
        ["explain"],
        ["explain", "atention-logit-growth"],
        ["batch-audit"],
        ["compare-precision", "--ckpt", "c"],
    ],
)
def test_wrong_usage_is_2_and_says_so_on_standard_error(pipeline, arguments):
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr
    assert not hasattr(pipeline, "request")


FAILURES = [
    (ProbeError("cannot read x", "it is cut short", "copy it again"), 3, "try: copy it again"),
    (ProbeError("replay failed", "no", "no", 4), 4, "error: replay failed"),
    (ValueError("boom\x1b[2J"), 4, "bug in probe"),
    (MemoryError(), 4, "--microbatch 1"),
    (RuntimeError("CUDA out of memory. Tried to allocate"), 4, "--max-positions"),
    (KeyboardInterrupt(), 130, "interrupted"),
]


@pytest.mark.parametrize(("failure", "code", "told"), FAILURES)
def test_failures_are_messages(pipeline, tmp_path, failure, code, told):
    pipeline.result = failure
    done = invoke("replay", "--ckpt", "c", "--batch", "b", "--out", tmp_path / "x.md")
    assert (done.exit_code, done.stdout) == (code, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_debug_shows_the_traceback(pipeline):
    pipeline.result = ValueError("boom")
    done = invoke("replay", "--ckpt", "c", "--batch", "b", "--debug")
    assert isinstance(done.exception, ValueError)


def test_a_reader_that_leaves_early_is_no_error(run_json):
    command = (
        f"{sys.executable} -m stability_probe.cli report {run_json} --format json | head -n 1; exit ${{PIPESTATUS[0]}}"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_the_whole_report(run_json, encoding):
    command = [sys.executable, "-m", "stability_probe.cli", "report", str(run_json)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, capture_output=True, env=environment)
    shown, full = done.stdout.decode(encoding), render(repeated(), "terminal", width=100)
    assert done.returncode == 0
    assert [len(line) for line in shown.splitlines()] == [len(line) for line in full.splitlines()]
    assert shown.startswith("+- verdict ---") and "> 3.594" in shown


# --- the commands of other modules --------------------------------------------------------------


def _fake(monkeypatch, module, **functions):
    fake = types.ModuleType(module)
    for name, function in functions.items():
        setattr(fake, name, function)
    monkeypatch.setitem(sys.modules, module, fake)


def test_batch_audit_hands_over(monkeypatch):
    seen = {}
    _fake(
        monkeypatch,
        "stability_probe.audit.command",
        run_batch_audit=lambda paths, **options: seen.update(paths=paths, **options) or 3,
    )
    done = invoke(
        "batch-audit", "--batch", "a", "--batch", "b", "--vocab-size", "50", "--labels", "shifted", "--format", "json"
    )
    assert done.exit_code == 3
    assert seen == {
        "paths": [Path("a"), Path("b")],
        "baseline": [],
        "tokenizer": None,
        "labels": "shifted",
        "vocab_size": 50,
        "out": [],
        "format": "json",
        "quiet": False,
    }


@pytest.mark.parametrize("arguments", [["a", "b"], ["--batch", "a", "b"]])
def test_batch_audit_takes_paths_with_and_without_the_option(monkeypatch, arguments):
    seen = []
    _fake(monkeypatch, "stability_probe.audit.command", run_batch_audit=lambda paths, **_: seen.extend(paths) or 0)
    assert invoke("batch-audit", *arguments).exit_code == 0
    assert seen == [Path("a"), Path("b")]


def test_batch_audit_without_a_path_says_how_to_give_one():
    done = invoke("batch-audit")
    assert done.exit_code == 2 and "--batch PATH" in done.stderr


@pytest.mark.parametrize("command", ["replay", "report", "demo", "batch-audit", "compare-precision"])
def test_help_of_out_lists_what_is_written(command, tmp_path):
    """Every suffix that the help names is taken, and no other."""
    from stability_probe.compare.report import EXTENSIONS

    told = " ".join(invoke(command, "--help", COLUMNS="160").stdout.split())
    named = set(re.findall(r"\.[a-z]+(?=[,;:)])", told.split("Write the report too (")[1].split("repeatable")[0]))
    taken = {".md", ".json", ".txt"}
    taken = {"batch-audit": taken | {".csv", ".parquet"}, "compare-precision": set(EXTENSIONS)}.get(command, taken)
    assert named == taken


def test_compare_precision_hands_over(monkeypatch):
    seen = {}

    def run(ckpt, batch, precisions, **options):
        seen.update(ckpt=ckpt, batch=batch, precisions=precisions, **options)
        return 0

    _fake(monkeypatch, "stability_probe.compare", run_compare_precision=run)
    done = invoke(
        "compare-precision", "--ckpt", "c", "--batch", "b", "--precisions", "bf16,fp16", "--isolate", "--max-rows", "2"
    )
    assert done.exit_code == 0, done.stderr
    assert (seen["precisions"], seen["isolate"], seen["max_rows"]) == (("bf16", "fp16"), True, 2)
    assert set(seen) == {
        "ckpt",
        "batch",
        "precisions",
        "baseline",
        "model",
        "config",
        "labels",
        "device",
        "max_rows",
        "max_positions",
        "isolate",
        "out",
        "format",
        "quiet",
        "trust_code",
    }


def test_demo(monkeypatch):
    made = []
    _fake(
        monkeypatch,
        "stability_probe.demo",
        DEMOS={"repeated-tokens": "one bad row", "healthy": "nothing"},
        run_demo=lambda name, **options: made.append(name) or repeated(),
    )
    assert invoke("demo", "--list").stdout == "repeated-tokens  one bad row\nhealthy          nothing\n"
    assert invoke("demo").exit_code == 0 and invoke("demo", "healthy", "--fail-on", "found").exit_code == 1
    assert made == ["repeated-tokens", "healthy"]
    done = invoke("demo", "helthy")
    assert done.exit_code == 2 and "did you mean healthy?" in done.stderr


# --- catalogue ----------------------------------------------------------------------------------


def test_rules_lists_every_rule():
    from stability_probe.judge import load_rules

    shown = invoke("rules").stdout
    for slug in [*(rule.slug for rule in load_rules()), "none", "unexplained"]:
        assert slug in shown


def test_explain_shows_the_whole_page():
    from stability_probe.judge import load_rules

    rule = load_rules()[0]
    shown = " ".join(invoke("explain", rule.slug).stdout.split())
    assert rule.page.title in shown
    for remedy in rule.page.remedies:
        assert " ".join(remedy.action.split())[:40] in shown
    for limit in rule.thresholds.values():
        assert limit.source.split()[0] in shown


def test_explain_suggests_near_names():
    done = invoke("explain", "unexplaind")
    assert done.exit_code == 2 and "did you mean unexplained?" in done.stderr
