"""Who names the right cause? Asks this package and others about the same incidents (fixtures/verdict_incidents.py).

    python -m benchmarks.peers                       # a tenth (minutes)
    python -m benchmarks.peers --share 1             # all of its first two splits
    python -m benchmarks.peers --causes nonfinite-weights,fp16-overflow   # every incident of these, no controls
    python -m benchmarks.peers --tools ours,torchlens_bisect --told

Needs the extra `peers`; a tool that is not installed is a row that says so. Each tool runs in a process of its own,
because some of them replace parts of torch. How the words of each are read stands in its file, and errs to its favour:

- named: its words would lead an engineer to the cause, whether or not they name it; a tool may name several at once
  (how many is a column). An index out of range that the model raises by itself is everybody's hit.
- pointed: the first place that it names is in the right layer, module or rows (benchmarks/peers/material.py).
- alarms on healthy: it says of a healthy incident that something is wrong.

Incidents whose answer is "unexplained" are left out: there is no cause to name.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.peers.material import Material, Saying, named
from benchmarks.peers.table import Told, by_section, markdown, overview
from fixtures.verdict_incident import Incident
from fixtures.verdict_incidents import drawn

TOOLS = ("ours", "published_script", "overflow_debugger", "torchlens_bisect", "msprobe_compare", "trainscope_report")
SHARE = 0.1


def chosen(share: float, seed: int, causes: Collection[str] = ()) -> list[Incident]:
    """A share drawn by seed, or every incident of the causes where some are given."""
    incidents = drawn(1.0 if causes else share, seed)
    wanted = [incident for incident in incidents if not causes or incident.truth.causes[0] in causes]
    return [incident for incident in wanted if "unexplained" not in incident.truth.causes]


def answer(tool: Any, incident: Incident) -> Saying:
    """What a tool says; whatever it raises is its answer too."""
    with tempfile.TemporaryDirectory() as folder:
        material = Material.of(incident, Path(folder))
        began = time.perf_counter()
        try:
            saying = tool.ask(material)
        except IndexError as error:  # what the embedding raises, with or without a tool
            saying = Saying(str(error), frozenset({"token-id-out-of-range"}), alarm=True)
        except Exception as error:  # noqa: BLE001 counted, and the others still run
            saying = Saying(problem=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
        return replace(saying, told=saying.told[:300], seconds=time.perf_counter() - began)


def child(name: str, incidents: Sequence[Incident], into: Path) -> None:
    """Asks one tool, and writes a line of JSON per incident."""
    tool = importlib.import_module(f"benchmarks.peers.{name}")
    with into.open("w") as file:
        for incident in incidents:
            with contextlib.redirect_stdout(sys.stderr):
                saying = answer(tool, incident)
            file.write(json.dumps(saying.to_dict()) + "\n")
            file.flush()


def asked(name: str, incidents: Sequence[Incident], options: argparse.Namespace) -> Told:
    """The tool's answers, from a process of its own."""
    tool = importlib.import_module(f"benchmarks.peers.{name}")
    if importlib.util.find_spec(tool.NEEDS) is None:
        return Told(tool.NAME, missing=f"{tool.NEEDS} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "said.jsonl"
        given = ["--share", str(options.share), "--seed", str(options.seed), "--causes", options.causes]
        given += ["--ask", name, "--into", str(into)]
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", *given]
        quiet = {**os.environ, "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(command, capture_output=True, text=True, env=quiet, check=False)
        lines = into.read_text().splitlines() if into.exists() else []
    if len(lines) != len(incidents):
        return Told(tool.NAME, missing=(done.stderr.strip().splitlines() or ["it ended early"])[-1][:200])
    return Told(tool.NAME, tuple(Saying.from_dict(json.loads(line)) for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description="Who names the right cause?")
    parser.add_argument("--share", type=float, default=SHARE, help="of the incidents, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--causes", default="", help="slugs, by comma: all incidents of these in place of the share")
    parser.add_argument("--tools", default=",".join(TOOLS), help="files of benchmarks/peers, by comma")
    parser.add_argument("--told", action="store_true", help="print what each said of each incident")
    parser.add_argument("--ask", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    incidents = chosen(options.share, options.seed, [cause for cause in options.causes.split(",") if cause])
    if options.ask:
        child(options.ask, incidents, options.into)
        return
    answers = []
    for name in options.tools.split(","):
        began = time.perf_counter()
        answers.append(asked(name, incidents, options))
        print(f"{answers[-1].tool}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        if options.told:
            print_told(incidents, answers[-1])
    healthy = sum(incident.truth.healthy for incident in incidents)
    print(f"{len(incidents)} incidents, {healthy} of them healthy\n")
    print(markdown(overview(incidents, answers)), end="\n\n")
    print(markdown(by_section(incidents, answers)))


def print_told(incidents: Sequence[Incident], told: Told) -> None:
    for incident, saying in zip(incidents, told.sayings, strict=False):
        mark = "=" if named(saying, incident.truth) else "!" if saying.alarm else "?" if saying.problem else " "
        print(f"{mark} {incident.name} ({incident.truth.causes[0]}): {saying.problem or saying.told}")


if __name__ == "__main__":
    main()
