"""Set-up files: what they pin agrees with what the package asks for, and the README's example runs as printed."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


def pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text("utf-8")


def asked_for() -> list[Requirement]:
    """The requirements in `dependencies` and in the extras."""
    tables = pyproject().split("[project.scripts]")[0].split("dependencies = [", 1)[1]
    return [Requirement(text) for text in re.findall(r'"([^"\s]+>=[^"\s]+)"', tables)]


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.13"])
def test_every_requirement_is_pinned_once_within_its_range(python: str) -> None:
    pinned: dict[str, str] = {}
    for pin in pins():
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert normal(pin.name) not in pinned, pin
            (clause,) = pin.specifier
            assert clause.operator == "=="
            pinned[normal(pin.name)] = clause.version
    wanted = asked_for()
    assert {"torch", "transformers", "pytest", "gguf"} <= {requirement.name for requirement in wanted}
    for requirement in wanted:
        assert requirement.specifier.contains(pinned[normal(requirement.name)]), requirement


def test_make_names_its_targets() -> None:
    printed = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for target in ("demo", "test", "lint", "acceptance", "bench", "bench-peers", "docs"):
        assert f"make {target} " in printed


def test_ci_runs_lint_before_the_tests() -> None:
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert script.index("make lint") < script.index("make test")


def blocks(language: str) -> list[str]:
    readme = (ROOT / "README.md").read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", readme, re.M | re.S)


def test_the_example_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    for block in blocks("python"):
        name = re.match(r"# (\w+\.py)", block)
        assert name, "a Python block of the README starts with its file name"
        (tmp_path / name[1]).write_text(block)
    (shell,) = [block for block in blocks("sh") if "--model" in block]
    for line in shell.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        command = {"python": [sys.executable], "probe": [sys.executable, "-m", "stability_probe.cli"]}[program]
        result = subprocess.run([*command, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
    assert "attention logits" in result.stdout or "verdict" in result.stdout
